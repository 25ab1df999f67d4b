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

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_export.training.data import Example
from spec_runtime.files import write_atomically

BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}  # padded tokens of one forward pass
BLOCK = 256  # sequences between two progress marks


class FeatureCache:
    """Reads a finished cache; a `batches.SequenceStore`.

    `taps` are the taps wanted, some of those that the cache holds; None means all. Raises
    ValueError on an unfinished cache, and on a tap that it lacks.
    """

    def __init__(self, folder: Path, taps: Sequence[int] | None = None) -> None:
        self.token_T = np.load(folder / "token_T.npy", mmap_mode="r")
        self.loss_T = np.load(folder / "loss_T.npy", mmap_mode="r")
        self.feature_TF = np.load(folder / "feature_TF.npy", mmap_mode="r")
        self.offset = np.load(folder / "offset.npy")
        self.about = json.loads((folder / "cache.json").read_text())
        if self.about["sequences_done"] < self.num_sequences:
            raise ValueError(
                f"got feature cache {folder} with {self.about['sequences_done']} of "
                f"{self.num_sequences} sequences, expected all: run the same command "
                "again, it goes on from there"
            )
        held = self.about["taps"]
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
    target_name: str,
    taps: Sequence[int],
    progress: Any = None,
) -> FeatureCache:
    """Runs a (bf16) transformers target over every example and stores its features.

    A stopped build goes on, and a finished cache that holds more taps is taken as it is.
    `progress(done, total)` is called with token counts. Raises ValueError if the folder was made
    from other data, target or taps, and if the disk is too small.
    """
    wanted = taps
    found = None
    if (folder / "cache.json").is_file():
        found = json.loads((folder / "cache.json").read_text())
        held = found.get("taps", [])
        taps = held if set(taps) <= set(held) else taps
    num_features = model.config.hidden_size * (1 + len(taps))
    made_from = {
        "target": target_name,
        "taps": list(taps),
        "data": _digest(examples),
        "num_features": num_features,
    }
    if found is None:
        about = made_from | {"sequences_done": 0}
        _create(folder, examples, num_features, about)
    elif {key: found.get(key) for key in made_from} != made_from:
        raise ValueError(
            f"got feature cache {folder} made from other data, target or taps: name another folder"
        )
    else:
        about = found
    offset = np.load(folder / "offset.npy")
    feature_TF = np.lib.format.open_memmap(folder / "feature_TF.npy", mode="r+")
    for start in range(about["sequences_done"], len(examples), BLOCK):
        block = range(start, min(start + BLOCK, len(examples)))
        for indices in _batches(block, examples, BATCH_TOKENS[model.device.type]):
            rows = _forward([examples[i].token_T for i in indices], model, taps)
            for i, row in zip(indices, rows, strict=True):
                feature_TF[offset[i] : offset[i + 1]] = row
        feature_TF.flush()
        about["sequences_done"] = block.stop
        _write_json(folder / "cache.json", about)
        if progress:
            progress(int(offset[block.stop]), int(offset[-1]))
    return FeatureCache(folder, wanted)


def _digest(examples: Sequence[Example]) -> str:
    """Returns the SHA-256 of all tokens and loss masks in hex."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.token_T.astype("<i4").tobytes() + example.loss_T.tobytes())
    return digest.hexdigest()


def _create(
    folder: Path, examples: Sequence[Example], num_features: int, about: dict[str, Any]
) -> None:
    """Writes a cache without features yet; raises ValueError if the disk is too small for it."""
    folder.mkdir(parents=True, exist_ok=True)
    need, free = size_estimate(examples, num_features), shutil.disk_usage(folder).free
    if need > free:
        raise ValueError(
            f"the feature cache needs {need / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free: "
            "use less data"
        )
    offset = np.cumsum([0] + [len(e.token_T) for e in examples], dtype=np.int64)
    np.save(folder / "offset.npy", offset)
    np.save(folder / "token_T.npy", np.concatenate([e.token_T for e in examples]).astype(np.int32))
    np.save(folder / "loss_T.npy", np.concatenate([e.loss_T for e in examples]).astype(bool))
    shape = (int(offset[-1]), num_features)
    np.lib.format.open_memmap(
        folder / "feature_TF.npy", mode="w+", dtype=np.uint16, shape=shape
    ).flush()
    _write_json(folder / "cache.json", about)


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=1))
