"""Refuses a training run that cannot begin, before torch is imported, which takes seconds."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from spec_export import drafters
from spec_export.model import files
from spec_export.training import folders, recipe
from spec_runtime.errors import UserError

TRACKERS = ("tensorboard", "wandb", "mlflow")  # by accelerate's names, which are the modules', too

DEMO = "smollm2-135m"  # the folder of the recipes that tell how each drafter is made


def read(
    recipe_path: Path,
    overrides: Sequence[str],
    out: Path | None = None,
    resume: bool = False,
    init: Path | None = None,
    trackers: Sequence[str] = (),
) -> tuple[recipe.Recipe, Path]:
    """Returns the recipe with its overrides, and the folder of the run; see `run.run`.

    Raises UserError for a recipe, a path or an option with which no run can begin.
    """
    plan = recipe.load(recipe_path, overrides)
    drafters.require_known(plan.drafter_name)
    _require_files(plan, recipe_path)
    for model in filter(None, (plan.model, plan.base)):
        files.require(model)
    out = out or Path("runs") / recipe_path.stem
    found = folders.checkpoints(out / folders.CHECKPOINTS)
    require_run(out, resume, found[-1] if found else None)
    if init is not None:
        folders.require_drafter(init)
    for name in trackers:
        if name not in TRACKERS:
            raise UserError(f"got --track {name!r:.40}, expected {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"got --track {name}, which is not installed: pip install {name}, or leave it out"
            )
    return plan, out


def _require_files(plan: recipe.Recipe, recipe_path: Path) -> None:
    """Raises UserError for a path that the recipe's folder lacks."""
    for path in plan.data_paths:
        if not path.is_file():
            raise UserError(
                f"got data.path {path}, expected a file of JSON Lines: paths in {recipe_path} "
                "start from its folder, those of --set and of shipped recipes from the working "
                "folder"
            )
    model = plan.target.model
    if model and os.path.exists(model) and not os.path.exists(plan.folder / model):
        raise UserError(
            f"got target.model {model}, which is in the working folder: paths in {recipe_path} "
            f"start from its folder, write {os.path.relpath(model, plan.folder)}"
        )


def require_new(drafter: str, out: Path, paths: Sequence[Path]) -> None:
    """Raises UserError unless a recipe for this drafter can be written to `out` for these data."""
    known = [name for name in drafters.trainable() if f"{DEMO}/{name}" in recipe.shipped()]
    if drafter not in known:
        raise UserError(
            f"got drafter {drafter!r:.80}, expected one with a recipe: {', '.join(known)}",
            param="drafter",
        )
    if out.exists():
        raise UserError(f"{out} exists: remove it, or choose another file", param="out")
    for path in paths:
        if not path.is_file():
            raise UserError(f"got data {path}, expected a file of JSON Lines", param="data")


def require_run(out: Path, resume: bool, newest: Path | None) -> None:
    """Raises UserError, which says what is in `out`, if a run there can neither begin nor go on.

    newest: the checkpoint that it would go on from, None without one.
    """
    if newest is not None and not resume:
        raise UserError(
            f"{out} already holds a training run: pass --resume to go on, or another --out"
        )
    if resume and newest is None:
        found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
        held = f"it holds {', '.join(found[:5])}" if found else "it is empty or not there"
        raise UserError(
            f"got --resume, but {out} holds no checkpoint ({held}): name the folder of the run "
            "with --out, or leave --resume out to start"
        )
