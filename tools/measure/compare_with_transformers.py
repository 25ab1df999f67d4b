"""Compares a bundle's greedy tokens with transformers' generate in float32, prompt by prompt.

    python -m tools.measure.compare_with_transformers --prompts spec_bench.jsonl --bundle DIR

Runs every drafter of the bundle, prompt_lookup and none. A difference is listed with its position,
both tokens, and the gap between their logits in transformers after the common prefix: a near tie is
rounding, a wide gap a fault. Exit code 1 where there is any difference.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import spec_runtime
from spec_export.model import target
from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.measure.audit import first_difference
from spec_runtime.measure.prompts import BenchPrompt, read_prompts
from spec_runtime.proposers import BUILT_IN
from tools.figures import command_line, parse, run, write


def evenly(prompts: list[BenchPrompt], num: int) -> list[BenchPrompt]:
    """Returns `num` of them, evenly spaced in the order of ids: of 480, 20 are 0, 24, 48, …"""
    ordered = sorted(prompts, key=lambda prompt: prompt.id)
    num = min(num, len(ordered))
    return [ordered[i * len(ordered) // num] for i in range(num)]


def expected_tokens(model: Any, ids: list[int], max_new_tokens: int) -> list[int]:
    """Returns the new tokens of transformers' greedy `generate`."""
    ids_BT = torch.tensor([ids])
    with torch.inference_mode():
        out_BT = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return out_BT[0, len(ids) :].tolist()


def gap(model: Any, ids: list[int], expected: int | None, got: int | None) -> float | None:
    """Returns the logit of the expected token less that of the one got, after `ids`; None if either
    generation had ended."""
    if expected is None or got is None:
        return None
    with torch.inference_mode():
        logits_V = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    return float(logits_V[expected] - logits_V[got])


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Decodes the prompts with transformers and with each drafter; returns where they differ."""
    folder = args.bundle or bundles.find()
    manifest = bundles.read(folder).manifest
    engine = spec_runtime.load(folder, "none", verify=False)
    drafters = args.drafter or [*(drafter.name for drafter in manifest.drafters), *BUILT_IN]
    engines = {name: engine.with_drafter(name) for name in drafters}
    model, tokenizer = target.load(target.resolve(args.model))
    prompts = evenly(read_prompts(args.prompts), args.num)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in drafters}
    tokens = 0
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for prompt in progress.track(prompts, description="comparing"):
            content = prompt.content
            messages = (
                [{"role": "user", "content": content}] if isinstance(content, str) else content
            )
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            if engine.encode(content) != ids:
                raise UserError(f"prompt {prompt.id}: the bundle encodes it otherwise")
            expected = expected_tokens(model, ids, args.max_new_tokens)
            tokens += len(expected)
            for name, each in engines.items():
                got = each.generate(ids, max_new_tokens=args.max_new_tokens, reuse=False).token_ids
                at = first_difference(expected, got)
                if at is None:
                    continue
                pair = [part[at] if at < len(part) else None for part in (expected, got)]
                results[name].append(
                    {
                        "prompt": prompt.id,
                        "position": at,
                        "expected": _token(tokenizer, pair[0]),
                        "got": _token(tokenizer, pair[1]),
                        "gap": gap(model, [*ids, *expected[:at]], *pair),
                    }
                )
    figures = {
        "prompts": [prompt.id for prompt in prompts],
        "max_new_tokens": args.max_new_tokens,
        "tokens": tokens,
        "drafters": {
            name: {"identical": len(prompts) - len(differences), "differences": differences}
            for name, differences in results.items()
        },
    }
    return write(
        args.json,
        figures,
        prompts_file=args.prompts,
        prompts=prompts,
        manifest=manifest,
        packages=("torch", "transformers"),
    )


def _token(tokenizer: Any, token: int | None) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": tokenizer.decode([token])}


def main(words: list[str] | None = None) -> int:
    parser = command_line(__doc__, "--bundle", "--prompts", "--max-new-tokens", "--json")
    parser.add_argument("--num", type=int, default=20, help="ids evenly spaced over the file")
    parser.add_argument("--model", help="what the bundle was built from; default: the demo")
    parser.add_argument("--drafter", action="append", help="default: all, prompt_lookup and none")
    args = parse(parser, words)
    result = compare(args)
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return int(any(each["differences"] for each in result["drafters"].values()))


if __name__ == "__main__":
    run(main)
