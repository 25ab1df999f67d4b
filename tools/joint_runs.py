"""Trains a drafter with its target from end to end and measures both, beside the frozen target.

    python tools/joint_runs.py medusa2 --data answers.jsonl --prompts spec_bench.jsonl \\
        --out runs/medusa2 --json results/joint-medusa2.json
    python tools/joint_runs.py semi_autoregressive --data answers.jsonl \\
        --prompts spec_bench.jsonl --out runs/semi --json results/joint-semi-autoregressive.json

medusa2: Medusa-1's heads on the frozen target, then heads and adapter together, from these heads.
semi_autoregressive: the drafter on the frozen target ("separate" training), and another one
together with an adapter ("joint"), of one form and budget.

Each stage is trained and built into a bundle of its target, the merged one after a joint stage.
Measured are the target's perplexity, on the shipped prose and on answers that were held out, and
the drafter's accepted length on the prompts, without prompt lookup. A stage that has finished under
--out with the same settings is not trained again, and one that was cut short goes on. --rows takes
the data's first rows, since features of all of them take long. --steps is for trying it out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from training_runs import EFFORT, trained

import spec_runtime
from spec_export import make_bundle, reference, target
from spec_export.bundling.options import BuildOptions
from spec_export.training import checkpoint, data, recipe
from spec_runtime import Engine
from spec_runtime.files.writing import require_writable, write_atomically
from spec_runtime.measure import bench, provenance, quality
from spec_runtime.measure.prompts import BenchPrompt, read_prompts

RECIPES = Path(__file__).parents[1] / "recipes" / "smollm2-135m"


@dataclass(frozen=True)
class Stage:
    """One training run: a recipe, overrides, and the stage whose drafter it starts from."""

    recipe: Path
    overrides: tuple[str, ...] = ()
    init: str | None = None


STUDIES: dict[str, Mapping[str, Stage]] = {
    "medusa2": {
        "heads": Stage(RECIPES / "medusa2_heads.toml"),
        "joint": Stage(RECIPES / "medusa2.toml", init="heads"),
    },
    "semi_autoregressive": {
        "separate": Stage(
            RECIPES / "semi_autoregressive.toml",
            (
                "drafter.soft_weight=0.0",
                "train.batch_tokens=1536",
                "train.betas=[0.9, 0.999]",
                "train.warmup=20",
                "train.max_steps=160",
            ),
        ),
        "joint": Stage(RECIPES / "semi_autoregressive_joint.toml"),
    },
}


@dataclass(frozen=True)
class Text:
    """Tokens to take perplexity on: `output`, behind `prompt`."""

    prompt: list[int]
    output: list[int]


def main(words: list[str] | None = None) -> None:
    """Runs the study that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="training rows, as JSONL")
    parser.add_argument("--rows", type=int, default=3000, help="so many of them, the first")
    parser.add_argument("--prompts", type=Path, required=True, help="to measure accepted length on")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="runs and bundles go here")
    parser.add_argument("--steps", type=int, help="optimiser steps of every stage")
    parser.add_argument("--set", action="append", default=[], help="overrides for all stages")
    parser.add_argument("--threads", type=int, help="CPU threads of decoding")
    parser.add_argument("--json", type=Path, required=True, help="the results go here")
    arguments = parser.parse_args(words)
    require_writable(arguments.json)
    prompts = read_prompts(arguments.prompts, per_category=arguments.per_category)
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = first_rows(arguments.data, arguments.rows, arguments.out / "rows.jsonl")
    common = [f"data.path={json.dumps(str(rows))}", *arguments.set]
    if arguments.steps is not None:
        common.append(f"train.max_steps={arguments.steps}")

    results: dict[str, Any] = {}
    for label, stage in STUDIES[arguments.study].items():
        print(f"stage {label}: {stage.recipe.name}", file=sys.stderr, flush=True)
        plan = recipe.load(stage.recipe, [*stage.overrides, *common])
        drafter = trained(
            stage.recipe,
            [*stage.overrides, *common],
            arguments.out / label,
            arguments.out / "features",
            init=None if stage.init is None else arguments.out / stage.init,
        )
        print(f"stage {label}: bundle and measurement", file=sys.stderr, flush=True)
        results[label] = training_of(drafter) | measured(
            bundle_of(plan, arguments.out / label, arguments.out / f"{label}-bundle"),
            plan,
            prompts,
            arguments.max_new_tokens,
            arguments.threads,
        )
        write_json(arguments, prompts, results)
    print(table(results))


def first_rows(path: Path, count: int, out: Path) -> Path:
    """Writes the first `count` rows of the data to `out` and returns it.

    A file that is there with the same rows keeps its date, so that the feature cache stays good.
    """
    rows = itertools.islice(data.read_rows(path), count)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in rows)
    if not out.is_file() or out.read_text(encoding="utf-8") != text:
        write_atomically(out, text)
    return out


def training_of(drafter: Path) -> dict[str, Any]:
    """Returns what a finished drafter says of its training.

    `train_seconds` are those of the whole run: features that it computed, validation, and the part
    before each stop.
    """
    about = checkpoint.load_drafter(drafter).provenance
    return {
        "recipe": about["recipe"],
        "steps": about["steps"],
        "train_seconds": round(json.loads((drafter.parent / EFFORT).read_text())["seconds"], 1),
        "validation": about["validation"],
    }


def bundle_of(plan: recipe.Recipe, run: Path, out: Path) -> Path:
    """Builds the bundle of a run's target, the merged one if it trained it, and its drafter."""
    model = plan.model if plan.joint is None else str(run / "target")
    return make_bundle.build(BuildOptions(model, [], [run], "fp32", out=out))


def measured(
    bundle: Path,
    plan: recipe.Recipe,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    threads: int | None,
) -> dict[str, Any]:
    """Returns the target's perplexities and the drafter's figures, from one bundle.

    `prose` and `held_out` are perplexities a token; `drafting` is `bench.summarise`.
    """
    engine = spec_runtime.load(bundle, plan.drafter_name, threads, lookup=False, profile=False)
    ids = engine.tokenizer.encode(reference.prose(), special_tokens=True)
    ids = ids[: engine.target.max_length]
    (report,) = bench.run([engine], prompts, max_new_tokens)
    return {
        "target_modified": plan.joint is not None,
        "prose": perplexity(engine, [Text(ids[:1], ids[1:])]),
        "held_out": perplexity(engine, held_out(plan, engine.target.max_length)),
        "drafting": bench.summarise(report),
    }


def held_out(plan: recipe.Recipe, max_length: int) -> list[Text]:
    """Returns the first answer of each row that validates, behind what comes before it."""
    _, tokenizer = target.load(target.resolve(plan.model))
    limit = min(plan.data.max_length, max_length)
    examples = data.read(plan.data_paths, tokenizer, limit, plan.data.sources)
    texts = []
    for example in data.split(examples, plan.data.validation_fraction)[1]:
        first = int(np.argmax(example.loss_T))
        ends = np.flatnonzero(~example.loss_T[first:])
        last = first + int(ends[0]) if len(ends) else len(example.token_T)
        ids = example.token_T.tolist()
        if first:
            texts.append(Text(ids[:first], ids[first:last]))
    return texts


def perplexity(engine: Engine, texts: Sequence[Text]) -> dict[str, float]:
    """Returns exp of the mean negative log-likelihood of the texts' tokens, and their number."""
    nats = -sum(quality.log_prob(engine.target, text.prompt, text.output) for text in texts)
    num_tokens = sum(len(text.output) for text in texts)
    return {"perplexity": math.exp(nats / num_tokens), "tokens": num_tokens}


def write_json(
    arguments: argparse.Namespace, prompts: Sequence[BenchPrompt], stages: Mapping[str, Any]
) -> None:
    result = {
        "study": arguments.study,
        "rows": arguments.rows,
        "max_new_tokens": arguments.max_new_tokens,
        "stages": stages,
        "provenance": provenance.collect(
            threads=arguments.threads,
            prompts_file=arguments.prompts,
            prompts=prompts,
            packages=("torch", "transformers", "peft"),
        ),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


def table(results: Mapping[str, Any]) -> str:
    """Returns a Markdown table, a line a stage."""
    head = [
        "stage",
        "steps",
        "perplexity, prose",
        "held-out answers",
        "accepted length",
        "speed-up",
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for label, row in results.items():
        overall = row["drafting"]["overall"]
        texts = [f"{row[name]['perplexity']:.2f}" for name in ("prose", "held_out")]
        drafting = [f"{overall[name]:.2f}" for name in ("accepted_length", "speedup")]
        lines.append([label, str(row["steps"]), *texts, *drafting])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
