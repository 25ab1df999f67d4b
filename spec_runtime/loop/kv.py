"""Decides where key/value rows live; it is the only owner of position.

A cache hands out the feeds that tell a graph where to write N new rows and what they may attend,
and afterwards keeps a path of them. It holds places only: the tensors belong to the backend.
Capacity S = context + scratch; the scratch must hold the largest tree (`ContiguousCache`: plus
one row).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from spec_runtime.backends import Backend
from spec_runtime.backends.pad_rows import WIDTHS
from spec_runtime.backends.shapes import mask_width
from spec_runtime.trees.tree import tree_shape


class Cache(Protocol):
    """Declares what a target or a drafter asks of its cache."""

    capacity: int

    @property
    def length(self) -> int:
        """The number of committed rows, which is also the position of the next root."""

    def place(
        self, parent_N: np.ndarray, first: int = 0, block: int | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the feeds for N new nodes, at positions length + depth. Run the graph once then.

        There are always `position_ids` i64[1, N] and `mask` bool[1, 1, N, S] (True = attend): a
        node attends every committed row, its ancestors and itself. A node that is its own parent
        has no ancestors. The first `first` nodes were placed by earlier calls, and the feeds are
        for the rest. The nodes from number `block` on attend each other, both ways.
        """

    def unplace(self, first: int) -> None:
        """Forgets, of the nodes last placed, those from number `first` on; at least one stays."""

    def commit(self, path: Sequence[int]) -> None:
        """Keeps these nodes of the tree last placed, in order from the root; forgets the rest."""

    def truncate(self, length: int) -> None:
        """Forgets committed rows from `length` on."""


class SlotCache:
    """Never moves a row: a node is written to a free slot, lowest first, and stays if committed.

    Adds the feeds `slots` i64[N] and `seqlens_k` i32[1] = high-water mark - 1. Example, S = 6:
    after committing nodes 0 and 2 of three, slots 0 and 2 are taken, so the next two nodes go to
    slots 1 and 3, and seqlens_k is 3.

    For a graph that appends, see bundle.manifest.Graph, `move` brings rows in these slots
    to the first ones. Nodes then go behind all slots taken, 3 and 4 in the example, and rows are
    moved together where the holes between them would make masks wider than they need be.
    """

    def __init__(self, capacity: int, move: Callable[[np.ndarray], None] | None = None) -> None:
        self.capacity = capacity
        self.length = 0
        self._move = move
        self._slot_S = np.zeros(capacity, np.int64)  # the slot of committed row t, for t < length
        self._taken_S = np.zeros(capacity, np.bool_)
        self._top = -1  # highest taken slot
        self._placed_N = np.zeros(0, np.int64)  # slots of the nodes that may be committed

    def place(
        self, parent_N: np.ndarray, first: int = 0, block: int | None = None
    ) -> dict[str, np.ndarray]:
        n = len(parent_N)
        depth_N, ancestor_NN = _shape(parent_N, block)
        self._placed_N = placed = self._placed_N if first else self._placed_N[:0]
        assert len(placed) == first, f"{len(placed)} nodes placed before, not {first}"
        top = max(self._top, int(placed.max(initial=-1)))
        if self._move is None:
            free_S = ~self._taken_S[: top + 1 + n]
            free_S[placed] = False
            slot_N = np.concatenate([placed, free_S.nonzero()[0][: n - first]])
        else:
            top = self._together(top, n - first)
            last = min(top + 1 + n - first, self.capacity)
            slot_N = np.concatenate([self._placed_N, np.arange(top + 1, last)])
        assert len(slot_N) == n, f"{n} nodes, {len(slot_N)} free slots of {self.capacity}"
        mask_NS = np.empty((n - first, self.capacity), np.bool_)
        mask_NS[:] = self._taken_S
        mask_NS[:, slot_N] = ancestor_NN[first:]
        self._placed_N = slot_N
        top = max(top, int(slot_N[-1]))  # they ascend, after those placed before
        return {
            "position_ids": (self.length + depth_N[first:])[None],
            "mask": mask_NS[None, None],
            "slots": slot_N[first:],
            "seqlens_k": np.array([top], np.int32),
        }

    def _together(self, top: int, num_new: int) -> int:
        """Returns the last slot in use, once rows are moved together if new ones, padded as they
        may be, have no room or need a wider mask."""
        assert self._move is not None, "nothing moves rows"
        slot_T = np.concatenate([self._slot_S[: self.length], self._placed_N])
        num_rows, room = len(slot_T), max(num_new, WIDTHS[-1])
        if top + 1 == num_rows or top + 1 + room <= mask_width(num_rows + room, self.capacity):
            return top
        self._move(slot_T)
        slot_T = np.arange(num_rows)
        self._slot_S[: self.length], self._placed_N = np.split(slot_T, [self.length])
        self._taken_S[:] = False
        self._taken_S[: self.length] = True
        self._top = self.length - 1
        return num_rows - 1

    def unplace(self, first: int) -> None:
        assert 0 < first <= len(self._placed_N), (first, len(self._placed_N))
        self._placed_N = self._placed_N[:first]

    def slots(self, begin: int, end: int) -> np.ndarray:
        """Returns the slots of committed rows begin … end - 1, i64[end - begin]."""
        assert 0 <= begin <= end <= self.length, (begin, end, self.length)
        return self._slot_S[begin:end]

    def hold(self, slot_N: np.ndarray) -> None:
        """Replaces `place` for nodes that a graph wrote to free slots of its own choice."""
        self._placed_N = slot_N

    def commit(self, path: Sequence[int]) -> None:
        assert len(self._placed_N) > 0, "commit without place"
        slot_P = self._placed_N[np.asarray(path, np.int64)]
        self._placed_N = self._placed_N[:0]
        self._slot_S[self.length : self.length + len(slot_P)] = slot_P
        self._taken_S[slot_P] = True
        self._top = max(self._top, int(slot_P.max(initial=-1)))
        self.length += len(slot_P)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, (length, self.length)
        self._placed_N = self._placed_N[:0]
        self._taken_S[self._slot_S[length : self.length]] = False
        self._top = int(self._slot_S[:length].max(initial=-1))
        self.length = length


class ContiguousCache:
    """Brings row t into slot t; the move is folded into the next step's write.

    Adds the feeds `write_index` i64[1], `src` i64[A] and `perm` i64[A + N], for a graph that writes
    concat(cache[src], new rows)[perm] at `write_index`. Example: 4 rows in place, nodes 0 and 2
    of the tree in slots 4, 5, 6 committed. Node 0 is in place already (5 rows); the next step
    has src [6], write_index 5: slot 6 moves to 5, and the new nodes start at slot 6.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._in_place = 0
        self._pending: np.ndarray = np.zeros(0, np.int64)  # slots of committed rows to be moved
        self._num_placed = 0

    @property
    def length(self) -> int:
        return self._in_place + len(self._pending)

    def place(
        self, parent_N: np.ndarray, first: int = 0, block: int | None = None
    ) -> dict[str, np.ndarray]:
        n, length, src = len(parent_N) - first, self.length, self._pending
        assert first == 0 or (self._num_placed == first and len(src) == 0), (first, len(src))
        moved, begin = len(src), self._in_place + first
        perm = np.arange(moved + n, dtype=np.int64)
        if moved == 0:
            # never an empty tensor: one dummy row, which perm puts after the new ones
            src, perm = np.zeros(1, np.int64), np.append(perm + 1, 0)
        assert begin + len(perm) <= self.capacity, (begin, len(perm))
        mask_NS = np.zeros((n, self.capacity), np.bool_)
        mask_NS[:, :length] = True
        depth_N, ancestor_NN = _shape(parent_N, block)
        mask_NS[:, length : length + first + n] = ancestor_NN[first:]
        feeds = {
            "position_ids": (length + depth_N[first:])[None],
            "mask": mask_NS[None, None],
            "write_index": np.array([begin], np.int64),
            "src": src,
            "perm": perm,
        }
        # the run that follows moves the pending rows, whatever is then committed
        self._in_place, self._pending, self._num_placed = length, self._pending[:0], first + n
        return feeds

    def unplace(self, first: int) -> None:
        assert 0 < first <= self._num_placed, (first, self._num_placed)
        self._num_placed = first

    def commit(self, path: Sequence[int]) -> None:
        node_P = np.asarray(path, np.int64)
        assert node_P.max(initial=-1) < self._num_placed, (path, self._num_placed)
        ahead = np.cumsum(node_P != np.arange(len(node_P))) == 0
        base, num_in_place = self._in_place, int(ahead.sum())
        self._in_place = base + num_in_place
        self._pending = base + node_P[num_in_place:]
        self._num_placed = 0

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, (length, self.length)
        self._num_placed = 0
        self._in_place = min(self._in_place, length)
        self._pending = self._pending[: length - self._in_place]


def _shape(parent_N: np.ndarray, block: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the depth i64[N] of each node, and which nodes it attends, bool[N, N]."""
    depth_N, ancestor_NN = tree_shape(parent_N)
    if block is not None:
        ancestor_NN = ancestor_NN.copy()  # a tree's shape is kept for the next one like it
        ancestor_NN[block:, block:] = True
    return depth_N, ancestor_NN


def open_cache(form: str, capacity: int, backend: Backend | None = None) -> Cache:
    """Returns a cache that feeds graphs of this form (see bundle.manifest.Graph), and whose rows
    the backend moves if its graph appends them."""
    kinds: dict[str, Callable[[int], Cache]] = {
        "slots": partial(SlotCache, move=getattr(backend, "append_mover", None)),
        "contiguous": ContiguousCache,
    }
    return kinds[form](capacity)
