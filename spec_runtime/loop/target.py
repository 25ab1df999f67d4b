"""Runs the target: tokens and a cache go in, logits and features come out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from spec_runtime.backends import Backend, DeviceBackend, GraphRun, RowBackend, Rows, RowsReader
from spec_runtime.loop.fair_lock import FairLock, Holder
from spec_runtime.loop.kv import Cache, SlotCache
from spec_runtime.sampling import TopLogits
from spec_runtime.trees.tree import TokenTree

PREFILL_ROWS = 256
ARGMAX = "argmax_ids"  # the output i64[M] of targets built for a device
# Outputs of a second graph, run for requests that sample: i64[M, K], f32[M, K], f32[M].
TOP = TOP_IDS, TOP_LOGITS, LOGSUMEXP = "top_ids", "top_logits", "logsumexp"
# In fp32, two logits closer than this share of their row's range may change places when the row is
# computed in another form: by itself or among others, in other slots. The demo target's logits
# moved by 1.4e-6 of it at most.
NEAR_TIE = 1e-4
# The `strict_gap` of each precision that has one; below fp16 too many rows are that close.
STRICT_GAPS = {"fp32": NEAR_TIE, "fp16": 1e-2}


@dataclass(frozen=True)
class Wants:
    """Says what a run of the target returns in addition to logits.

    `features` names outputs with hidden states, which cost a copy and make up the features of a
    row, in this order. `top` asks a target on a device for the largest logits of each row, which
    settle most draws and are found by a graph of their own; otherwise it gives the argmax.
    """

    features: tuple[str, ...] = ()
    top: bool = False


LOGITS = Wants()  # nothing else


def idle() -> None:
    """Does nothing."""


def top_gap(logits_V: np.ndarray) -> float:
    """Returns the largest logit less the next one, as a share of the row's range; 0 for a tie.

    >>> top_gap(np.array([1.0, 5.0, 4.0]))
    0.25
    """
    top = int(logits_V.argmax())
    before, after = logits_V[:top], logits_V[top + 1 :]
    spread = logits_V[top] - logits_V.min()
    gap = logits_V[top] - max(before.max(initial=-np.inf), after.max(initial=-np.inf))
    return float(gap / spread) if spread > 0 else 0.0


class Verified:
    """Holds what the target said about M rows of `tree`, read on demand.

    It is valid until the target's next run. After `verify` the M rows are all of the tree's, after
    `prefill` the last one. `best_M` i64[M] is the rows' argmax, -1 where a row is not finite, and
    `top` the outputs TOP, if they were computed.
    """

    def __init__(
        self,
        logits_MV: np.ndarray | Rows,
        features: Sequence[np.ndarray],
        tree: TokenTree,
        best_M: np.ndarray | None = None,
        top: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.tree = tree
        self._logits_MV = logits_MV
        self._features = features
        self._best_M = best_M
        self._top = top

    @cached_property
    def argmax_N(self) -> np.ndarray:
        if self._best_M is not None and (self._best_M >= 0).all():
            return self._best_M
        return np.asarray(self._logits_MV).argmax(axis=1)

    def best(self, node: int) -> int | None:
        """Returns the argmax of the logits after `node`, or None if they must be read for it."""
        if self._best_M is None or self._best_M[node] < 0:
            return None
        return int(self._best_M[node])

    def top(self, node: int) -> TopLogits | None:
        """Returns the largest logits after `node`, or None if all of them must be read."""
        if self._top is None:
            return None
        id_MK, logit_MK, logsumexp_M = self._top
        return TopLogits(id_MK[node], logit_MK[node], float(logsumexp_M[node]))

    def row(self, node: int) -> np.ndarray:
        """Returns the logits f32[V] after `node`."""
        return self._logits_MV[node]

    def last(self) -> Verified:
        """Returns what `verify` would have with `last_only`: the last row, of the whole tree."""
        logits_1V = self.row(self.tree.num_nodes - 1)[None]
        best_1 = None if self._best_M is None else self._best_M[-1:]
        top = None if self._top is None else [rows[-1:] for rows in self._top]
        return Verified(logits_1V, self._features, self.tree, best_1, top)

    def features(self, path: Sequence[int]) -> np.ndarray:
        """Returns a copy of these nodes' features f32[P, F], the outputs wanted side by side."""
        return np.concatenate([part_ND[path] for part_ND in self._features], axis=1)


class StrictVerified(Verified):
    """A pass whose near ties are decided by one-row passes, like every token of plain decoding.

    A row is judged when it is first read, before the commit. The one-row pass overwrites what the
    target's run returned, so the rest is copied first. KV rows and features stay those of the tree.
    """

    def __init__(
        self,
        logits_MV: np.ndarray | Rows,
        features: Sequence[np.ndarray],
        tree: TokenTree,
        target: Target,
    ) -> None:
        super().__init__(logits_MV, features, tree)
        self._target, self._length = target, target.length
        self._judged: set[int] = set()
        self._is_copied = False

    def row(self, node: int) -> np.ndarray:
        is_open = self._target.length == self._length
        if is_open and node not in self._judged:
            self._judged.add(node)
            if self._target.needs_redo(self._logits_MV[node]):
                if not self._is_copied:
                    self._logits_MV = np.array(self._logits_MV)
                    self._features = [part_ND.copy() for part_ND in self._features]
                    self._is_copied = True
                assert isinstance(self._logits_MV, np.ndarray)
                self._logits_MV[node] = self._target.redo(self.tree, node)
        return self._logits_MV[node]


class Target:
    """One model with its KV cache. `length` is the number of committed rows.

    Rows of a tree whose `top_gap` is at most `strict_gap` are redone as one-row passes, in a slot
    after the tree's; with None no row is. `num_judged` counts the rows looked at, `num_redone`
    those redone, and `redo_seconds` what that took.

    A thread that runs the target holds its `lock`, or has it `alone`. `rows_of` is the holder whose
    generation wrote the rows, None if no later generation may rely on them. `precision`
    is that of the weights and products; `has_exact_rows` says that a row depends on the others of
    its pass and on its slots in no more than fp32's last bits. `sampling` finds the largest logits
    on a device; without it whole rows are fetched to draw from.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        *,
        vocab_size: int,
        max_length: int,
        feature_widths: Mapping[str, int] | None = None,
        precision: str = "fp32",
        has_exact_rows: bool = True,
        strict_gap: float | None = None,
        sampling: RowsReader | None = None,
    ) -> None:
        assert backend.capacity == cache.capacity > max_length, (backend.capacity, max_length)
        self.vocab_size = vocab_size
        self.feature_widths = feature_widths or {}  # none where no conversations are kept
        self.max_length = max_length
        # The largest tree; a strict target keeps one slot for the row that is redone.
        self.max_nodes = cache.capacity - max_length - (strict_gap is not None)
        self.precision = precision
        self.has_exact_rows = has_exact_rows
        self.strict_gap = strict_gap
        self.num_judged = self.num_redone = 0
        self.redo_seconds = 0.0
        self.run_seconds = 0.0  # spent in the backend so far
        self.lock = FairLock()
        self.rows_of: Holder | None = None
        self._backend = backend
        self._device = backend if isinstance(backend, DeviceBackend) else None
        self._sampling = sampling
        self._cache = cache
        self._row_N = np.arange(max(PREFILL_ROWS, cache.capacity), dtype=np.int64)

    @property
    def length(self) -> int:
        return self._cache.length

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Has the target without any rows while the block runs, which may run it as it likes.

        Waits until other threads' generations are through; raises RuntimeError inside a stream of
        this thread.
        """
        with self.lock.hold():
            self.rows_of = None
            self.truncate(0)
            yield

    def lend(self) -> tuple[Backend, Cache]:
        """Returns backend and cache, for a drafter that is a part of the target: it may run nodes
        on the cache, but not commit them."""
        return self._backend, self._cache

    def feature_rows(self, begin: int, end: int) -> np.ndarray:
        """Returns which rows i64[end - begin] of the target's banks hold the features of these
        committed positions, for graphs that keep them there (see bundle.manifest.BANK)."""
        assert isinstance(self._cache, SlotCache), self._cache
        return self._cache.slots(begin, end)

    def prefill(
        self, tokens: Sequence[int], wants: Wants = LOGITS
    ) -> tuple[Verified, np.ndarray | None]:
        """Commits `tokens` (at least one) in chunks.

        Returns the last row's logits and the new rows' features f32[T, F], None if not wanted.
        """
        chunks_TF = []
        for begin in range(0, len(tokens), PREFILL_ROWS):
            chunk = TokenTree.chain(tokens[begin : begin + PREFILL_ROWS])
            verified = self.verify(chunk, wants, last_only=True)
            if wants.features:
                chunks_TF.append(verified.features(range(chunk.num_nodes)))
            self.commit(range(chunk.num_nodes))
        return verified, np.concatenate(chunks_TF) if wants.features else None

    def verify(
        self,
        tree: TokenTree,
        wants: Wants = LOGITS,
        last_only: bool = False,
        meanwhile: Callable[[], None] = idle,
    ) -> Verified:
        """Runs one pass over the tree; nothing is committed yet.

        `last_only` asks for the logits of the last node and no other, which are then the only row.
        Logits stay on the device if there is one. `meanwhile` is called while that runs the pass;
        on a CPU, before it.
        """
        feeds = self._feeds(tree, self._rows(tree.num_nodes, last_only))
        names, argmax = list(wants.features), self._argmax
        found: dict[str, Any]
        if self._device is None:
            meanwhile()
            begin = time.perf_counter()
            found = dict(self._backend.run(feeds, ["logits", *names]))
        else:
            begin = time.perf_counter()
            sampling = self._sampling if wants.top else None
            # No draw needs the argmax. It stays on the device, so that greedy requests and those
            # that sample share captured graphs, which are kept by what is asked for.
            fetched, kept = (names, argmax) if sampling else (names + argmax, [])
            finish = self._device.start(feeds, fetched, [*kept, "logits"])
            meanwhile()
            outputs, rows = finish()
            found = {**outputs, **rows}
            if sampling is not None:
                found |= zip(TOP, sampling.run(rows["logits"], TOP), strict=True)
        self.run_seconds += time.perf_counter() - begin
        return self._verified(tree, wants, found, self._is_strict(tree, last_only))

    def needs_redo(self, logits_V: np.ndarray) -> bool:
        """Returns whether a tree's row of logits f32[V] is too near a tie; counts the question."""
        assert self.strict_gap is not None
        self.num_judged += 1
        return top_gap(logits_V) <= self.strict_gap

    def redo(self, tree: TokenTree, node: int) -> np.ndarray:
        """Returns the logits f32[V] of a node of the last tree, by a pass over only this node."""
        begin = time.perf_counter()
        n = tree.num_nodes
        # The node runs again as a twin: a sibling of the same token, for the root another root.
        parent = n if node == 0 else tree.parent_N[node]
        feeds = self._cache.place(np.append(tree.parent_N, parent), first=n)
        feeds["input_ids"] = tree.token_N[None, node : node + 1]
        feeds["logit_rows"] = self._row_N[:1]
        logits_V = self._backend.run(feeds, ["logits"])["logits"][0]
        self._cache.unplace(n)
        seconds = time.perf_counter() - begin
        self.num_redone += 1
        self.redo_seconds += seconds
        self.run_seconds += seconds
        return logits_V

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows of these nodes of the tree last verified; the others are free again."""
        self._cache.commit(path)

    def truncate(self, length: int) -> None:
        """Forgets committed rows from `length` on."""
        self._cache.truncate(length)

    @property
    def keeps_rows(self) -> bool:
        """Says whether `copy_rows` and `restore_rows` work with this backend and form of cache."""
        return isinstance(self._backend, RowBackend) and isinstance(self._cache, SlotCache)

    def copy_rows(self, length: int) -> dict[str, np.ndarray]:
        """Returns copies of the first `length` rows, by buffer."""
        assert isinstance(self._backend, RowBackend)
        assert isinstance(self._cache, SlotCache)
        return self._backend.read_rows(self._cache.slots(0, length))

    def restore_rows(self, rows: Mapping[str, np.ndarray], length: int) -> None:
        """Makes the first `length` of these rows the committed ones, in place of all there are."""
        assert isinstance(self._backend, RowBackend)
        assert isinstance(self._cache, SlotCache)
        slot_N = np.arange(length, dtype=np.int64)
        self._cache.truncate(0)
        self._backend.write_rows(slot_N, rows)
        self._cache.hold(slot_N)
        self._cache.commit(range(length))

    def forget(self) -> None:
        """Drops all rows, so that the next generation reuses none; waits as `alone` does."""
        with self.alone():
            pass

    def _verified(
        self, tree: TokenTree, wants: Wants, found: Mapping[str, Any], is_strict: bool
    ) -> Verified:
        """Returns the outputs of a run as what was wanted of it."""
        parts = [found[name] for name in wants.features]
        if is_strict:
            return StrictVerified(found["logits"], parts, tree, self)
        if wants.top and TOP_IDS in found:
            return Verified(found["logits"], parts, tree, top=[found[name] for name in TOP])
        return Verified(found["logits"], parts, tree, found.get(ARGMAX))

    @property
    def is_on_device(self) -> bool:
        """Says whether the host may work while a pass runs, see `verify`."""
        return self._device is not None

    @property
    def _argmax(self) -> list[str]:
        """Names the output with the argmax, if there is one."""
        has_argmax = self._device is not None and self._device.has_output(ARGMAX)
        return [ARGMAX] if has_argmax else []

    def _rows(self, num_nodes: int, last_only: bool) -> np.ndarray:
        """Returns which rows' logits a pass is asked for, i64[M]."""
        return self._row_N[num_nodes - 1 if last_only else 0 : num_nodes]

    def _is_strict(self, tree: TokenTree, last_only: bool) -> bool:
        return self.strict_gap is not None and tree.num_nodes > 1 and not last_only

    def _feeds(self, tree: TokenTree, row_M: np.ndarray) -> dict[str, np.ndarray]:
        """Returns what a run over the tree reads, for the logits of the rows `row_M`."""
        feeds = self._cache.place(tree.parent_N)
        feeds["input_ids"] = tree.token_N[None]
        feeds["logit_rows"] = row_M
        return feeds


class Asked(NamedTuple):
    """Holds the arguments of `Target.verify`."""

    tree: TokenTree
    wants: Wants = LOGITS
    last_only: bool = False
    meanwhile: Callable[[], None] = idle


class SharedPasses(Protocol):
    """Runs one pass for several targets, see backends.lanes.LanePasses; at most `max_lanes`.

    `run_drafts` runs what several drafters wait for. `is_warm` says whether the last pass took no
    longer than others like it.
    """

    max_lanes: int
    is_warm: bool
    run_drafts: Callable[[Sequence[GraphRun]], None]
    closing: threading.Event

    @property
    def most_open(self) -> int: ...

    def open(self, lane: Backend, most: int) -> None: ...

    def run(
        self,
        lanes: Sequence[Backend],
        feeds: Sequence[Mapping[str, np.ndarray]],
        outputs: Sequence[str],
        meanwhile: Callable[[], None],
    ) -> list[dict[str, Any]]: ...


def verify_together(
    passes: SharedPasses | None, targets: Sequence[Target], asked: Sequence[Asked]
) -> list[Verified]:
    """Returns what each target's `verify` would, of one pass over all of their trees.

    What is returned is valid until the next pass. A single target runs by itself.
    """
    if passes is None or len(targets) == 1:
        assert len(targets) == 1, "nothing runs their pass"
        return [targets[0].verify(*asked[0])]

    def meanwhile() -> None:
        for each in asked:
            each.meanwhile()

    begin = time.perf_counter()
    names = list(dict.fromkeys(name for each in asked for name in each.wants.features))
    feeds = [
        target._feeds(each.tree, target._rows(each.tree.num_nodes, each.last_only))
        for target, each in zip(targets, asked, strict=True)
    ]
    draws = any(each.wants.top for each in asked) and targets[0]._sampling is not None
    wanted = ["logits", *names, *targets[0]._argmax, *(TOP if draws else ())]
    outputs = passes.run([target._backend for target in targets], feeds, wanted, meanwhile)
    seconds = time.perf_counter() - begin
    verified: list[Verified] = []
    for target, each, found in zip(targets, asked, outputs, strict=True):
        target.run_seconds += seconds  # it waited for the others
        is_strict = target._is_strict(each.tree, each.last_only)
        verified.append(target._verified(each.tree, each.wants, found, is_strict))
    return verified
