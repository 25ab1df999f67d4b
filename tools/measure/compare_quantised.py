"""Compares quantised forms of one model: how far each is from fp32, its size and its speed.

    python -m tools.measure.compare_quantised --reference FP32 --bundle DIR DIR --prompts FILE \\
        --json OUT

The fp32 bundle answers every prompt (greedy, --max-new-tokens). Each bundle then reads prompts and
answers: "divergence" is KL(fp32 ‖ bundle) in nats a token of the answers, "same choice" the share
of their tokens that both would choose, and "perplexity" that of the prompts' own text. Last, all
decode the same prompts in turns, plainly and with --drafter as a first load leaves it; tokens a
second are of decoding, without prefill, and "prompt" is that of prefill. Speeds are over those of
the first bundle, by round. A folder's name is the name of its row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import spec_runtime
from spec_runtime.engine import Engine
from spec_runtime.loop.stats import Stats
from spec_runtime.measure import tune
from spec_runtime.measure.prompts import read_prompts
from tools.figures import (
    asked,
    command_line,
    manifest_of,
    markdown,
    parse,
    run,
    spread,
    spread_text,
    write,
)
from tools.measure import quality

DRAFTED = " drafted"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns a row of figures for each bundle."""
    reference = spec_runtime.load(args.reference, "none", args.threads)
    prompts = read_prompts(args.prompts, args.limit)
    encoded = [reference.encode(prompt.content) for prompt in prompts]
    texts = [
        (ids, reference.generate(ids, max_new_tokens=args.max_new_tokens).token_ids)
        for ids in encoded
    ]
    rows = []
    for folder in args.bundle:
        quality.check_reference(manifest_of(folder), manifest_of(args.reference))
        with spec_runtime.load(folder, "none", args.threads) as engine:
            found = fidelity(reference, engine, texts)
        weights = sum(file.stat().st_size for file in (folder / "target").glob("*.bin"))
        rows.append({"bundle": folder.name, "bytes": weights, **found})
        print({name: value for name, value in rows[-1].items() if name != "bytes"}, flush=True)
    reference.close()
    for row, found in zip(rows, speeds(args, encoded), strict=True):
        row |= found
    return write(args.json, {"rows": rows}, prompts=prompts, **asked(args))


def fidelity(
    reference: Engine, engine: Engine, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[str, float]:
    """Returns how far the engine is from the reference along texts: prompts with their answers."""
    nats: dict[Engine, list[float]] = {reference: [], engine: []}
    divergences, num_same = [], 0
    for prompt, answer in texts:
        tokens, num_read = [*prompt[1:], *answer], len(prompt) - 1
        pairs = zip(
            *(quality.answer_rows(each.target, prompt[:1], tokens) for each in nats), strict=True
        )
        for i, rows in enumerate(pairs):
            log_p, log_q = map(_log_softmax, rows)
            if i < num_read:
                nats[reference].append(-float(log_p[tokens[i]]))
                nats[engine].append(-float(log_q[tokens[i]]))
            else:
                divergences.append(float(np.exp(log_p) @ (log_p - log_q)))
                num_same += int(log_p.argmax() == log_q.argmax())
    perplexity, exact = (math.exp(float(np.mean(nats[each]))) for each in (engine, reference))
    return {
        "divergence": float(np.mean(divergences)),
        "same_choice": num_same / len(divergences),
        "perplexity": perplexity,
        "perplexity_over_fp32": perplexity / exact,
    }


def _log_softmax(row_V: np.ndarray) -> np.ndarray:
    logits_V = row_V.astype(np.float64)
    logits_V -= logits_V.max()
    return logits_V - math.log(np.exp(logits_V).sum())


def speeds(args: argparse.Namespace, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Returns each bundle's speeds over all rounds, and how often the first bundle's they are."""
    engines = {
        f"{number}{kind}": spec_runtime.load(folder, drafter, args.threads)
        for number, folder in enumerate(args.bundle)
        for kind, drafter in (("", "none"), (DRAFTED, args.drafter))
    }
    rounds = [
        tune.race(engines, prompts, args.max_new_tokens, num_rounds=1) for _ in range(args.rounds)
    ]

    def spreads(kind: str, speed: Any) -> list[dict[str, Any]]:
        found = [[speed(each[f"{n}{kind}"]) for each in rounds] for n in range(len(args.bundle))]
        return [
            {
                "median": spread(each)["median"],
                "over_first": spread([a / b for a, b in zip(each, found[0], strict=True)]),
            }
            for each in found
        ]

    columns = {
        "plain": spreads("", lambda stats: stats.tokens_per_second),
        "drafted": spreads(DRAFTED, lambda stats: stats.tokens_per_second),
        "prompt": spreads("", _prompt_speed),
    }
    return [{name: column[n] for name, column in columns.items()} for n in range(len(args.bundle))]


def _prompt_speed(stats: Stats) -> float:
    return stats.prompt_tokens / stats.prefill_seconds


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as a Markdown table."""
    head = ["bundle", "MB", "divergence", "same choice", "perplexity over fp32's"]
    cells = [
        [
            row["bundle"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['divergence']:.4f}",
            f"{row['same_choice']:.1%}",
            f"{row['perplexity_over_fp32']:.3f}",
            *(f"{row[name]['median']:.1f}" for name in ("plain", "drafted", "prompt")),
            *(spread_text(row[name]["over_first"]) for name in ("plain", "drafted", "prompt")),
        ]
        for row in rows
    ]
    names = ["plain tokens/s", "drafted", "prompt"]
    return markdown([*head, *names, *(f"{each}, over the first" for each in names)], cells)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    flags = ("--drafter", "--prompts", "--limit", "--max-new-tokens", "--threads", "--json")
    found = command_line(__doc__, *flags, limit=16, max_new_tokens=96, drafter="prompt_lookup")
    found.add_argument("--reference", type=Path, required=True, help="the model's fp32 bundle")
    found.add_argument("--bundle", type=Path, nargs="+", required=True)
    found.add_argument("--rounds", type=int, default=2)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measures as the command line says, and prints the table."""
    print(table(measure(parse(parser(), words))["rows"]))


if __name__ == "__main__":
    run(main)
