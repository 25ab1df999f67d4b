"""Trains drafters for tables: equal budgets in token rows, each run once, and what it measured.

A *token row* is an answer token that a training step has learnt from. ablations.py and
train_drafters.py share this file.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
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
from spec_runtime.errors import UserError
from spec_runtime.files.writing import write_atomically

FIRST_STEPS = "first-steps"  # the run under --out that builds the feature cache
# The first lies in the folder of all runs, the second in each run's.
BUDGET, EFFORT = "budget.json", "effort.json"


@dataclass(frozen=True)
class RowBudget:
    """A budget in token rows, and the steps that it makes: rows / (mean rows of a step)."""

    token_rows: float
    rows_per_step: float

    @property
    def steps(self) -> int:
        return max(1, round(self.token_rows / self.rows_per_step))


@dataclass(frozen=True)
class Place:
    """Where runs read and write: chat rows, the feature cache, and a folder for all runs."""

    data: Path
    cache: Path
    out: Path

    @property
    def overrides(self) -> list[str]:
        """Returns the override that replaces a recipe's data."""
        return [f"data.path={json.dumps(str(self.data.resolve()))}"]

    def run_of(self, label: str) -> Path:
        """Returns the folder of a run: "Markov, rank 64" has out/Markov-rank-64."""
        return self.out / re.sub(r"\W+", "-", label)

    def require_data(self) -> None:
        """Raises UserError if there are no rows to learn from."""
        if not self.data.is_file():
            raise UserError(f"got --data {self.data}, expected a file of chat rows")


def row_count(word: str) -> float:
    """Returns a number of rows above 0 from a command line, such as 3e6."""
    count = float(word)
    if not 0 < count < math.inf:
        raise argparse.ArgumentTypeError(f"got {word}, expected a number above 0")
    return count


def with_variants(
    variants: Mapping[str, tuple[str, ...]], added: Sequence[str]
) -> dict[str, tuple[str, ...]]:
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


def build_cache(path: Path, overrides: Sequence[str], place: Place) -> None:
    """Computes the features that the recipe at `path` reads, by two steps of it.

    So they take no drafter's time. A cache with more taps than a recipe reads serves it too.
    """
    settings = [*place.overrides, *overrides, "train.max_steps=2", "train.warmup=0"]
    trained(path, settings, place.out / FIRST_STEPS, place.cache)


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
    if plan.train.max_minutes is not None:
        # A resumed run starts its time anew, and would get more of it than the other drafters.
        checkpoint.clear(folder / "checkpoints")
        (folder / EFFORT).unlink(missing_ok=True)
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
