"""Stores the target's hidden states over the training data, once for all drafters.

The feature cache is a folder of flat arrays, one row a token, sequences back to back:

    token_T.npy     i32
    loss_T.npy      bool, True at answer tokens
    offset.npy      i64, sequence i is rows offset[i]:offset[i+1]
    feature_TF.npy  bfloat16 bit patterns as u16: features after the final norm, then each tap
    done_N.npy      bool, True at sequences whose features are there
    cache.json      what the cache was made from

Of several processes each computes every n-th sequence. An interrupted build, by however many, goes
on with the sequences that are not done.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
FEATURES, DONE = "feature_TF.npy", "done_N.npy"


@dataclass(frozen=True)
class CacheFacts:
    """The contents of cache.json: what the cache is made from.

    `target` is the target's fingerprint, `data` a SHA-256 of all tokens and loss masks.
    """

    target: str
    taps: tuple[int, ...]
    data: str
    num_features: int


class FeatureCache:
    """Reads a finished cache; a `batches.SequenceStore`.

    `taps` are the wanted taps, which the cache must hold; None means all. Raises
    UserError on an unfinished cache, and on a tap that it lacks.
    """

    def __init__(self, folder: Path, taps: Sequence[int] | None = None) -> None:
        about = _read_facts(folder)
        self.offset = _load(folder / "offset.npy", memory_map=False)
        num_done = int(_load(folder / DONE).sum())
        if num_done < self.num_sequences:
            raise UserError(
                f"got feature cache {folder} with {num_done} of {self.num_sequences} sequences, "
                "expected all: run the same command again, it goes on from there"
            )
        self.token_T, self.loss_T = (_load(folder / f"{x}.npy") for x in ("token_T", "loss_T"))
        self._feature_TF = _load_features(folder, about, int(self.offset[-1]), "r")
        if {len(self.token_T), len(self.loss_T)} != {int(self.offset[-1])}:
            raise _damaged(folder, "its arrays differ in length")
        self.answers_N = np.add.reduceat(self.loss_T, self.offset[:-1], dtype=np.int64)
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
    rank: int = 0,
    ranks: int = 1,
) -> FeatureCache:
    """Runs a (bf16) transformers target over every example and stores its features.

    A stopped build goes on, and a finished cache that holds more taps is taken as it is.
    `fingerprint` is the target's (`target.fingerprint`). `progress(done, total)` is called with
    token counts: first with what an earlier build has done, then after each block. Of `ranks`
    processes that call this, each computes its share and waits for the others', in the file: a
    process group would give up after some minutes. Raises UserError if the folder was made from
    other data, target or taps, if another run writes to it, and if the disk is too small.
    """
    wanted = _facts(examples, model.config.hidden_size, fingerprint, taps)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if rank else locked(folder):
        if not rank and not (folder / "cache.json").is_file():
            _create(folder, examples, wanted)
        _wait_until((folder / "cache.json").is_file)
        about = _matching(folder, wanted, model.config.hidden_size)
        done_N = _load(folder / DONE, "r+")
        _fill(folder, examples, model, about, done_N, progress, range(rank, len(examples), ranks))
        _wait_until(done_N.all)
    return FeatureCache(folder, taps)


def is_built(
    folder: Path, examples: Sequence[Example], width: int, fingerprint: str, taps: Sequence[int]
) -> bool:
    """Returns whether the folder holds all that `build` would compute with a target of this hidden
    size; raises UserError if it was made from other data, target or taps."""
    if not (folder / "cache.json").is_file():
        return False
    _matching(folder, _facts(examples, width, fingerprint, taps), width)
    return bool(_load(folder / DONE).all())


def _wait_until(is_so: Callable[[], Any]) -> None:
    while not is_so():
        time.sleep(0.1)


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


def _fill(
    folder: Path,
    examples: Sequence[Example],
    model: Any,
    about: CacheFacts,
    done_N: Any,
    progress: Any,
    mine: Sequence[int],
) -> None:
    """Computes the features of the sequences `mine` that are not done, and marks them in done_N."""
    offset = _load(folder / "offset.npy", memory_map=False)
    stored_TF = _load_features(folder, about, int(offset[-1]), "r+")
    length_N, batch_tokens = np.diff(offset), BATCH_TOKENS[model.device.type]

    def say() -> None:
        if progress:
            progress(int(length_N[done_N].sum()), int(offset[-1]))

    say()
    left = np.array([i for i in mine if not done_N[i]], dtype=np.int64)
    for start in range(0, len(left), BLOCK):
        block = left[start : start + BLOCK]
        for indices in by_length(block, length_N, batch_tokens):
            rows = _forward([examples[i].token_T for i in indices], model, about.taps)
            for i, row in zip(indices, rows, strict=True):
                stored_TF[offset[i] : offset[i + 1]] = row
        stored_TF.flush()
        done_N[block] = True
        done_N.flush()
        give_back_memory()  # what glibc keeps between batches of other sizes
        say()


def _digest(examples: Sequence[Example]) -> str:
    """Returns the SHA-256 of all tokens and loss masks in hex."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.token_T.astype("<i4").tobytes() + example.loss_T.tobytes())
    return digest.hexdigest()


def _create(folder: Path, examples: Sequence[Example], about: CacheFacts) -> None:
    """Writes a cache without features yet; raises UserError if the disk is too small for it."""
    folder.mkdir(parents=True, exist_ok=True)
    width = about.num_features // (1 + len(about.taps))
    need, free = size_estimate(examples, width, len(about.taps)), shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"the feature cache needs {need / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: "
            "use less data, or fewer taps, or set data.store_features = false"
        )
    offset = np.cumsum([0] + [len(e.token_T) for e in examples], dtype=np.int64)
    with disk.writing(f"features of {disk.shown(need)}", folder):
        np.save(folder / "offset.npy", offset)
        token_T = np.concatenate([e.token_T for e in examples])
        loss_T = np.concatenate([e.loss_T for e in examples])
        np.save(folder / "token_T.npy", token_T.astype(np.int32))
        np.save(folder / "loss_T.npy", loss_T.astype(bool))
        path, shape = folder / FEATURES, (int(offset[-1]), about.num_features)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=shape).flush()
        _allocate(path)
        np.save(folder / DONE, np.zeros(len(examples), bool))
        write_atomically(folder / "cache.json", json.dumps(to_json(about), indent=1))


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
