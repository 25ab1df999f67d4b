"""Feeds a drafter's graph with what it reads of the target: committed rows, or the last feature.

A drafter with a key/value cache has a row a committed token, and some rows that are still to be
run. If it reads features, its rows are pairs: row t holds (feature of position t, token t + 1), so
the row of the last committed position waits for the root. If it reads only tokens, as a draft
model does, row t is token t. A drafter without a cache reads the last feature only.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from spec_runtime import backends
from spec_runtime.backends import Backend, GraphRun, Runtime, run_at_once
from spec_runtime.bundle.manifest import (
    BANK_ROWS,
    FEATURE_ROWS,
    Bundle,
    BundleError,
    DrafterInfo,
    Graph,
)
from spec_runtime.loop.kv import Cache, open_cache
from spec_runtime.loop.proposer import WithRuns
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import Target
from spec_runtime.trees.grow import Candidates, TreeBuilder
from spec_runtime.trees.tree import chain_parents

CHUNK_ROWS = 256

# What waits for runs of a graph and returns outputs, or a level's candidates.
Running = Generator[GraphRun, None, dict[str, np.ndarray]]
Expanding = Generator[GraphRun, None, Candidates]


class LastFeature:
    """Runs a graph without a cache on the feature of the last committed position, `features`
    f32[1, F].

    A graph with banks reads the feature's row in the banks of `bank`, the target, instead, and
    writes row 0 of its own.
    """

    def __init__(self, backend: Backend, bank: Target | None = None) -> None:
        self.wants_features = bank is None
        self.run_seconds = 0.0
        self._backend = backend
        self._bank = bank
        self._feature_1F: np.ndarray | None = None

    @classmethod
    def open(cls, bundle: Bundle, graph: Graph, runtime: Runtime, target: Target) -> LastFeature:
        """Opens a graph of the bundle."""
        return cls(*open_reader(bundle, graph, 1, runtime, target))

    @property
    def backend(self) -> Backend:
        return self._backend

    def take(self, features_PF: np.ndarray | None) -> None:
        """Keeps the last of these features of committed positions."""
        if self.wants_features:
            assert features_PF is not None, "no features"
            self._feature_1F = features_PF[-1:].copy()  # a view would hold the whole prompt

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self.take(features_TF)

    def add(self, token: int) -> None:
        """Takes the root, and reads nothing of it."""

    def commit(self, step: Step) -> None:
        self.take(step.features)

    def truncate(self, length: int) -> None:
        self._feature_1F = None  # `start` brings the next one

    def run(self, outputs: Sequence[str]) -> Running:
        """Runs the graph on the position last committed."""
        if self._bank is None:
            assert self._feature_1F is not None, "run before start"
            feeds = {"features": self._feature_1F}
        else:
            length = self._bank.length
            row = self._bank.feature_rows(length - 1, length)
            feeds = {FEATURE_ROWS: row, BANK_ROWS: np.zeros(1, np.int64)}
        run = GraphRun(self._backend, feeds, outputs)
        yield run
        self.run_seconds += run.seconds
        return run.results


class RowsProposer(WithRuns):
    """Keeps its state in the rows that it feeds a graph; a subclass proposes."""

    def __init__(self, rows: DrafterRows | LastFeature) -> None:
        self.wants_features = rows.wants_features
        self._rows = rows

    @property
    def run_seconds(self) -> float:
        return self._rows.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._rows.start(prompt, features_TF, reused)

    def commit(self, step: Step) -> None:
        self._rows.commit(step)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)


def open_reader(
    bundle: Bundle, graph: Graph, capacity: int, runtime: Runtime, target: Target
) -> tuple[Backend, Target | None]:
    """Opens a drafter's graph; returns it, and the target if the graph reads the target's banks.

    The banks then fix the capacity.
    """
    if not graph.has_input(FEATURE_ROWS):
        return backends.open_graph(bundle, graph, capacity, runtime), None
    lender = target.lend()[0]
    return backends.open_graph(bundle, graph, lender.capacity, runtime, banks=lender), target


def require_levels_fit(info: DrafterInfo, scratch: int) -> None:
    """Raises BundleError if a drafter's levels have more nodes than a cache has rows after the
    context; the contiguous form writes one row more."""
    num_guesses, max_width = info.config["num_guesses"], info.config["max_width"]
    if (num_guesses - 1) * max_width >= scratch:
        raise BundleError(
            f"drafter {info.name!r}: got {num_guesses} levels of {max_width} nodes, expected "
            f"fewer than the bundle's scratch of {scratch} behind the first"
        )


class DrafterRows:
    """Keeps one drafter's cache in step with the target's committed tokens, and runs its graph.

    first_token: the token that row 0 carries, 1 for pairs and 0 for a draft model. repeat_feature:
    extra rows (see `run`) have the features of the last row kept, not zeros. block_row: the extra
    rows are a block, whose rows see each other both ways, and the first whose outputs are asked for
    is this one of them, in place of the last row kept. bank: the target, if
    the graph reads features from its banks (graphs/banks.py); none then come by way of the host,
    and `wants_features` is False. In the drafter's own banks, the M rows of logits of a run that is
    kept are rows 0 to M - 1, and node k of the forest after them (see `run_nodes`) is row 1 + k.
    """

    def __init__(
        self,
        backend: Backend,
        cache: Cache,
        *,
        wants_features: bool,
        first_token: int = 1,
        repeat_feature: bool = False,
        block_row: int | None = None,
        bank: Target | None = None,
    ) -> None:
        self.wants_features = wants_features and bank is None
        self.run_seconds = 0.0
        self.tokens: list[int] = []
        self._backend = backend
        self._cache = cache
        self._first_token = first_token
        self._repeat_feature = repeat_feature
        self._block_row = block_row
        self._bank = bank
        # features of the positions from cache.length on, whose rows are still to be run
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
        block_row: int | None = None,
    ) -> DrafterRows:
        """Opens a graph of the bundle; raises BundleError for one without a cache."""
        if graph.form == "stateless":
            raise BundleError(
                f"{graph.file}: got a graph of the stateless form, expected one with a cache; "
                "build the bundle again"
            )
        capacity = bundle.manifest.target.max_length + bundle.manifest.target.scratch
        backend, bank = open_reader(bundle, graph, capacity, runtime, target)
        return cls(
            backend,
            open_cache(graph.form, capacity, backend),
            wants_features=wants_features,
            first_token=first_token,
            repeat_feature=repeat_feature,
            block_row=block_row,
            bank=bank,
        )

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """See Proposer.start; runs all rows that the prompt completes."""
        assert len(self.tokens) == reused >= self._cache.length, (len(self.tokens), reused)
        self.tokens += prompt[reused:]
        self._take(features_TF)
        run_at_once(self._catch_up(most_waiting=0))

    def add(self, token: int) -> None:
        """Takes the root, whose row waits from now on."""
        self.tokens.append(token)

    def commit(self, step: Step) -> None:
        """Takes the tokens of a step but the last one, which comes as the next root."""
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

    def run(self, outputs: Sequence[str], extra_ids: np.ndarray | None = None) -> Running:
        """Runs the waiting rows (at least one) and keeps them; returns the outputs for the last row
        kept and for the extra rows, or for rows of a block.

        The rows `extra_ids` i64[E] come after the waiting ones in the same chain and are not kept.
        """
        yield from self._catch_up(most_waiting=CHUNK_ROWS)
        return (yield from self._run(outputs, extra_ids))

    def run_nodes(
        self,
        outputs: Sequence[str],
        token_N: np.ndarray,
        parent_N: np.ndarray,
        first: int,
        features: Mapping[str, np.ndarray] | None = None,
    ) -> Running:
        """Runs nodes `first` … N - 1 of a forest after the committed rows; keeps nothing.

        `parent_N` i64[N] is as in kv.Cache.place, over all nodes; those before `first` were run by
        earlier calls. `token_N` i64 holds the new nodes only, and so does what `features` feeds:
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
    ) -> Running:
        """Runs nodes `first` … of a tree that is grown level by level (grow.growing).

        The root is the last of the waiting rows, which are run and kept; the nodes below it are a
        forest after them. `features` is as in `run_nodes`; the root brings its own.
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

    def _catch_up(self, most_waiting: int) -> Generator[GraphRun, None, None]:
        """Runs waiting rows in chunks until at most `most_waiting` wait."""
        while len(self.tokens) - self._first_token - self._cache.length > most_waiting:
            yield from self._run([])

    def _run(self, outputs: Sequence[str], extra_ids: np.ndarray | None = None) -> Running:
        """Runs up to CHUNK_ROWS waiting rows and the extra ones; keeps the former."""
        begin = self._cache.length + self._first_token
        token_N = np.array(self.tokens[begin : begin + CHUNK_ROWS], np.int64)
        c = len(token_N)
        assert c >= 1, "no row is waiting"
        block, asked = None, c - 1
        if extra_ids is not None:
            token_N = np.concatenate([token_N, extra_ids])
            if self._block_row is not None:
                block, asked = c, c + self._block_row
        n = len(token_N)
        feeds = self._cache.place(chain_parents(n), block=block)
        feeds["input_ids"] = token_N[None]
        feeds["logit_rows"] = np.arange(asked, n, dtype=np.int64)
        if self._bank is not None:
            length = self._cache.length
            row_c = self._bank.feature_rows(length, length + c)
            last = row_c[-1] if self._repeat_feature else -1
            feeds[FEATURE_ROWS] = np.append(row_c, np.full(n - c, last))
            feeds[BANK_ROWS] = feeds["logit_rows"] - asked
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
        result = yield from self._timed_run(feeds, outputs)
        self._cache.commit(range(c))
        return result

    def _timed_run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> Running:
        run = GraphRun(self._backend, feeds, list(outputs))
        yield run
        self.run_seconds += run.seconds
        return run.results
