"""Trains variants of one drafter, or several recipes, on the same data and budget, as one table.

    python -m tools.training.ablations --recipe smollm2-135m/{medusa,eagle} --data answers.jsonl \\
        --cache FOLDER --out runs/all --token-rows 1e6 --json drafters-alike.json
    python -m tools.training.ablations --recipe smollm2-135m/parallelspec … \\
        --steps 100 --variant "baseline: drafter.layers=1" \\
        --variant "all that pay: drafter.layers=2,drafter.depth_weights=reach"

A recipe's name is its label. A *token row* is an answer token that a training step has learnt from.
Two steps of the run with most taps build the feature cache, which serves them all. A run that has
finished under --out with the same settings is not trained again, and one that was stopped goes on.
One that fails is reported and left out, and the exit code is 1. --json is written after each. To
decode with a variant, build a bundle of it: `spec-export build --drafter-checkpoint
runs/all/LABEL/drafter`.
"""

import argparse
import json
import math
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_export import drafters
from spec_export.cli.report import TerminalReport
from spec_export.training import checkpoint, recipe
from spec_export.training import run as train
from spec_export.training.batches import epoch_batches
from spec_export.training.features import FeatureCache
from spec_export.training.validate import VALIDATION_BUDGET
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable
from tools.docs.render import shown
from tools.figures import command_line, run, write

FIRST_STEPS = "first-steps"  # the run under --out that builds the feature cache
Overrides = tuple[str, ...]


def main(words: list[str] | None = None) -> int:
    """Trains what the command line names; returns 1 if a run failed."""
    parser = command_line(__doc__, "--json")
    parser.add_argument("--recipe", type=Path, nargs="+", required=True)
    parser.add_argument("--data", type=Path, required=True, help="chat rows, as JSONL")
    parser.add_argument("--cache", type=Path, required=True, help="the feature cache")
    parser.add_argument("--out", type=Path, required=True, help="one run a variant goes here")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps of a run")
    budget.add_argument("--token-rows", type=float, help="answer tokens to learn from, as 3e6")
    parser.add_argument("--set", action="append", default=[], help="overrides for all")
    parser.add_argument("--variant", action="append", default=[], metavar="'LABEL: KEY=VALUE,…'")
    return study(parser.parse_args(words))


def study(args: argparse.Namespace) -> int:
    """Trains one after the other; returns 1 if one failed."""
    if args.json:
        require_writable(args.json)
    if not args.data.is_file():
        raise UserError(f"got --data {args.data}, expected a file of chat rows")
    runs = runs_of(args.recipe, args.variant)
    common = [f"data.path={json.dumps(str(args.data.resolve()))}", "data.store_features=true"]
    common += args.set
    for path, _ in runs.values():
        recipe.load(path, common)  # a wrong override is told before anything is trained
    if not (args.out / FIRST_STEPS / "drafter").exists():
        path, how = max(runs.values(), key=lambda each: len(taps_of(each[0], [*common, *each[1]])))
        first = [*common, *how, "train.max_steps=2", "train.warmup=0"]
        trained(path, first, args.out / FIRST_STEPS, args.cache)
    rows: list[dict[str, Any]] = []
    for label, (path, overrides) in runs.items():
        folder = args.out / re.sub(r"\W+", "-", label)
        print(f"{label}: {folder}", file=sys.stderr, flush=True)
        row: dict[str, Any] = {"variant": label, "recipe": path.name, "overrides": [*overrides]}
        try:
            per_step = rows_per_step(recipe.load(path, common), args.cache)
            steps = args.steps or max(1, round(args.token_rows / per_step))
            settings = [*common, f"train.max_steps={steps}", *overrides]
            row |= measured(trained(path, settings, folder, args.cache))
            row["token_rows"] = row["steps"] * per_step
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        found: dict[str, Any] = {"shared": args.set, "nodes": VALIDATION_BUDGET.max_nodes}
        found["variants"] = rows
        if not args.variant:
            found = {each["variant"]: each for each in rows}
        write(args.json, found, packages=("torch", "transformers"))
    failed = [row for row in rows if "error" in row]
    if right := [row for row in rows if row not in failed]:
        print(shown("ablation", right))
    for row in failed:
        print(f"{row['variant']} failed: {row['error']}")
    return int(bool(failed))


def runs_of(recipes: Sequence[Path], variants: Sequence[str]) -> dict[str, tuple[Path, Overrides]]:
    """Returns a recipe with overrides for each label.

    The variant "both: drafter.layers=2,drafter.taps=[1, 2]" has the label "both" and two overrides.
    Raises UserError for a text of another form, a label that is there already, and for variants of
    several recipes.
    """
    if not variants:
        return {path.stem: (path, ()) for path in recipes}
    if len(recipes) > 1:
        raise UserError(f"got variants of {len(recipes)} recipes, expected those of one")
    runs: dict[str, tuple[Path, Overrides]] = {}
    for text in variants:
        label, colon, overrides = (part.strip() for part in text.partition(":"))
        how = tuple(part.strip() for part in re.split(r",(?=\s*\w+\.\w+\s*=)", overrides))
        if not colon or not label or not all("=" in part for part in how):
            raise UserError(f"got --variant {text!r}, expected 'LABEL: KEY=VALUE,KEY=VALUE'")
        if label in runs:
            raise UserError(f"got --variant {label!r} twice, expected another label")
        runs[label] = recipes[0], how
    return runs


def rows_per_step(plan: recipe.Recipe, cache: Path) -> float:
    """Returns the answer tokens that an average step of this recipe learns from."""
    features, settings = FeatureCache(cache), plan.train
    batches = epoch_batches(features.length_N, settings.batch_tokens, settings.seed, 0)
    return int(features.loss_T.sum()) / len(batches) * settings.grad_accumulation


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
    return train.run(path, list(overrides), folder, resume, cache, report=TerminalReport())


def _without_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's settings with the bare names of its data files."""
    data = dict(settings["data"])
    paths = data["path"]
    data["path"] = [Path(p).name for p in ([paths] if isinstance(paths, str) else paths)]
    return {**settings, "data": data}


def measured(drafter: Path) -> dict[str, Any]:
    """Returns a finished drafter's size and validation; `ece_K` are calibration errors."""
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


if __name__ == "__main__":
    run(main)
