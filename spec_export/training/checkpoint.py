"""Saves and loads training checkpoints (to go on from) and finished drafters (to export).

Both are folders that are written whole or not at all, with the SHA-256 of every file. A drafter's
config is a mapping here: `recipe.build_config` makes its Config from it.
"""

import dataclasses
import datetime
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from spec_export.training import folders
from spec_export.training.folders import DRAFTER_HEADER, HEADER
from spec_runtime.errors import UserError
from spec_runtime.files.machine import versions
from spec_runtime.files.mapping import brief, from_mapping
from spec_runtime.files.writing import remove_folder, require_replaceable, restore_folders, sha256
from spec_runtime.measure.provenance import command, git_commit

PACKAGES = ("specsplit", "torch", "transformers", "safetensors", "numpy")
DRAFT_TOKEN_IDS = "draft_token_ids"
BIGRAMS = "bigrams."  # begins the names of the table's tensors
STATES = "states.pt"
AVERAGE = "average.safetensors"  # only of a run that averages its weights


@dataclass(frozen=True)
class Checkpoint:
    """The facts of a checkpoint that `load` has restored; `progress` and `provenance` are as given
    to `save`."""

    path: Path
    step: int
    progress: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class SavedDrafter:
    """A finished drafter.

    Floating tensors of `state` are float32. `draft_token_ids` is int64[Vd], or None where the
    drafter can guess the whole vocabulary. `bigrams` are the arrays of its table, see bigrams.py.
    """

    name: str
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    draft_token_ids: np.ndarray | None
    provenance: dict[str, Any]
    path: Path
    bigrams: dict[str, np.ndarray] | None = None

    def load_into(self, module: torch.nn.Module) -> None:
        """Copies the tensors into `module`.

        Raises UserError unless names and shapes are exactly the module's.
        """
        _load_strictly(module, self.state, str(self.path))


def collect_provenance(**facts: Any) -> dict[str, Any]:
    """Returns command, commit, versions and date of this run, and `facts` (config, recipe, …).

    All values are plain JSON.
    """
    return {
        "command": command(sys.argv),
        "git_commit": git_commit(),
        "versions": versions(PACKAGES),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: _json_value(fact) for name, fact in facts.items()},
    }


def origin(saved: SavedDrafter) -> dict[str, Any]:
    """Returns what the provenance of a run says of the drafter that it starts from.

    `weights` is the SHA-256 of the drafter's file, `earlier` the `provenance` of its own run.
    """
    return {"weights": sha256(saved.path / "drafter.safetensors"), "earlier": saved.provenance}


# ---- training checkpoints ----


def save(
    folder: str | Path,
    step: int,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    progress: Mapping[str, Any],
    provenance: Mapping[str, Any],
    keep: int,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the checkpoint `folder/step-00000123` and returns its path.

    All but the `keep` newest checkpoints are deleted afterwards, unless a checkpoint's folder has
    files that are not its own. What a killed process left there is removed first.

    Args:
        module: the module whose tensors are worth keeping (no frozen target).
        progress: JSON values that the training loop needs to go on, such as its curve.
        provenance: see `collect_provenance`.
        average: the averaged weights by name, None in a run without; `module` has the raw ones.
    """
    folder = Path(folder)
    final = folder / folders.folder_name(step)

    def write(temporary: Path) -> dict[str, Any]:
        tensors = _detached(module.state_dict())
        with _os_errors():
            safetensors.torch.save_file(tensors, temporary / "model.safetensors")
            torch.save({"optimizer": optimizer.state_dict()}, temporary / STATES)
            if average is not None:
                safetensors.torch.save_file(_detached(average), temporary / AVERAGE)
        return {
            "step": step,
            "progress": _json_value(progress),
            "provenance": _json_value(provenance),
        }

    if folder.is_dir():
        restore_folders(folder)
    folders.write(final, HEADER, "a checkpoint", write)
    _remove(folders.checkpoints(folder)[: -max(1, keep)])
    return final


def clear(folder: str | Path) -> None:
    """Deletes all checkpoints in `folder`; one that holds files of somebody else's stays."""
    _remove(folders.checkpoints(Path(folder)))


def _remove(checkpoints: list[Path]) -> None:
    """Deletes these checkpoints, but for those that hold other files."""
    for path in checkpoints:
        with suppress(ValueError):
            require_replaceable(path, folders.files_by(HEADER), "a checkpoint")
            remove_folder(path)


def latest(folder: str | Path) -> Path | None:
    """Returns the newest whole checkpoint in `folder`, or None if there is none at all.

    Every file is read. Warns of newer ones that are damaged. Raises UserError if all are.
    """
    damaged: list[UserError] = []
    for path in reversed(folders.checkpoints(Path(folder))):
        try:
            _read_checkpoint(path)
        except UserError as error:
            damaged.append(error)
            continue
        for problem in damaged:
            warnings.warn(f"{problem}; taking {path.name} instead", stacklevel=2)
        return path
    if damaged:
        raise UserError(f"{folder} holds no whole checkpoint: {damaged[0]}")
    return None


def load(
    path: str | Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Checkpoint:
    """Restores what `save` wrote into `module`, `optimizer` and `average`.

    Raises UserError on missing, altered or truncated files, on tensors or an optimiser's
    state that do not fit, and if `average` is wanted and the checkpoint has none.
    """
    path = Path(path)
    header, tensors, optimizer_state = _read_checkpoint(path)
    _load_strictly(module, tensors, str(path))
    if average is not None:
        _load_average(average, path, header)
    _load_optimizer(optimizer, optimizer_state, path / STATES)
    return Checkpoint(path, header.step, header.progress, header.provenance)


@dataclass(frozen=True)
class _CheckpointHeader:
    """The content of checkpoint.json; `files` are hashes by name."""

    format: int
    step: int
    progress: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, str]

    def __post_init__(self) -> None:
        if self.step < 0:
            raise UserError(f"got step {self.step}, expected 0 or more")


def _read_checkpoint(path: Path) -> tuple[_CheckpointHeader, dict[str, torch.Tensor], Any]:
    """Returns a checkpoint's header, its tensors and the optimiser's state; raises UserError unless
    it is whole."""
    data = folders.read(path, HEADER, ("model.safetensors", STATES))
    header = from_mapping(_CheckpointHeader, data, str(path / HEADER))
    tensors = _read_tensors(path / "model.safetensors")
    try:
        states = torch.load(path / STATES, map_location="cpu", weights_only=True)["optimizer"]
    except Exception as error:  # torch does not say what it raises on a file that is not its own
        reason = brief(error, 200)
        raise UserError(f"cannot read {path / STATES}: {reason}") from error
    return header, tensors, states


def _load_average(
    average: Mapping[str, torch.Tensor], path: Path, header: _CheckpointHeader
) -> None:
    """Copies a checkpoint's averaged weights into `average`; raises UserError if they do not
    fit or are not there."""
    if AVERAGE not in header.files:
        raise UserError(
            f"{path} has no averaged weights, expected those of train.ema: name another --out, or "
            "set train.ema to 0"
        )
    tensors = _read_tensors(path / AVERAGE)
    _compare(
        {key: list(tensor.shape) for key, tensor in tensors.items()},
        {key: list(tensor.shape) for key, tensor in average.items()},
        str(path / AVERAGE),
    )
    for name, tensor in average.items():
        tensor.copy_(tensors[name])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: Any, where: Path) -> None:
    """Restores an optimiser's state; raises UserError unless it fits the optimiser."""
    keys = [set(group) for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except Exception as error:  # torch looks at the numbers of parameters, and at nothing else
        raise UserError(
            f"{where}: the optimiser's state does not fit: {type(error).__name__}: {error}"
        ) from error
    for before, group in zip(keys, optimizer.param_groups, strict=True):
        if missing := before - set(group):
            raise UserError(f"{where}: the optimiser's state has no {sorted(missing)[0]}")
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape not in ((), parameter.shape):
                    raise UserError(
                        f"{where}: the optimiser's {name} is {list(value.shape)}, expected "
                        f"{list(parameter.shape)}"
                    )


# ---- finished drafters ----


def save_drafter(
    folder: str | Path,
    state: Mapping[str, torch.Tensor],
    name: str,
    config: Any,
    provenance: Mapping[str, Any],
    draft_token_ids: np.ndarray | None = None,
    bigrams: Mapping[str, np.ndarray] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes `drafter.safetensors` and `config.json` to `folder` and returns it.

    Floating tensors are stored in `dtype`; bfloat16 halves the file. A drafter that is already
    there is replaced, unless its folder holds other files; `require_drafter_folder` asks that
    beforehand.

    Args:
        config: the drafter's Config (dataclass or mapping) of JSON values.
        draft_token_ids: integer[Vd], the target's ids of the draft vocabulary; they are stored
            with the tensors.
        bigrams: the arrays of a one-pass drafter's table, see bigrams.table; stored there too.
    Raises:
        UserError: `folder` holds other files, or `state` a tensor of a reserved name or one
            with NaN or infinity in it.
    """
    tensors = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in _detached(state).items()
    }
    _require_finite(tensors, folder)
    for key in tensors:
        if key == DRAFT_TOKEN_IDS or key.startswith(BIGRAMS):
            raise UserError(f"the state dict holds {key!r}, expected it as an argument")
    if draft_token_ids is not None:
        tensors[DRAFT_TOKEN_IDS] = torch.from_numpy(
            np.asarray(draft_token_ids, dtype=np.int64).copy()
        )
    for part, array in (bigrams or {}).items():
        tensor = torch.from_numpy(array.copy())
        tensors[BIGRAMS + part] = tensor.bfloat16() if tensor.is_floating_point() else tensor

    def write(temporary: Path) -> dict[str, Any]:
        with _os_errors():
            safetensors.torch.save_file(tensors, temporary / "drafter.safetensors")
        return {
            "name": name,
            "config": _json_value(config),
            "tensors": {key: _signature(tensor) for key, tensor in sorted(tensors.items())},
            "provenance": _json_value(provenance),
        }

    final = Path(folder)
    folders.write(final, DRAFTER_HEADER, "a drafter", write)
    return final


def require_drafter_folder(folder: str | Path) -> None:
    """Raises UserError unless `save_drafter` may write to `folder`."""
    require_replaceable(Path(folder), folders.files_by(DRAFTER_HEADER), "a drafter")


@dataclass(frozen=True)
class _DrafterHeader:
    """The content of a drafter's config.json; `tensors` are signatures, `files` hashes by name."""

    format: int
    name: str
    config: dict[str, Any]
    tensors: dict[str, list[Any]]
    provenance: dict[str, Any]
    files: dict[str, str]

    def __post_init__(self) -> None:
        taps = self.config.get("taps", [])
        if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
            raise UserError(f"got taps {taps!r:.80}, expected a list of layers")
        validation = self.provenance.get("validation")
        if validation is None:
            return
        length: Any = validation.get("accepted_length") if isinstance(validation, dict) else None
        if type(length) not in (int, float) or not math.isfinite(length):
            raise UserError(f"got validation {validation!r:.80}, expected its accepted_length")


def load_drafter(folder: str | Path) -> SavedDrafter:
    """Returns what `save_drafter` wrote, floating tensors as float32.

    `folder` is the drafter's, or that of the training run that made it.

    Raises UserError on missing, altered or truncated files, on tensors other than those that
    `config.json` lists, on NaN, and for a training run that has not ended.
    """
    folder = folders.finished_drafter(Path(folder))
    data = folders.read(folder, DRAFTER_HEADER, ("drafter.safetensors",))
    header = from_mapping(_DrafterHeader, data, str(folder / DRAFTER_HEADER))
    tensors = _read_tensors(folder / "drafter.safetensors")
    found = {key: _signature(tensor) for key, tensor in tensors.items()}
    _compare(found, header.tensors, str(folder))
    ids = tensors.pop(DRAFT_TOKEN_IDS, None)
    table = {key: tensors.pop(key) for key in list(tensors) if key.startswith(BIGRAMS)}
    bigrams = {
        key.removeprefix(BIGRAMS): (each.float() if each.is_floating_point() else each).numpy()
        for key, each in table.items()
    }
    is_row = ids is None or (ids.dtype == torch.int64 and ids.ndim == 1 and len(ids) > 0)
    if not is_row or (ids is not None and bool((ids < 0).any())):
        raise UserError(
            f"{folder}: got {DRAFT_TOKEN_IDS} {found[DRAFT_TOKEN_IDS]}, expected a row of int64 "
            "of 0 or more"
        )
    return SavedDrafter(
        name=header.name,
        config=header.config,
        state={
            key: tensor.float() if tensor.is_floating_point() else tensor
            for key, tensor in tensors.items()
        },
        draft_token_ids=None if ids is None else ids.numpy(),
        provenance=header.provenance,
        path=folder,
        bigrams=bigrams or None,
    )


# ---- tensors ----


def _require_finite(tensors: Mapping[str, torch.Tensor], folder: str | Path) -> None:
    """Raises UserError, which names them, if there is NaN or infinity in some tensors."""
    broken = non_finite(tensors)
    if broken:
        raise UserError(
            f"cannot write {folder}: got NaN or infinity in {', '.join(broken)}, expected finite "
            "weights: the training has diverged"
        )


def non_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of the tensors that hold NaN or infinity."""
    return [
        name
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and not torch.isfinite(tensor).all()
    ]


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raises OSError where safetensors or torch cannot write; each has an error of its own."""
    try:
        yield
    except (safetensors.SafetensorError, RuntimeError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _detached(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a copy of each tensor: safetensors refuses tensors that share memory."""
    return {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in state.items()
    }


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Returns a file's tensors; raises UserError if it is damaged or holds NaN."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot read {path}: {brief(error)}") from error
    if broken := non_finite(tensors):
        raise UserError(
            f"{path}: {', '.join(broken)} holds NaN or infinity, expected numbers: the training "
            "had diverged; train again with a lower learning rate"
        )
    return tensors


def _signature(tensor: torch.Tensor) -> list[Any]:
    """Returns dtype and shape, as `config.json` lists them: ["bfloat16", 576, 192]."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _compare(found: Mapping[str, list], expected: Mapping[str, list], where: str) -> None:
    """Raises UserError that lists every difference between two tables of signatures."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    differing = [
        key for key in sorted(found.keys() & expected.keys()) if found[key] != expected[key]
    ]
    problems = []
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unknown:
        problems.append(f"unexpected {', '.join(unknown)}")
    problems += [f"{key} is {found[key]}, expected {expected[key]}" for key in differing]
    if problems:
        raise UserError(f"{where}: tensors do not fit: {brief('; '.join(problems), 1000)}")


def _load_strictly(module: torch.nn.Module, state: Mapping[str, torch.Tensor], where: str) -> None:
    """Copies `state` into `module`; raises UserError unless names and shapes agree.

    dtypes may differ: a bfloat16 file is loaded into a float32 module.
    """
    _compare(
        {key: list(tensor.shape) for key, tensor in state.items()},
        {key: list(tensor.shape) for key, tensor in module.state_dict().items()},
        where,
    )
    module.load_state_dict(state)


# ---- provenance ----


def _json_value(value: Any) -> Any:
    """Returns `value` as plain JSON; raises TypeError for what has no JSON form."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")
