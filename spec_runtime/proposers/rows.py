"""What a drafter reads of the target: the committed rows of one with a key/value cache, and the
ones still to be run; the last feature alone of one without.

A drafter that reads features takes pairs: row t holds (feature of position t, token t + 1), so the
row of the last committed position waits for the root. One that reads tokens alone, a draft model,
has row t = token t. This file knows rows, not what the network makes of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.backends import Backend, Runtime
from spec_runtime.bundle import BANK_ROWS, FEATURE_ROWS
from spec_runtime.kv import Cache, SlotCache, open_cache
from spec_runtime.trees.grow import TreeBuilder
from spec_runtime.trees.tree import chain_parents

if TYPE_CHECKING:
    from spec_runtime.bundle import Bundle, Graph
    from spec_runtime.step import Step
    from spec_runtime.target import Target

CHUNK_ROWS = 256


class LastFeature:
    """What a graph without a cache reads: the feature of the last committed position, `features`
    f32[1, F], or its row in the banks of `bank`, the target; row 0 of its own banks is written."""

    def __init__(self, backend: Backend, bank: Target | None = None) -> None:
        self.wants_features = bank is None
        self.run_seconds = 0.0
        self._backend = backend
        self._bank = bank
        self._feature_1F: np.ndarray | None = None

    @classmethod
    def open(cls, bundle: Bundle, graph: Graph, runtime: Runtime, target: Target) -> LastFeature:
        """Of one graph of the bundle."""
        return cls(*open_reader(bundle, graph, 1, runtime, target))

    @property
    def backend(self) -> Backend:
        return self._backend

    def take(self, features_PF: np.ndarray | None) -> None:
        """Features of committed positions, of which the last is kept."""
        if self.wants_features:
            assert features_PF is not None, "no features"
            self._feature_1F = features_PF[-1:].copy()  # not to hold the whole prompt

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """See Proposer.start."""
        self.take(features_TF)

    def add(self, token: int) -> None:
        """The root: nothing is read of it."""

    def commit(self, step: Step) -> None:
        self.take(step.features)

    def truncate(self, length: int) -> None:
        self._feature_1F = None  # `start` brings the next one

    def run(self, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """One run on the position last committed."""
        if self._bank is None:
            assert self._feature_1F is not None, "run before start"
            feeds = {"features": self._feature_1F}
        else:
            length = self._bank.length
            row = self._bank.feature_rows(length - 1, length)
            feeds = {FEATURE_ROWS: row, BANK_ROWS: np.zeros(1, np.int64)}
        begin = time.perf_counter()
        result = self._backend.run(feeds, outputs)
        self.run_seconds += time.perf_counter() - begin
        return result


def open_reader(
    bundle: Bundle, graph: Graph, capacity: int, runtime: Runtime, target: Target
) -> tuple[Backend, Target | None]:
    """A drafter's graph, and the target if the graph reads its banks, which fix the capacity."""
    from spec_runtime.backends import open_graph  # here: it may pull in an engine

    if not graph.has_input(FEATURE_ROWS):
        return open_graph(bundle, graph, capacity, runtime), None
    lender = target.lend()[0]
    return open_graph(bundle, graph, lender.capacity, runtime, banks=lender), target


class DrafterRows:
    """Keeps one drafter's cache in step with the target's committed tokens.

    first_token: the token that row 0 carries, 1 for pairs and 0 for a draft model. repeat_feature:
    extra rows (see `run`) have the features of the last row kept, not zeros. bank: the target,
    whose banks the graph reads features from (graphs/banks.py); `wants_features` is then of
    the host alone. In the drafter's own banks, the M rows of logits of a run that is kept are 0
    to M - 1, and node k of the forest behind them (see `run_nodes`) is 1 + k. The graph's own
    outputs are the caller's; this class only feeds it.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        *,
        wants_features: bool,
        first_token: int = 1,
        repeat_feature: bool = False,
        bank: Target | None = None,
    ) -> None:
        self.wants_features = wants_features and bank is None
        self.run_seconds = 0.0
        self.tokens: list[int] = []
        self._backend = backend
        self._cache = cache
        self._first_token = first_token
        self._repeat_feature = repeat_feature
        self._bank = bank
        # of the positions from cache.length on, whose rows are still to be run
        self._features_PF: np.ndarray | None = None

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        graph: Graph,
        runtime: Runtime,
        target: Target,
        *,
        wants_features: bool,
        first_token: int = 1,
        repeat_feature: bool = False,
    ) -> DrafterRows:
        """Of one graph of the bundle."""
        capacity = bundle.manifest.target.max_length + bundle.manifest.target.scratch
        backend, bank = open_reader(bundle, graph, capacity, runtime, target)
        return cls(
            backend,
            open_cache(graph.form, capacity),
            wants_features=wants_features,
            first_token=first_token,
            repeat_feature=repeat_feature,
            bank=bank,
        )

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """See Proposer.start; runs all rows that the prompt completes."""
        assert len(self.tokens) == reused >= self._cache.length, (len(self.tokens), reused)
        self.tokens += prompt[reused:]
        self._take(features_TF)
        self._catch_up(most_waiting=0)

    def add(self, token: int) -> None:
        """The root, whose row is waiting from now on."""
        self.tokens.append(token)

    def commit(self, step: Step) -> None:
        """The tokens of a step, but the last, which comes as the next root."""
        self.tokens += step.tokens[:-1]
        self._take(step.features)

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        del self.tokens[length:]
        if length <= self._cache.length:
            self._cache.truncate(length)
            self._features_PF = None
        elif self._features_PF is not None:
            self._features_PF = self._features_PF[: length - self._cache.length]

    @property
    def backend(self) -> Backend:
        return self._backend

    def enter(self, token: int) -> None:
        """See base.Follower."""
        self.add(token)
        self._catch_up(most_waiting=0)

    def follow(self, tokens: list[int]) -> None:
        """See base.Follower."""
        cache = self._cache
        assert isinstance(cache, SlotCache), cache
        cache.hold(cache.length + np.arange(len(tokens)))  # its rows are never out of order
        cache.commit(range(len(tokens)))
        self.tokens += tokens

    def leave(self, feature_1F: np.ndarray) -> None:
        """See base.Follower."""
        self.tokens.pop()  # the root comes with `propose`
        self._cache.truncate(len(self.tokens) - self._first_token)
        self._features_PF = feature_1F if self.wants_features else None

    def run(
        self, outputs: Sequence[str], extra_ids: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Runs the waiting rows (at least one) and keeps them; rows `extra_ids` come behind them in
        the same chain and are not kept.

        Logit rows: the last row kept and the extra ones.
        """
        self._catch_up(most_waiting=CHUNK_ROWS)
        return self._run(outputs, extra_ids)

    def run_nodes(
        self,
        outputs: Sequence[str],
        token_N: np.ndarray,
        parent_N: np.ndarray,
        first: int,
        features: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs nodes `first` … N-1 of a forest behind the committed rows; nothing is kept.

        `parent_N` i64[N] as in kv.Cache.place, over all nodes; those before `first` were run by
        the calls before. token_N i64 is of the new nodes only, and so is what `features` feeds:
        "features" f32[1, N, F], or "feature_rows" i64[N] of the banks.
        """
        feeds = self._cache.place(parent_N, first)
        feeds["input_ids"] = token_N[None]
        feeds["logit_rows"] = np.arange(len(token_N), dtype=np.int64)
        if self._bank is not None:
            feeds[BANK_ROWS] = 1 + first + feeds["logit_rows"]
        feeds.update(features or {})
        return self._timed_run(feeds, outputs)

    def run_level(
        self,
        outputs: Sequence[str],
        nodes: TreeBuilder,
        first: int,
        features: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Runs nodes `first` … of a tree grown level by level (tree.grow_by_levels).

        The root is the last of the waiting rows, which are run and kept; the nodes below it are a
        forest behind them. features: as for `run_nodes`; the root brings its own.
        """
        if first == 0:
            return self.run(outputs)
        token_N = np.array(nodes.tokens[first:], np.int64)
        # without the root: node i is the forest's i - 1, and the root's children are its roots
        parent_N = np.array(nodes.parents[1:], np.int64) - 1
        parent_N = np.where(parent_N < 0, np.arange(len(parent_N)), parent_N)
        return self.run_nodes(outputs, token_N, parent_N, first - 1, features)

    def _take(self, features_PF: np.ndarray | None) -> None:
        if self._features_PF is None:
            self._features_PF = features_PF
        elif features_PF is not None:
            self._features_PF = np.concatenate([self._features_PF, features_PF])

    def _catch_up(self, most_waiting: int) -> None:
        """Runs waiting rows in chunks until at most so many wait."""
        while len(self.tokens) - self._first_token - self._cache.length > most_waiting:
            self._run([])

    def _run(
        self, outputs: Sequence[str], extra_ids: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Up to CHUNK_ROWS waiting rows and the extra ones."""
        begin = self._cache.length + self._first_token
        token_N = np.array(self.tokens[begin : begin + CHUNK_ROWS], np.int64)
        c = len(token_N)
        assert c >= 1, "no row is waiting"
        if extra_ids is not None:
            token_N = np.concatenate([token_N, extra_ids])
        n = len(token_N)
        feeds = self._cache.place(chain_parents(n))
        feeds["input_ids"] = token_N[None]
        feeds["logit_rows"] = np.arange(c - 1, n, dtype=np.int64)
        if self._bank is not None:
            length = self._cache.length
            row_c = self._bank.feature_rows(length, length + c)
            last = row_c[-1] if self._repeat_feature else -1
            feeds[FEATURE_ROWS] = np.append(row_c, np.full(n - c, last))
            feeds[BANK_ROWS] = feeds["logit_rows"] - (c - 1)
        if self.wants_features:
            waiting_PF = self._features_PF
            assert waiting_PF is not None, "no features"
            assert len(waiting_PF) >= c, (len(waiting_PF), c)
            features_1NF = np.zeros((1, n, waiting_PF.shape[1]), np.float32)
            features_1NF[0, :c] = waiting_PF[:c]
            if self._repeat_feature:
                features_1NF[0, c:] = waiting_PF[c - 1]
            feeds["features"] = features_1NF
            self._features_PF = waiting_PF[c:].copy() if len(waiting_PF) > c else None
        result = self._timed_run(feeds, outputs)
        self._cache.commit(range(c))
        return result

    def _timed_run(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str]
    ) -> dict[str, np.ndarray]:
        begin = time.perf_counter()
        result = self._backend.run(feeds, list(outputs))
        self.run_seconds += time.perf_counter() - begin
        return result
