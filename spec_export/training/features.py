"""Stores the target's hidden states over the training data, once for all drafters.

The feature cache is a folder of flat arrays, one row a token, sequences back to back:

    token_T.npy     i32
    loss_T.npy      bool, True at answer tokens
    offset.npy      i64, sequence i is rows offset[i]:offset[i+1]
    feature_TF.npy  bfloat16 bit patterns as u16: features after the final norm, then each tap
    cache.json      what the cache was made from, and how many sequences are done

An interrupted build goes on from the last whole block of sequences.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spec_export.model.hidden_states import features_and_taps
from spec_export.training import disk
from spec_export.training.batches import by_length
from spec_export.training.data import Example
from spec_runtime.errors import UserError
from spec_runtime.files.machine import give_back_memory
from spec_runtime.files.mapping import from_mapping, parse_json, to_json
from spec_runtime.files.writing import locked, write_atomically

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}  # padded tokens of one forward pass
BLOCK = 256  # sequences between two progress marks
FEATURES = "feature_TF.npy"


@dataclass(frozen=True)
class CacheFacts:
    """The contents of cache.json: what the cache is made from, and how many sequences are done.

    `target` is the target's fingerprint, `data` a SHA-256 of all tokens and loss masks.
    """

    target: str
    taps: tuple[int, ...]
    data: str
    num_features: int
    sequences_done: int = 0


class FeatureCache:
    """Reads a finished cache; a `batches.SequenceStore`.

    `taps` are the wanted taps, which the cache must hold; None means all. Raises
    UserError on an unfinished cache, and on a tap that it lacks.
    """

    def __init__(self, folder: Path, taps: Sequence[int] | None = None) -> None:
        about = _read_facts(folder)
        self.offset = _load(folder / "offset.npy", memory_map=False)
        if about.sequences_done < self.num_sequences:
            raise UserError(
                f"got feature cache {folder} with {about.sequences_done} of "
                f"{self.num_sequences} sequences, expected all: run the same command "
                "again, it goes on from there"
            )
        self.token_T, self.loss_T = (_load(folder / f"{x}.npy") for x in ("token_T", "loss_T"))
        self._feature_TF = _load_features(folder, about, int(self.offset[-1]), "r")
        if {len(self.token_T), len(self.loss_T)} != {int(self.offset[-1])}:
            raise _damaged(folder, "its arrays differ in length")
        held = list(about.taps)
        wanted = held if taps is None else list(taps)
        if not set(wanted) <= set(held):
            raise UserError(f"got feature cache {folder} with taps {held}, expected {wanted}")
        # the final feature and the wanted taps among the parts of a row; None means all of them
        self._parts = None if wanted == held else [0, *(1 + held.index(tap) for tap in wanted)]
        self._num_parts = 1 + len(held)

    @property
    def num_sequences(self) -> int:
        return len(self.offset) - 1

    @property
    def length_N(self) -> np.ndarray:
        """Returns the number of tokens of each sequence, i64[number of sequences]."""
        return np.diff(self.offset)

    def sequence(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns token i64[T], loss bool[T] and feature bf16[T, F] of sequence i."""
        rows = slice(self.offset[i], self.offset[i + 1])
        token = torch.from_numpy(self.token_T[rows].astype(np.int64))
        return token, torch.from_numpy(self.loss_T[rows].copy()), self._feature(rows)

    def _feature(self, rows: slice) -> Tensor:
        """Returns the final feature and the wanted taps of these rows, bf16[T, F]."""
        feature = torch.from_numpy(self._feature_TF[rows].copy()).view(torch.bfloat16)
        if self._parts is None:
            return feature
        return feature.unflatten(1, (self._num_parts, -1))[:, self._parts].flatten(1)


def size_estimate(examples: Sequence[Example], width: int, num_taps: int) -> int:
    """Returns the bytes that the cache of these examples takes on disk: features in two bytes each,
    and 5 bytes of token and loss mask.

    `width` is the target's hidden size.
    """
    return sum(len(e.token_T) for e in examples) * (2 * width * (1 + num_taps) + 5)


def build(
    folder: Path,
    examples: Sequence[Example],
    model: Any,
    fingerprint: str,
    taps: Sequence[int],
    progress: Any = None,
) -> FeatureCache:
    """Runs a (bf16) transformers target over every example and stores its features.

    A stopped build goes on, and a finished cache that holds more taps is taken as it is.
    `fingerprint` is the target's (`target.fingerprint`). `progress(done, total)` is called with
    token counts: first with what an earlier build has done, then after each block. Raises
    UserError if the folder was made from other data, target or taps, if another process writes to
    it, and if the disk is too small.
    """
    width = model.config.hidden_size
    wanted = _facts(examples, width, fingerprint, taps)
    if not _is_complete(folder, wanted, width, len(examples)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _build(folder, examples, model, wanted, progress)
    elif progress:
        total = sum(len(example.token_T) for example in examples)
        progress(total, total)
    return FeatureCache(folder, taps)


def wait(
    folder: Path, examples: Sequence[Example], width: int, fingerprint: str, taps: Sequence[int]
) -> None:
    """Waits until another process has built the cache that `build` would build.

    A process group would wait too, but gives up after some minutes, and features take hours.
    `width` is the target's hidden size. Raises UserError if the folder was made from other data,
    target or taps.
    """
    wanted = _facts(examples, width, fingerprint, taps)
    while not _is_complete(folder, wanted, width, len(examples)):
        time.sleep(0.5)


def _is_complete(folder: Path, wanted: CacheFacts, width: int, num_sequences: int) -> bool:
    """Returns whether the folder holds all features; raises UserError as `_matching` does."""
    if not (folder / "cache.json").is_file():
        return False
    return _matching(folder, wanted, width).sequences_done == num_sequences


def _facts(
    examples: Sequence[Example], width: int, fingerprint: str, taps: Sequence[int]
) -> CacheFacts:
    """Returns the facts of a cache that is still empty."""
    num_features = width * (1 + len(taps))
    return CacheFacts(fingerprint, tuple(taps), _digest(examples), num_features)


def _matching(folder: Path, wanted: CacheFacts, width: int) -> CacheFacts:
    """Returns the facts of the cache in `folder`, whose taps may be more than those wanted.

    Raises UserError, which says what differs, if it is made from something else.
    """
    found = _read_facts(folder)
    if set(wanted.taps) <= set(found.taps):
        wanted = dataclasses.replace(
            wanted, taps=found.taps, num_features=width * (1 + len(found.taps))
        )
    differing = [
        f"{name} {_shown(getattr(found, name))} instead of {_shown(getattr(wanted, name))}"
        for name in ("target", "data", "taps", "num_features")
        if getattr(found, name) != getattr(wanted, name)
    ]
    if differing:
        raise UserError(
            f"got feature cache {folder} made from other data, target or taps "
            f"({'; '.join(differing)}): name another folder, or remove it to build it again"
        )
    return found


def _shown(value: Any) -> str:
    """Returns taps and numbers as they are, and the beginning of a hash."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 12 else str(value)


def _build(
    folder: Path, examples: Sequence[Example], model: Any, about: CacheFacts, progress: Any
) -> None:
    """Does what `build` does, once the folder is locked; `about` says what is wanted."""
    if (folder / "cache.json").is_file():
        about = _matching(folder, about, model.config.hidden_size)
    else:
        _create(folder, examples, about)
    with disk.writing(f"features of {_need(examples, about)}", folder):
        _allocate(folder / FEATURES)
    offset = _load(folder / "offset.npy", memory_map=False)
    stored_TF = _load_features(folder, about, int(offset[-1]), "r+")
    if progress:
        progress(int(offset[about.sequences_done]), int(offset[-1]))
    batch_tokens = BATCH_TOKENS[model.device.type]
    for start in range(about.sequences_done, len(examples), BLOCK):
        block = range(start, min(start + BLOCK, len(examples)))
        for indices in by_length(np.array(block), np.diff(offset), batch_tokens):
            rows = _forward([examples[i].token_T for i in indices], model, about.taps)
            for i, row in zip(indices, rows, strict=True):
                stored_TF[offset[i] : offset[i + 1]] = row
        stored_TF.flush()
        give_back_memory()  # what glibc keeps between batches of other sizes
        about = dataclasses.replace(about, sequences_done=block.stop)
        with disk.writing("cache.json", folder):
            _write_facts(folder, about)
        if progress:
            progress(int(offset[block.stop]), int(offset[-1]))


def _digest(examples: Sequence[Example]) -> str:
    """Returns the SHA-256 of all tokens and loss masks in hex."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.token_T.astype("<i4").tobytes() + example.loss_T.tobytes())
    return digest.hexdigest()


def _need(examples: Sequence[Example], about: CacheFacts) -> str:
    return disk.shown(_bytes(examples, about))


def _bytes(examples: Sequence[Example], about: CacheFacts) -> int:
    num_parts = 1 + len(about.taps)
    return size_estimate(examples, about.num_features // num_parts, len(about.taps))


def _create(folder: Path, examples: Sequence[Example], about: CacheFacts) -> None:
    """Writes a cache without features yet; raises UserError if the disk is too small for it."""
    folder.mkdir(parents=True, exist_ok=True)
    need, free = _bytes(examples, about), shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"the feature cache needs {need / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: "
            "use less data, or fewer taps, or set data.store_features = false"
        )
    offset = np.cumsum([0] + [len(e.token_T) for e in examples], dtype=np.int64)
    with disk.writing(f"features of {_need(examples, about)}", folder):
        np.save(folder / "offset.npy", offset)
        token_T = np.concatenate([e.token_T for e in examples])
        loss_T = np.concatenate([e.loss_T for e in examples])
        np.save(folder / "token_T.npy", token_T.astype(np.int32))
        np.save(folder / "loss_T.npy", loss_T.astype(bool))
        path, shape = folder / FEATURES, (int(offset[-1]), about.num_features)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape).flush()
        _allocate(path)
        _write_facts(folder, about)


def _allocate(path: Path) -> None:
    """Takes the whole file's blocks from the disk; raises OSError if they are not there.

    A file made for a memory map has none. If the disk fills up later, a write through the map kills
    the process with SIGBUS.
    """
    if sys.platform == "linux":
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _read_facts(folder: Path) -> CacheFacts:
    """Returns what cache.json says; raises UserError unless it is one."""
    path = folder / "cache.json"
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}, expected a feature cache") from error
    return from_mapping(CacheFacts, found, str(path))


def _write_facts(folder: Path, about: CacheFacts) -> None:
    write_atomically(folder / "cache.json", json.dumps(to_json(about), indent=1))


def _load_features(folder: Path, about: CacheFacts, num_rows: int, mode: Literal["r", "r+"]) -> Any:
    """Returns the array with the features; raises UserError if it is damaged."""
    found = _load(folder / FEATURES, mode)
    if found.shape != (num_rows, about.num_features) or found.dtype != np.uint16:
        raise _damaged(folder, f"{FEATURES} has shape {found.shape} and type {found.dtype}")
    return found


def _load(path: Path, mode: Literal["r", "r+"] = "r", memory_map: bool = True) -> Any:
    """Returns the array in `path`; raises UserError if it is missing, truncated or no array."""
    try:
        return np.load(path, mmap_mode=mode if memory_map else None)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path.parent, f"{path.name}: {error}") from error


def _damaged(folder: Path, reason: str) -> UserError:
    return UserError(
        f"got feature cache {folder}, which is damaged ({reason}): remove it to build it again"
    )


@torch.no_grad()
def of_tokens(model: Any, taps: Sequence[int], token_BT: Tensor) -> Tensor:
    """Returns the features bf16[B, T, F] of sequences, token_BT i64, which are padded on the right,
    where causal attention needs no mask."""
    parts = features_and_taps(model.model, token_BT.to(model.device), taps)
    return torch.cat([part.to(torch.bfloat16) for part in parts], dim=-1)


def _forward(tokens: Sequence[np.ndarray], model: Any, taps: Sequence[int]) -> list[np.ndarray]:
    """Returns the features of each sequence, u16[T, F]."""
    longest = max(len(t) for t in tokens)
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    for row, token_T in zip(ids, tokens, strict=True):
        row[: len(token_T)] = torch.from_numpy(token_T.astype(np.int64))
    bits = of_tokens(model, taps, ids).cpu().view(torch.uint16).numpy()
    return [row[: len(token_T)] for row, token_T in zip(bits, tokens, strict=True)]
