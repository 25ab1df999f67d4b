"""The target at run time: backend + cache -> logits and features.

It knows tokens, rows and positions, not where a draft came from nor what is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from spec_runtime.backends import Backend
from spec_runtime.kv import Cache
from spec_runtime.tree import TokenTree

PREFILL_ROWS = 256


class Verified:
    """What the target said about M rows, read on demand, valid until the target's next run."""

    def __init__(self, logits_MV: np.ndarray, features: Sequence[np.ndarray]) -> None:
        self._logits_MV = logits_MV
        self._features = features

    @cached_property
    def argmax_N(self) -> np.ndarray:
        return self._logits_MV.argmax(axis=1)

    def row(self, node: int) -> np.ndarray:
        """Logits f32[V] after this node."""
        return self._logits_MV[node]

    def features(self, path: Sequence[int]) -> np.ndarray:
        """Features f32[P, F] of these nodes (a copy): final hidden state, then the taps."""
        return np.concatenate([part_ND[path] for part_ND in self._features], axis=1)


class Target:
    """One model with its KV cache. `length` is the number of committed rows.

    `features` asks the graph for features, which cost a copy: only when the proposer wants them.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        *,
        vocab_size: int,
        max_length: int,
        taps: Sequence[int] = (),
    ) -> None:
        assert backend.capacity == cache.capacity > max_length, (backend.capacity, max_length)
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.max_nodes = cache.capacity - max_length  # of a tree; one less with a dummy row
        self.holder: object = None  # whose tokens the KV holds (see engine.py)
        self.run_seconds = 0.0  # spent in the backend so far
        self.taps = tuple(taps)  # what features have besides the final hidden state (engine.py)
        self._backend = backend
        self._cache = cache
        self._row_N = np.arange(max(PREFILL_ROWS, cache.capacity), dtype=np.int64)

    @property
    def length(self) -> int:
        return self._cache.length

    def lend(self) -> tuple[Backend, Cache]:
        """Backend and cache, for a drafter that is a part of the target: it may run nodes on the
        cache, but not commit them."""
        return self._backend, self._cache

    def prefill(
        self, tokens: Sequence[int], features: bool = False
    ) -> tuple[Verified, np.ndarray | None]:
        """Commits `tokens` (at least one) in chunks.

        Returns the last row's logits and the new rows' features f32[T, F] (None if not asked).
        """
        chunks_TF = []
        for begin in range(0, len(tokens), PREFILL_ROWS):
            chunk = TokenTree.chain(tokens[begin : begin + PREFILL_ROWS])
            last = chunk.num_nodes - 1
            verified = self._run(chunk, self._row_N[last : last + 1], features)
            if features:
                chunks_TF.append(verified.features(range(chunk.num_nodes)))
            self.commit(range(chunk.num_nodes))
        return verified, np.concatenate(chunks_TF) if features else None

    def verify(self, tree: TokenTree, features: bool = False) -> Verified:
        """One pass over the tree; nothing is committed yet."""
        return self._run(tree, self._row_N[: tree.num_nodes], features)

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows of these nodes of the tree last verified."""
        self._cache.commit(path)

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def _run(self, tree: TokenTree, row_M: np.ndarray, features: bool) -> Verified:
        feeds = self._cache.place(tree.parent_N)
        feeds["input_ids"] = tree.token_N[None]
        feeds["logit_rows"] = row_M
        feature_names = ["features", *(f"taps.{i}" for i in self.taps)] if features else []
        begin = time.perf_counter()
        outputs = self._backend.run(feeds, ["logits", *feature_names])
        self.run_seconds += time.perf_counter() - begin
        return Verified(outputs["logits"], [outputs[name] for name in feature_names])
