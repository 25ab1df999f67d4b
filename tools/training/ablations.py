"""Trains the variants of one drafter on the same data and budget, and prints them as one table.

    python -m tools.training.ablations num_masks --data answers.jsonl --cache FOLDER \\
        --out runs/num_masks --steps 100 --json ablation-num-masks.json
    python -m tools.training.ablations parallelspec_options --data answers.jsonl --cache FOLDER \\
        --out runs/two-best --token-rows 1e7 --only "two layers" "all that pay" \\
        --variant "all that pay: drafter.layers=2,drafter.mask_reads_token=true"

num_masks: ParallelSpec with 1 to 6 masks. parallelspec_options: what ParallelSpec can have in
addition to its paper's form. amphista: the drafter and the five ablations of its paper.
semi_autoregressive: the networks h_q of its paper. --variant adds combinations.

With --token-rows, and where variants differ in taps, two steps of the variant with most taps build
the feature cache, so that it takes no variant's time. A variant that has finished under --out with
the same settings is not trained again, and one that was stopped goes on. A variant that fails is
reported and left out, and the exit code is 1. --json is written after each variant. To decode with
a variant, build a bundle of it: `spec-export build --drafter-checkpoint runs/num_masks/LABEL`.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec_export.training import recipe
from spec_export.training.validate import VALIDATION_BUDGET
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable
from tools.figures import command_line, markdown, run, write
from tools.training.training_runs import (
    BUDGET,
    Place,
    build_cache,
    measured,
    row_budget,
    row_count,
    taps_of,
    trained,
    with_variants,
)

RECIPES = Path(__file__).parents[2] / "recipes" / "smollm2-135m"


@dataclass(frozen=True)
class Study:
    """A recipe, the overrides of each variant by its label, and those that all variants share.

    A variant's own override of a shared key counts.
    """

    recipe: Path
    variants: Mapping[str, tuple[str, ...]]
    shared: tuple[str, ...] = ()


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
    "parallelspec_options": Study(
        RECIPES / "parallelspec.toml",
        {
            "baseline": (),
            "token in mask rows": ("drafter.mask_reads_token=true",),
            "two layers": ("drafter.layers=2",),
            "five taps": ("drafter.taps=[5, 10, 15, 20, 25]",),
            "loss tv": ("drafter.loss=tv",),
            "loss lk": ("drafter.loss=lk",),
            "depth weights by reach": ("drafter.depth_weights=reach",),
            "prompts' rows": ("drafter.prompt_weight=0.5",),
        },
        # The shipped drafter's recipe has what paid.
        shared=("drafter.depth_weights=decay",),
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
    parser = command_line(__doc__, "--json")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help="chat rows, as JSONL")
    parser.add_argument("--cache", type=Path, required=True, help="the feature cache")
    parser.add_argument("--out", type=Path, required=True, help="one run a variant goes here")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps a variant")
    budget.add_argument("--token-rows", type=row_count, help="answer tokens to learn from")
    parser.add_argument("--set", action="append", default=[], help="overrides for all variants")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: KEY=VALUE,…'")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="these variants only")
    parser.add_argument("--recipe", type=Path, help="another recipe of the same drafter")
    return study(parser.parse_args(words))


def study(arguments: argparse.Namespace) -> int:
    """Trains the variants one after the other; returns 1 if one failed."""
    if arguments.json:
        require_writable(arguments.json)
    asked = STUDIES[arguments.study]
    path = arguments.recipe or asked.recipe
    place = Place(arguments.data, arguments.cache, arguments.out)
    variants = chosen(asked.variants, arguments.variant, arguments.only)
    common = [*place.overrides, *asked.shared, *arguments.set]
    recipe.load(path, common)  # a wrong override is told before anything is trained
    place.require_data()
    build_cache_if_needed(path, variants, place, arguments)
    steps, token_rows, rows_per_step = arguments.steps, None, None
    if arguments.token_rows is not None:
        plan = recipe.load(path, common)
        token_rows = row_budget(arguments.token_rows, plan, place.out, place.cache)
        steps, rows_per_step = token_rows.steps, token_rows.rows_per_step
    rows: list[dict[str, Any]] = []
    for label, overrides in variants.items():
        folder = place.run_of(label)
        print(f"{label}: {folder}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"variant": label, "overrides": list(overrides)}
        try:
            settings = [*common, f"train.max_steps={steps}", *overrides]
            row |= measured(trained(path, settings, folder, place.cache), rows_per_step)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        figures = {
            "study": arguments.study,
            "recipe": path.name,
            "shared": [*asked.shared, *arguments.set],
            "steps": steps,
            "token_rows": token_rows and asdict(token_rows),
            "nodes": VALIDATION_BUDGET.max_nodes,
            "variants": rows,
        }
        write(arguments.json, figures, packages=("torch", "transformers"))
    print(table(rows))
    return int(any("error" in row for row in rows))


def chosen(
    variants: Mapping[str, tuple[str, ...]], added: Sequence[str], only: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Returns the study's variants and those added on the command line, or `only` some of them.

    Raises UserError where `with_variants` does, and for a label in `only` that is not there.
    """
    every = with_variants(variants, added)
    unknown = [label for label in only or () if label not in every]
    if unknown:
        raise UserError(f"got --only {unknown[0]!r}, expected some of {', '.join(every)}")
    return {label: every[label] for label in only or every}


def build_cache_if_needed(
    path: Path,
    variants: Mapping[str, tuple[str, ...]],
    place: Place,
    arguments: argparse.Namespace,
) -> None:
    """Builds the cache by the variant with most taps, unless the first run builds it as well or
    every variant has finished."""
    taps = {how: taps_of(path, [*arguments.set, *how]) for how in variants.values()}
    finished = [(place.run_of(label) / "drafter").exists() for label in variants]
    counts_rows = arguments.token_rows is not None and not (place.out / BUDGET).is_file()
    if counts_rows or (len(set(taps.values())) > 1 and not all(finished)):
        most = max(taps, key=lambda how: len(taps[how]))
        build_cache(path, [*arguments.set, *most], place)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a Markdown table; guess 1 is the first token after the root."""
    count = max((len(row.get("top1_K", ())) for row in rows), default=0)
    head = ["variant", *(f"guess {k + 1}" for k in range(count)), "accepted length"]
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["variant"], "failed", *[""] * (count + 2)])
            continue
        guesses = [f"{share:.3f}" for share in row["top1_K"]]
        guesses += [""] * (count - len(guesses))
        size = f"{row['parameters'] / 1e6:.2f} M"
        length = f"{row['accepted_length']:.3f}"
        lines.append([row["variant"], *guesses, length, size, str(row["steps"])])
    return markdown([*head, "parameters", "steps"], lines)


if __name__ == "__main__":
    run(main)
