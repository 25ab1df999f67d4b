"""Keeps the KV rows of earlier conversations on the host, so that they go on without being read
again."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class ConversationRows:
    """Holds the rows of `tokens`: their KV by buffer, see RowBackend, and their features f32[T, F]
    if the drafter reads features."""

    tokens: list[int]
    kv: Mapping[str, np.ndarray]
    features_TF: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        features = 0 if self.features_TF is None else self.features_TF.nbytes
        return features + sum(rows.nbytes for rows in self.kv.values())


class RestoredRows(NamedTuple):
    """Says that the target's rows were brought back, of which the proposer knows nothing; holds
    their features f32[T, F], if it reads any."""

    features_TF: np.ndarray | None

    def features_before(self, new_TF: np.ndarray | None) -> np.ndarray | None:
        """Returns the features of these rows and then `new_TF`, None if there are none."""
        if self.features_TF is None or new_TF is None:
            return None
        return np.concatenate([self.features_TF, new_TF])


class RowStore:
    """Keeps rows of conversations up to `max_bytes`; that least recently used goes first. Threads
    may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._kept: list[ConversationRows] = []  # the last used is the last

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, rows: ConversationRows) -> None:
        """Keeps these rows if there is room for them, and drops kept rows that begin them."""
        if rows.num_bytes > self.max_bytes:
            return
        length = len(rows.tokens)
        with self._lock:
            self._kept = [
                kept
                for kept in self._kept
                if common_length(kept.tokens, rows.tokens) < len(kept.tokens)
            ]
            if any(common_length(kept.tokens, rows.tokens) == length for kept in self._kept):
                return  # a longer one begins with them
            self._kept.append(rows)
            while self.num_bytes > self.max_bytes:
                del self._kept[0]

    def drop(self, rows: ConversationRows) -> None:
        """Keeps these rows no longer."""
        with self._lock:
            self._kept = [kept for kept in self._kept if kept is not rows]

    def find(self, prompt: Sequence[int]) -> tuple[ConversationRows | None, int]:
        """Returns the rows that have the most tokens in common with the prompt's beginning, and how
        many, and counts them as used."""
        best, length = None, 0
        with self._lock:
            for kept in self._kept:
                num_common = common_length(kept.tokens, prompt)
                if num_common > length:
                    best, length = kept, num_common
            if best is not None:
                self.drop(best)
                self._kept.append(best)
        return best, length


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many tokens both begin with: ([1, 2, 3], [1, 2, 4, 5]) -> 2."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
