"""Trains variants of one drafter, or several recipes, on the same data and budget, as one table.

    python -m tools.training.ablations num_masks --data answers.jsonl --cache FOLDER \\
        --out runs/num_masks --steps 100 --json ablation-num-masks.json
    python -m tools.training.ablations parallelspec_options --data answers.jsonl --cache FOLDER \\
        --out runs/two-best --token-rows 1e7 --only "two layers" "all that pay" \\
        --variant "all that pay: drafter.layers=2,drafter.mask_reads_token=true"
    python -m tools.training.ablations recipes --recipe recipes/smollm2-135m/*.toml …

num_masks: ParallelSpec with 1 to 6 masks. parallelspec_options: what ParallelSpec can have in
addition to its paper's form. amphista: the drafter and the five ablations of its paper.
semi_autoregressive: the networks h_q of its paper. recipes: those of --recipe, each by its name.
--variant adds combinations.

A *token row* is an answer token that a training step has learnt from. Where runs differ in taps,
or are given --token-rows, two steps of the one with most taps build the feature cache, so that it
takes no run's time. A run that has finished under --out with the same settings is not trained
again, and one that was stopped goes on. One that fails is reported and left out, and the exit code
is 1. --json is written after each. To decode with a variant, build a bundle of it: `spec-export
build --drafter-checkpoint runs/num_masks/LABEL`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spec_export import drafters
from spec_export.cli.report import TerminalReport
from spec_export.training import checkpoint, folders, recipe
from spec_export.training import run as train
from spec_export.training.batches import epoch_batches
from spec_export.training.features import FeatureCache
from spec_export.training.validate import VALIDATION_BUDGET
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable, write_atomically
from tools.figures import command_line, markdown, run, write

RECIPES = Path(__file__).parents[2] / "recipes" / "smollm2-135m"
FIRST_STEPS = "first-steps"  # the run under --out that builds the feature cache
# The first lies in the folder of all runs, the second in each run's.
BUDGET, EFFORT = "budget.json", "effort.json"
Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A recipe, the overrides of each variant by its label, and those that all variants share.

    A variant's own override of a shared key counts.
    """

    recipe: Path
    variants: Mapping[str, Overrides]
    shared: Overrides = ()


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


@dataclass(frozen=True)
class RowBudget:
    """A budget in token rows, and the steps that it makes: rows / (mean rows of a step)."""

    token_rows: float
    rows_per_step: float

    @property
    def steps(self) -> int:
        return max(1, round(self.token_rows / self.rows_per_step))


def main(words: list[str] | None = None) -> int:
    """Runs the study that the command line names; returns 1 if a variant failed."""
    parser = command_line(__doc__, "--json")
    parser.add_argument("study", choices=[*STUDIES, "recipes"])
    parser.add_argument("--data", type=Path, required=True, help="chat rows, as JSONL")
    parser.add_argument("--cache", type=Path, required=True, help="the feature cache")
    parser.add_argument("--out", type=Path, required=True, help="one run a variant goes here")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps a variant")
    budget.add_argument("--token-rows", type=row_count, help="answer tokens to learn from")
    parser.add_argument("--set", action="append", default=[], help="overrides for all variants")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: KEY=VALUE,…'")
    parser.add_argument("--only", nargs="+", metavar="LABEL", help="these variants only")
    parser.add_argument("--recipe", type=Path, nargs="+", help="other recipes than the study's")
    return study(parser.parse_args(words))


def study(args: argparse.Namespace) -> int:
    """Trains the variants one after the other; returns 1 if one failed."""
    if args.json:
        require_writable(args.json)
    if not args.data.is_file():
        raise UserError(f"got --data {args.data}, expected a file of chat rows")
    runs, shared = runs_of(args)
    common = [f"data.path={json.dumps(str(args.data.resolve()))}", *shared]
    for path, _ in runs.values():
        recipe.load(path, common)  # a wrong override is told before anything is trained
    if is_cache_needed(args, runs, common):
        path, how = max(runs.values(), key=lambda each: len(taps_of(each[0], [*common, *each[1]])))
        first = [*common, *how, "train.max_steps=2", "train.warmup=0"]
        trained(path, first, args.out / FIRST_STEPS, args.cache)
    rows: list[dict[str, Any]] = []
    for label, (path, overrides) in runs.items():
        folder = run_of(args.out, label)
        print(f"{label}: {folder}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"variant": label, "recipe": path.name}
        row["overrides"] = list(overrides)
        try:
            steps, rows_per_step = args.steps, None
            if args.token_rows is not None:
                at = folder if args.study == "recipes" else args.out
                budget = row_budget(args.token_rows, recipe.load(path, common), at, args.cache)
                steps, rows_per_step = budget.steps, budget.rows_per_step
                row["budget"] = asdict(budget)
            settings = [*common, f"train.max_steps={steps}", *overrides]
            row |= measured(trained(path, settings, folder, args.cache), rows_per_step)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        about = {"study": args.study, "shared": shared, "nodes": VALIDATION_BUDGET.max_nodes}
        found = {**about, "variants": rows}
        if args.study == "recipes":
            found = {each["variant"]: each for each in rows}
        write(args.json, found, packages=("torch", "transformers"))
    print(table(rows))
    return int(any("error" in row for row in rows))


def runs_of(args: argparse.Namespace) -> tuple[dict[str, tuple[Path, Overrides]], list[str]]:
    """Returns a recipe with overrides for each label, and the overrides that all share.

    Raises UserError where `with_variants` does, for a label in --only that is not there, and for no
    --recipe where they are the study.
    """
    if args.study == "recipes":
        if not args.recipe:
            raise UserError("got no --recipe, expected those to train")
        return {path.stem: (path, ()) for path in args.recipe}, args.set
    asked = STUDIES[args.study]
    path = args.recipe[0] if args.recipe else asked.recipe
    every = with_variants(asked.variants, args.variant)
    if unknown := [label for label in args.only or () if label not in every]:
        raise UserError(f"got --only {unknown[0]!r}, expected some of {', '.join(every)}")
    runs = {label: (path, every[label]) for label in args.only or every}
    return runs, [*asked.shared, *args.set]


def with_variants(variants: Mapping[str, Overrides], added: Sequence[str]) -> dict[str, Overrides]:
    """Returns the overrides of `variants` and of those added on a command line, by label.

    "both: drafter.layers=2,drafter.taps=[1, 2]" adds the variant "both" with two overrides. Raises
    UserError for a text of another form, and for a label that is there already.
    """
    every = dict(variants)
    for text in added:
        label, colon, overrides = (part.strip() for part in text.partition(":"))
        how = tuple(part.strip() for part in re.split(r",(?=\s*\w+\.\w+\s*=)", overrides))
        if not colon or not label or not all("=" in part for part in how):
            raise UserError(f"got --variant {text!r}, expected 'LABEL: KEY=VALUE,KEY=VALUE'")
        if label in every:
            raise UserError(f"got --variant {label!r} twice, expected another label")
        every[label] = how
    return every


def is_cache_needed(
    args: argparse.Namespace,
    runs: Mapping[str, tuple[Path, Overrides]],
    common: Sequence[str],
) -> bool:
    """Says whether the cache is to be built before the runs: rows must be counted, or the runs
    differ in taps and have not all finished."""
    taps = {taps_of(path, [*common, *how]) for path, how in runs.values()}
    finished = [(run_of(args.out, label) / "drafter").exists() for label in runs]
    counts_rows = args.token_rows is not None and not (args.out / BUDGET).is_file()
    return not all(finished) and (counts_rows or len(taps) > 1)


def run_of(out: Path, label: str) -> Path:
    """Returns the folder of a run: "Markov, rank 64" has out/Markov-rank-64."""
    return out / re.sub(r"\W+", "-", label)


def row_count(word: str) -> float:
    """Returns a number of rows above 0 from a command line, such as 3e6."""
    count = float(word)
    if not 0 < count < math.inf:
        raise argparse.ArgumentTypeError(f"got {word}, expected a number above 0")
    return count


def row_budget(token_rows: float, plan: recipe.Recipe, folder: Path, cache: Path) -> RowBudget:
    """Returns the budget of this many token rows for runs in `folder` with this recipe's batches.

    It is kept in the folder, so that runs taken to another machine need no cache there. Raises
    UserError if another number of rows was asked for there before.
    """
    file = folder / BUDGET
    if file.is_file():
        budget = RowBudget(**json.loads(file.read_text()))
        if budget.token_rows != token_rows:
            raise UserError(
                f"{folder} holds runs of {budget.token_rows:g} token rows, got {token_rows:g}: "
                "name another --out"
            )
        return budget
    features, settings = FeatureCache(cache), plan.train
    batches = epoch_batches(features.length_N, settings.batch_tokens, settings.seed, 0)
    per_batch = int(features.loss_T.sum()) / len(batches)
    budget = RowBudget(token_rows, per_batch * settings.grad_accumulation)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(budget)))
    return budget


def trained(path: Path, overrides: Sequence[str], folder: Path, cache: Path) -> Path:
    """Returns the drafter's folder; trains it unless it is there with the same settings.

    A run that was stopped goes on from its last checkpoint. Raises UserError if the folder holds a
    run with other settings. Where the data lies may differ, since runs are taken from machine to
    machine.
    """
    plan = recipe.load(path, overrides)
    drafter = folder / "drafter"
    if drafter.exists():
        before = checkpoint.load_drafter(drafter).provenance
        if _without_place(before["recipe"]) != _without_place(plan.as_dict()):
            raise UserError(f"{folder} holds a run with other settings: name another --out")
        return drafter
    resume = checkpoint.latest(folder / "checkpoints") is not None
    with _timed(folder):
        report = TerminalReport()
        return train.run(path, list(overrides), folder, resume, cache, report=report)


def _without_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's settings with the bare names of its data files."""
    data = dict(settings["data"])
    paths = data["path"]
    data["path"] = [Path(p).name for p in ([paths] if isinstance(paths, str) else paths)]
    return {**settings, "data": data}


@contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Keeps the run's last step in `folder`, and its seconds with those before each stop."""
    begin = time.monotonic()
    try:
        yield
    finally:
        file = folder / EFFORT
        before = json.loads(file.read_text())["seconds"] if file.is_file() else 0.0
        newest = checkpoint.latest(folder / "checkpoints")
        steps = 0 if newest is None else int(newest.name.removeprefix(folders.STEP_PREFIX))
        folder.mkdir(parents=True, exist_ok=True)
        effort = {"seconds": before + time.monotonic() - begin, "steps": steps}
        write_atomically(file, json.dumps(effort))


def measured(drafter: Path, rows_per_step: float | None = None) -> dict[str, Any]:
    """Returns a finished drafter's size, validation and training time.

    `hours` are those of the whole run: loading, validation, and the part before each stop. With
    `rows_per_step` there are also `token_rows` learnt from and `tokens_per_second` of those hours.
    Calibration errors `ece_K` are there if validation measured them.
    """
    about = json.loads((drafter / "config.json").read_text())
    tensors = {
        name: signature
        for name, signature in about["tensors"].items()
        if name != checkpoint.DRAFT_TOKEN_IDS and not name.startswith(checkpoint.BIGRAMS)
    }
    found = about["provenance"]["validation"]
    if found is None:
        raise UserError(f"{drafter} was not validated: hold back some rows of the data")
    row: dict[str, Any] = {
        **found,
        "parameters": sum(math.prod(shape) for _, *shape in tensors.values()),
        "steps": about["provenance"]["steps"],
        "accepted_length": found["accepted_length"],
        "top1_K": _by_guess(found, "top1"),
        "top5_K": _by_guess(found, "top5"),
    }
    if errors := _by_guess(found, "ece"):
        row["ece_K"] = errors
    file = drafter.parent / EFFORT
    if file.is_file():
        effort = json.loads(file.read_text())
        row["hours"] = effort["seconds"] / 3600
        if rows_per_step is not None:
            row["token_rows"] = effort["steps"] * rows_per_step
            row["tokens_per_second"] = row["token_rows"] / effort["seconds"]
    return row


def _by_guess(found: Mapping[str, float], name: str) -> list[float]:
    """Returns the validation's values name_0, name_1, … in order."""
    count = sum(key.startswith(f"{name}_") for key in found)
    return [found[f"{name}_{k}"] for k in range(count)]


def taps_of(path: Path, overrides: Sequence[str] = ()) -> tuple[int, ...]:
    """Returns the target layers that the recipe's drafter reads beside the final feature."""
    plan = recipe.load(path, overrides)
    config = drafters.load(plan.drafter_name).Config
    if isinstance(getattr(config, "taps", None), property):  # they follow from other fields
        return tuple(recipe.build_config(config, plan.drafter_fields, f"{path} [drafter]").taps)
    return tuple(plan.drafter_fields.get("taps", ()))


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
