"""Stores the target's hidden states over the training data, once for all drafters.

The feature cache is a folder of flat arrays, one row a token, sequences back to back:

    token_T.npy     i32
    loss_T.npy      bool, True at answer tokens
    offset.npy      i64, sequence i is rows offset[i]:offset[i+1]
    feature_TF.npy  bfloat16 bit patterns as u16: features after the final norm, then each tap
    cache.json      what the cache was made from, and how many sequences are done

An interrupted build goes on from the last whole block of sequences.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from spec_export.training import disk
from spec_export.training.data import Example
from spec_runtime.files import locked, write_atomically
from spec_runtime.mapping import from_mapping, parse_json

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}  # padded tokens of one forward pass
BLOCK = 256  # sequences between two progress marks


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

    `taps` are the taps wanted, some of those that the cache holds; None means all. Raises
    ValueError on an unfinished cache, and on a tap that it lacks.
    """

    def __init__(self, folder: Path, taps: Sequence[int] | None = None) -> None:
        about = _read_facts(folder)
        self.offset = _load(folder / "offset.npy", memory_map=False)
        if about.sequences_done < self.num_sequences:
            raise ValueError(
                f"got feature cache {folder} with {about.sequences_done} of "
                f"{self.num_sequences} sequences, expected all: run the same command "
                "again, it goes on from there"
            )
        self.token_T, self.loss_T, self.feature_TF = (
            _load(folder / f"{name}.npy") for name in ("token_T", "loss_T", "feature_TF")
        )
        rows = {len(array) for array in (self.token_T, self.loss_T, self.feature_TF)}
        if rows != {int(self.offset[-1])} or self.feature_TF.shape[1:] != (about.num_features,):
            raise _damaged(folder, "its arrays differ in length")
        held = list(about.taps)
        wanted = held if taps is None else list(taps)
        if not set(wanted) <= set(held):
            raise ValueError(f"got feature cache {folder} with taps {held}, expected {wanted}")
        width = self.feature_TF.shape[1] // (1 + len(held))
        parts = [0, *(1 + held.index(tap) for tap in wanted)]
        self._columns = np.arange(self.feature_TF.shape[1]).reshape(-1, width)[parts].ravel()
        self._is_whole = wanted == held

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
        stored = np.array(self.feature_TF[rows])
        if not self._is_whole:
            stored = stored[:, self._columns]
        feature = torch.from_numpy(stored).view(torch.bfloat16)
        return token, torch.from_numpy(self.loss_T[rows].copy()), feature


def size_estimate(examples: Sequence[Example], num_features: int) -> int:
    """Returns the bytes that the cache of these examples takes on disk; `num_features` is F."""
    return sum(len(e.token_T) for e in examples) * (2 * num_features + 5)


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
    ValueError if the folder was made from other data, target or taps, if another process writes to
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
    `width` is the target's hidden size. Raises ValueError if the folder was made from other data,
    target or taps.
    """
    wanted = _facts(examples, width, fingerprint, taps)
    while not _is_complete(folder, wanted, width, len(examples)):
        time.sleep(0.5)


def _is_complete(folder: Path, wanted: CacheFacts, width: int, num_sequences: int) -> bool:
    """Returns whether the folder holds all features; raises ValueError as `_matching` does."""
    if not (folder / "cache.json").is_file():
        return False
    return _matching(folder, wanted, width).sequences_done == num_sequences


def _facts(
    examples: Sequence[Example], width: int, fingerprint: str, taps: Sequence[int]
) -> CacheFacts:
    """Returns the facts of a cache of which nothing is done yet."""
    return CacheFacts(fingerprint, tuple(taps), _digest(examples), width * (1 + len(taps)))


def _matching(folder: Path, wanted: CacheFacts, width: int) -> CacheFacts:
    """Returns the facts of the cache in `folder`, whose taps may be more than those wanted.

    Raises ValueError, which says what differs, if it is made from something else.
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
        raise ValueError(
            f"got feature cache {folder} made from other data, target or taps "
            f"({'; '.join(differing)}): name another folder, or remove it to build it again"
        )
    return found


def _shown(value: Any) -> str:
    """Returns taps and numbers as they are, and the beginning of a hash."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) > 12 else str(value)


def _build(
    folder: Path,
    examples: Sequence[Example],
    model: Any,
    about: CacheFacts,
    progress: Any,
) -> None:
    """Does what `build` does, once the folder is locked; `about` says what is wanted."""
    if (folder / "cache.json").is_file():
        about = _matching(folder, about, model.config.hidden_size)
    else:
        _create(folder, examples, about)
    feature_file = folder / "feature_TF.npy"
    with disk.writing(f"features of {_need(examples, about)}", folder):
        _allocate(feature_file)
    offset = _load(folder / "offset.npy", memory_map=False)
    feature_TF = _load(feature_file, "r+")
    if feature_TF.shape != (int(offset[-1]), about.num_features):
        raise _damaged(folder, f"feature_TF.npy has shape {feature_TF.shape}")
    if progress:
        progress(int(offset[about.sequences_done]), int(offset[-1]))
    for start in range(about.sequences_done, len(examples), BLOCK):
        block = range(start, min(start + BLOCK, len(examples)))
        for indices in _batches(block, examples, BATCH_TOKENS[model.device.type]):
            rows = _forward([examples[i].token_T for i in indices], model, about.taps)
            for i, row in zip(indices, rows, strict=True):
                feature_TF[offset[i] : offset[i + 1]] = row
        feature_TF.flush()
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
    return disk.shown(size_estimate(examples, about.num_features))


def _create(folder: Path, examples: Sequence[Example], about: CacheFacts) -> None:
    """Writes a cache without features yet; raises ValueError if the disk is too small for it."""
    folder.mkdir(parents=True, exist_ok=True)
    need, free = size_estimate(examples, about.num_features), shutil.disk_usage(folder).free
    if need > free:
        raise ValueError(
            f"the feature cache needs {need / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: "
            "use less data"
        )
    offset = np.cumsum([0] + [len(e.token_T) for e in examples], dtype=np.int64)
    shape = (int(offset[-1]), about.num_features)
    with disk.writing(f"features of {_need(examples, about)}", folder):
        np.save(folder / "offset.npy", offset)
        token_T = np.concatenate([e.token_T for e in examples])
        loss_T = np.concatenate([e.loss_T for e in examples])
        np.save(folder / "token_T.npy", token_T.astype(np.int32))
        np.save(folder / "loss_T.npy", loss_T.astype(bool))
        np.lib.format.open_memmap(
            folder / "feature_TF.npy", mode="w+", dtype=np.uint16, shape=shape
        ).flush()
        _allocate(folder / "feature_TF.npy")
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
    """Returns what cache.json says; raises ValueError unless it is one."""
    path = folder / "cache.json"
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}, expected a feature cache") from error
    return from_mapping(CacheFacts, found, str(path))


def _write_facts(folder: Path, about: CacheFacts) -> None:
    write_atomically(folder / "cache.json", json.dumps(dataclasses.asdict(about), indent=1))


def _load(path: Path, mode: Literal["r", "r+"] = "r", memory_map: bool = True) -> Any:
    """Returns the array in `path`; raises ValueError if it is missing, truncated or no array."""
    try:
        return np.load(path, mmap_mode=mode if memory_map else None)
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path.parent, f"{path.name}: {error}") from error


def _damaged(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"got feature cache {folder}, which is damaged ({reason}): remove it to build it again"
    )


def _batches(block: range, examples: Sequence[Example], batch_tokens: int) -> Iterator[list[int]]:
    """Yields the indices of `block` by length, in groups of up to `batch_tokens` padded tokens."""
    group: list[int] = []
    for i in sorted(block, key=lambda i: len(examples[i].token_T)):
        if group and (len(group) + 1) * len(examples[i].token_T) > batch_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@torch.inference_mode()
def _forward(tokens: Sequence[np.ndarray], model: Any, taps: Sequence[int]) -> list[np.ndarray]:
    """Returns the features of each sequence, u16[T, F].

    The sequences are padded on the right, where causal attention needs no mask.
    """
    longest = max(len(t) for t in tokens)
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    for row, token_T in zip(ids, tokens, strict=True):
        row[: len(token_T)] = torch.from_numpy(token_T.astype(np.int64))
    out = model.model(ids.to(model.device), output_hidden_states=bool(taps), use_cache=False)
    parts = [out.last_hidden_state] + [out.hidden_states[tap] for tap in taps]
    bits = torch.cat([p.to(torch.bfloat16) for p in parts], dim=-1).cpu().view(torch.uint16).numpy()
    return [row[: len(token_T)] for row, token_T in zip(bits, tokens, strict=True)]
