"""Trains the variants of one drafter on the same data and budget, and prints them as one table.

    python tools/ablations.py num_masks --data answers.jsonl --cache FOLDER --out runs/num_masks \\
        --minutes-each 20
    python tools/ablations.py amphista --data answers.jsonl --cache FOLDER --out runs/amphista \\
        --steps 450 --set train.warmup=50
    python tools/ablations.py semi_autoregressive --data answers.jsonl --cache FOLDER \\
        --out runs/semi_autoregressive --steps 450 --set train.warmup=50

num_masks: ParallelSpec with 1 to 6 masks. amphista: the drafter and the five ablations of its
paper. semi_autoregressive: the networks h_q of its paper.

The first variant builds the feature cache, which takes no variant's time. A cache with num_masks'
taps, such as tools/train_drafters.py makes, serves all studies. A variant that has finished under
--out with the same settings is not trained again. A variant that fails is reported and left out,
and the exit code is 1. The table goes to the standard output; --json writes it to a file, with
everything else that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_export.training import checkpoint, recipe
from spec_export.training import run as train
from spec_export.training.validate import VALIDATION_BUDGET
from spec_runtime.files import require_writable, write_atomically
from spec_runtime.measure import provenance

RECIPES = Path(__file__).parents[1] / "recipes" / "smollm2-135m"


@dataclass(frozen=True)
class Study:
    """A recipe, and the overrides of each variant by its label."""

    recipe: Path
    variants: Mapping[str, tuple[str, ...]]


STUDIES = {
    "amphista": Study(
        RECIPES / "amphista.toml",
        {
            "full": (),
            "without auto-embedding": ("drafter.auto_embedding=false",),
            "without position table": ("drafter.position_table=false",),
            "without staged adaptation": ("drafter.staged=none",),
            "one adaptation layer": ("drafter.staged=one",),
            "without sampled token": ("drafter.sampled_token=false",),
        },
    ),
    "num_masks": Study(
        RECIPES / "parallelspec.toml",
        {f"num_masks = {masks}": (f"drafter.num_masks={masks}",) for masks in range(1, 7)},
    ),
    "semi_autoregressive": Study(
        RECIPES / "semi_autoregressive.toml",
        {
            "fixed attention": ("drafter.kind=fixed_attention",),
            "LSTM": ("drafter.kind=lstm",),
            "RNN": ("drafter.kind=rnn",),
            "last embedding": ("drafter.kind=transformer", "drafter.layers=0"),
            **{
                f"transformer, {layers} layer{'s' * (layers > 1)}": (
                    "drafter.kind=transformer",
                    f"drafter.layers={layers}",
                )
                for layers in (1, 2, 4, 6)
            },
        },
    ),
}


def main(words: list[str] | None = None) -> int:
    """Runs the study that the command line names; returns 1 if a variant failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="chat rows, as JSONL")
    parser.add_argument("--cache", type=Path, required=True, help="the feature cache")
    parser.add_argument("--out", type=Path, required=True, help="one run a variant goes here")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps a variant")
    budget.add_argument("--minutes-each", type=float, help="at most; the recipe's steps end it too")
    parser.add_argument("--set", action="append", default=[], help="overrides for all variants")
    parser.add_argument("--recipe", type=Path, help="another recipe of the same drafter")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args(words)
    if arguments.json:
        require_writable(arguments.json)
    study = STUDIES[arguments.study]
    path = arguments.recipe or study.recipe
    common = [f"data.path={json.dumps(str(arguments.data.resolve()))}", *arguments.set]
    if arguments.steps is not None:
        common.append(f"train.max_steps={arguments.steps}")
    else:
        common.append(f"train.max_minutes={arguments.minutes_each}")
    try:
        recipe.load(path, common)
    except ValueError as error:
        parser.error(str(error))
    if not arguments.data.is_file():
        parser.error(f"got --data {arguments.data}, expected a file of chat rows")

    rows: list[dict[str, Any]] = []
    for label, overrides in study.variants.items():
        folder = arguments.out / re.sub(r"\W+", "-", label)
        print(f"{label}: {folder}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"variant": label, "overrides": list(overrides)}
        try:
            row |= measured(trained(path, [*common, *overrides], folder, arguments.cache))
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        if arguments.json:
            write_json(arguments, path, rows)
    print(table(rows))
    return 1 if any("error" in row for row in rows) else 0


def trained(path: Path, overrides: list[str], folder: Path, cache: Path) -> Path:
    """Returns the drafter's folder; trains it unless it is there with the same settings."""
    plan = recipe.load(path, overrides)
    drafter = folder / "drafter"
    if drafter.exists():
        if checkpoint.load_drafter(drafter).provenance["recipe"] != plan.as_dict():
            raise ValueError(f"{folder} holds a run with other settings: name another --out")
        return drafter
    if plan.train.max_minutes is not None:
        # a resumed run starts its time anew, and would get more of it than the other variants
        checkpoint.clear(folder / "checkpoints")
    resume = checkpoint.latest(folder / "checkpoints") is not None
    return train.run(path, overrides, folder, resume=resume, cache=cache)


def measured(drafter: Path) -> dict[str, Any]:
    """Returns a finished drafter's size and validation, from its own config.json."""
    about = json.loads((drafter / "config.json").read_text())
    tensors = {k: v for k, v in about["tensors"].items() if k != checkpoint.DRAFT_TOKEN_IDS}
    found = about["provenance"]["validation"]
    if found is None:
        raise ValueError(f"{drafter} was not validated: hold back some rows of the data")
    return {
        "parameters": sum(math.prod(shape) for _, *shape in tensors.values()),
        "steps": about["provenance"]["steps"],
        "accepted_length": found["accepted_length"],
        "top1_K": by_guess(found, "top1"),
        "top5_K": by_guess(found, "top5"),
    }


def by_guess(found: dict[str, float], name: str) -> list[float]:
    count = sum(key.startswith(f"{name}_") for key in found)
    return [found[f"{name}_{k}"] for k in range(count)]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table; guesses are numbered from 1, the token behind the root."""
    num_guesses = max((len(row.get("top1_K", ())) for row in rows), default=0)
    nodes = VALIDATION_BUDGET.max_nodes
    top1 = [f"top-1, guess {k}" if k == 1 else str(k) for k in range(1, num_guesses + 1)]
    head = ["variant", *top1, f"accepted length, {nodes} nodes", "parameters", "steps"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in rows:
        if "error" in row:
            lines.append([row["variant"], "failed", *[""] * (len(head) - 2)])
            continue
        accuracy = [f"{a:.3f}" for a in row["top1_K"]]
        lines.append(
            [
                row["variant"],
                *accuracy,
                *["-"] * (num_guesses - len(accuracy)),
                f"{row['accepted_length']:.3f}",
                f"{row['parameters'] / 1e6:.2f} M",
                str(row["steps"]),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_json(arguments: argparse.Namespace, path: Path, rows: list[dict[str, Any]]) -> None:
    result = checkpoint.collect_provenance(
        study=arguments.study,
        recipe=path.name,
        steps=arguments.steps,
        minutes_each=arguments.minutes_each,
        nodes=VALIDATION_BUDGET.max_nodes,
        variants=rows,
        provenance=provenance.collect(packages=("torch", "transformers")),
    )
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
