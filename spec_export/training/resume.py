"""Checks that a checkpoint belongs to the run that is to go on from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spec_export.training.checkpoint import Checkpoint
from spec_export.training.curves import TrainingSums
from spec_runtime.errors import UserError
from spec_runtime.files.mapping import from_mapping

# Keys of a recipe that a resumed run may change: when it ends, what it reports and keeps, and what
# a build makes of the drafter.
FREE_KEYS = (
    *(f"train.{name}" for name in ("epochs", "max_steps", "max_minutes")),
    *(f"train.{name}_every" for name in ("log", "validate", "checkpoint")),
    "train.keep_checkpoints",
    "export.precision",
)


@dataclass(frozen=True)
class RunState:
    """Holds what a checkpoint says of its run: the curve, the sums since its last line, the
    processes, the batches of a step.

    The last two are None in a checkpoint that was written before they were kept.
    """

    curve: list[dict[str, int | float]]
    log: TrainingSums = field(default_factory=TrainingSums)
    processes: int | None = None
    batches_per_step: int | None = None


def run_state(state: Checkpoint) -> RunState:
    """Returns what the trainer stored of its run; raises UserError unless it is one."""
    return from_mapping(RunState, state.progress, f"{state.path}/checkpoint.json progress")


def changed_keys(state: Checkpoint, recipe: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns what has changed since the checkpoint: {"train.max_steps": [7, 9]}.

    Raises UserError, which names key and values, if a key that the weights depend on has changed.
    """
    was, now = flat(state.provenance.get("recipe")), flat(recipe)
    changed = {
        key: [was.get(key), now.get(key)]
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    }
    fixed = [
        f"{key} was {_shown(old)}, is {_shown(new)}"
        for key, (old, new) in changed.items()
        if key not in FREE_KEYS
    ]
    if fixed:
        raise UserError(
            f"{state.path} was trained with another recipe ({'; '.join(fixed)}): name another "
            "--out, or set these keys back"
        )
    return changed


def require_same_init(state: Checkpoint, init: Mapping[str, Any] | None) -> None:
    """Raises UserError unless the run goes on with the `--init` that it was started with.

    A drafter with an output head of its own has that drafter's vocabulary. Checkpoints that were
    written before this was kept are taken on trust.
    """
    started = state.provenance.get("init")
    if started is not None and (init is None or init["weights"] != started["weights"]):
        got = "no --init" if init is None else f"--init of weights {init['weights'][:12]}"
        raise UserError(
            f"{state.path} was started from a drafter of weights {started['weights'][:12]}, got "
            f"{got}: pass the same --init again"
        )


def flat(recipe: Any) -> dict[str, Any]:
    """Returns a recipe's values by "section.key"."""
    sections = recipe if isinstance(recipe, Mapping) else {}
    return {
        f"{section}.{key}": value
        for section, table in sections.items()
        if isinstance(table, Mapping)
        for key, value in table.items()
    }


def _shown(value: Any) -> str:
    return "absent" if value is None else f"{value!r:.60}"
