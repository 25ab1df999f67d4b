"""Saving and loading: training checkpoints (to go on from) and finished drafters (to export).

Both are folders written whole or not at all, with the SHA-256 of every file. This file knows
tensors, optimisers and random states. It does not know any drafter's architecture: a config is a
mapping here.
"""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

FORMAT = 1
STEP_PREFIX = "step-"
PACKAGES = ("specsplit", "torch", "transformers", "safetensors", "numpy")
DRAFT_TOKEN_IDS = "draft_token_ids"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or meant for another model."""


@dataclass(frozen=True)
class Checkpoint:
    """What `load` found besides the states it restored. `progress` and `provenance` are as given to
    `save`."""

    path: Path
    step: int
    progress: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class SavedDrafter:
    """A finished drafter. `state` in the dtype asked for; `draft_token_ids` int64[Vd] or None."""

    name: str
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    draft_token_ids: np.ndarray | None
    provenance: dict[str, Any]
    path: Path

    def load_into(self, module: torch.nn.Module) -> None:
        """Copy the tensors into `module`, all of them or CheckpointError."""
        _load_strictly(module, self.state, str(self.path))


def collect_provenance(**facts: Any) -> dict[str, Any]:
    """Command, commit, versions and date of this run, with `facts` (config, recipe, …) added; JSON
    values only."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # The command's own folder says nothing about the result, and provenance is published with the
    # drafter.
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "command": command,
        "git_commit": _git_commit(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{name: _json_value(fact) for name, fact in facts.items()},
    }


# ---- training checkpoints ----


def save(
    folder: str | Path,
    step: int,
    module: torch.nn.Module | Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    generator: np.random.Generator | None = None,
    progress: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write `folder/step-00000123` atomically, then delete all but the `keep` newest; returns the
    new path.

    Args:
        module: the module, or the part of its state dict worth keeping (no frozen target tensors).
        generator: a NumPy generator whose state is kept beside torch's own random states.
        progress: anything JSON that the training loop needs to go on (epoch, position, best loss,
        curves).
    """
    folder = Path(folder)
    final = folder / f"{STEP_PREFIX}{step:08d}"
    states = {
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy_rng": None if generator is None else _json_value(generator.bit_generator.state),
    }

    def write(temporary: Path) -> dict[str, Any]:
        state = module.state_dict() if isinstance(module, torch.nn.Module) else module
        safetensors.torch.save_file(_detached(state), temporary / "model.safetensors")
        torch.save(states, temporary / "states.pt")
        return {
            "step": step,
            "progress": _json_value(progress or {}),
            "provenance": _json_value(provenance or {}),
        }

    _write_folder(final, "checkpoint.json", write)
    for old in _checkpoints(folder)[: -max(1, keep)]:
        shutil.rmtree(old)
    return final


def latest(folder: str | Path) -> Path | None:
    """The checkpoint with the highest step in `folder`, None where there is none."""
    found = _checkpoints(Path(folder))
    return found[-1] if found else None


def load(
    path: str | Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    *,
    generator: np.random.Generator | None = None,
    restore_rng: bool = True,
    partial: bool = False,
) -> Checkpoint:
    """Restore what `save` wrote into the given objects.

    Args:
        partial: the checkpoint holds a part of `module`'s tensors (those frozen were left out); an
        unknown or
            mismatching one is refused all the same.
    Raises:
        CheckpointError: missing, altered or truncated files, or tensors that do not fit `module`.
    """
    path = Path(path)
    header = _read_folder(path, "checkpoint.json")
    _load_strictly(module, _read_tensors(path / "model.safetensors"), str(path), partial)
    states = torch.load(path / "states.pt", map_location="cpu", weights_only=True)
    if optimizer is not None:
        try:
            optimizer.load_state_dict(states["optimizer"])
        except ValueError as error:
            raise CheckpointError(f"{path}: the optimiser's state does not fit: {error}") from error
    for name, wanted in (("scheduler", scheduler), ("numpy_rng", generator)):
        if wanted is not None and states[name] is None:
            raise CheckpointError(f"{path} holds no {name} state, expected one saved with it")
    if scheduler is not None:
        scheduler.load_state_dict(states["scheduler"])
    if generator is not None:
        generator.bit_generator.state = states["numpy_rng"]
    if restore_rng:
        torch.set_rng_state(states["torch_rng"])
        if torch.cuda.is_available() and len(states["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(states["cuda_rng"])
    return Checkpoint(path, header["step"], header["progress"], header["provenance"])


# ---- finished drafters ----


def save_drafter(
    folder: str | Path,
    state: Mapping[str, torch.Tensor],
    name: str,
    config: Any,
    provenance: Mapping[str, Any],
    draft_token_ids: np.ndarray | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Path:
    """Write `drafter.safetensors` and `config.json` to `folder`, replacing a drafter already there.

    Args:
        config: the drafter's Config (dataclass or mapping), JSON values.
        draft_token_ids: integer[Vd], absolute ids of the draft vocabulary; kept in the same file.
        dtype: floating tensors are stored so; None = as they are. bfloat16 halves the file.
    """
    tensors = {}
    for key, tensor in _detached(state).items():
        cast = dtype is not None and tensor.is_floating_point()
        tensors[key] = tensor.to(dtype) if cast else tensor
    if DRAFT_TOKEN_IDS in tensors:
        raise CheckpointError(
            f"the state dict holds {DRAFT_TOKEN_IDS!r}, expected it as an argument"
        )
    if draft_token_ids is not None:
        tensors[DRAFT_TOKEN_IDS] = torch.from_numpy(
            np.asarray(draft_token_ids, dtype=np.int64).copy()
        )

    def write(temporary: Path) -> dict[str, Any]:
        safetensors.torch.save_file(tensors, temporary / "drafter.safetensors")
        return {
            "name": name,
            "config": _json_value(config),
            "tensors": {key: _signature(tensor) for key, tensor in sorted(tensors.items())},
            "provenance": _json_value(provenance),
        }

    final = Path(folder)
    _write_folder(final, "config.json", write)
    return final


def load_drafter(folder: str | Path, dtype: torch.dtype | None = torch.float32) -> SavedDrafter:
    """Read what `save_drafter` wrote, floating tensors as `dtype` (None = as stored).

    Raises:
        CheckpointError: missing, altered or truncated files, or tensors other than `config.json`
        lists.
    """
    folder = Path(folder)
    header = _read_folder(folder, "config.json")
    tensors = _read_tensors(folder / "drafter.safetensors")
    found = {key: _signature(tensor) for key, tensor in tensors.items()}
    _compare(found, header["tensors"], str(folder))
    ids = tensors.pop(DRAFT_TOKEN_IDS, None)
    return SavedDrafter(
        name=header["name"],
        config=header["config"],
        state={
            key: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            for key, tensor in tensors.items()
        },
        draft_token_ids=None if ids is None else ids.numpy(),
        provenance=header["provenance"],
        path=folder,
    )


# ---- folders ----


def _write_folder(final: Path, header_name: str, write: Callable[[Path], dict[str, Any]]) -> None:
    """Let `write` fill a temporary folder beside `final`, add the header with hashes, and
    rename."""
    final.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex[:8]
    temporary = final.parent / f".{final.name}.{token}.tmp"
    temporary.mkdir()
    try:
        header = {"format": FORMAT, **write(temporary)}
        header["files"] = {file.name: _sha256(file) for file in sorted(temporary.iterdir())}
        text = json.dumps(header, indent=1, ensure_ascii=False)
        (temporary / header_name).write_text(text + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
        if final.exists():
            if not (final / header_name).is_file() and any(final.iterdir()):
                raise CheckpointError(
                    f"{final} holds other files, expected a new folder or a {header_name}"
                )
            # A folder cannot be renamed over a full one: move the old one out of the way, then
            # away.
            old = final.parent / f".{final.name}.{token}.old"
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old)
        else:
            temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_folder(folder: Path, header_name: str) -> dict[str, Any]:
    """The header, once every file's hash is found to agree with it."""
    try:
        header = json.loads((folder / header_name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / header_name}: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT or "files" not in header:
        got = header.get("format") if isinstance(header, dict) else type(header).__name__
        raise CheckpointError(f"{folder / header_name} has format {got!r}, expected {FORMAT}")
    for name, expected in header["files"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, expected it beside {header_name}")
        got = _sha256(folder / name)
        if got != expected:
            raise CheckpointError(
                f"{folder / name} has SHA-256 {got[:12]}…, expected {expected[:12]}…: "
                "damaged or altered, restore it or train again"
            )
    return header


def _checkpoints(folder: Path) -> list[Path]:
    found = [
        path for path in folder.glob(f"{STEP_PREFIX}*") if (path / "checkpoint.json").is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix(STEP_PREFIX)))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- tensors ----


def _detached(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of their own: safetensors refuses tensors that share memory, such as tied ones."""
    return {
        key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for key, tensor in state.items()
    }


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _signature(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def _compare(found: Mapping[str, list], expected: Mapping[str, list], where: str) -> None:
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
        raise CheckpointError(f"{where}: tensors do not fit: {'; '.join(problems)}")


def _load_strictly(
    module: torch.nn.Module, state: Mapping[str, torch.Tensor], where: str, partial: bool = False
) -> None:
    own = module.state_dict()
    if partial:
        own = {key: tensor for key, tensor in own.items() if key in state}
    # dtypes may differ (a bf16 file into an fp32 module): only shapes must agree.
    _compare(
        {key: list(tensor.shape) for key, tensor in state.items()},
        {key: list(tensor.shape) for key, tensor in own.items()},
        where,
    )
    module.load_state_dict(state, strict=not partial)


# ---- provenance ----


def _git_commit() -> str | None:
    """Commit of the source tree this file is run from ("-dirty" appended), None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _json_value(value: Any) -> Any:
    """`value` as plain JSON; TypeError for what has no JSON form."""
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
