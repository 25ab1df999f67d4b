"""Sequential drafters without a cache of their guesses: one small run a level, the whole level in
one batch.

For Hydra, the semi-autoregressive head and ReDrafter: what a guess depends on is one state vector
per node, which the graph makes and this file only carries from parent to child. Knows no network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from spec_runtime.backends import Backend
from spec_runtime.bundle import require_config
from spec_runtime.kv import open_cache
from spec_runtime.proposers.rows import DrafterRows
from spec_runtime.tree import Budget, TokenTree, TreeBuilder, grow_by_levels

if TYPE_CHECKING:
    from spec_runtime.bundle import Bundle, DrafterInfo
    from spec_runtime.generate import Step
    from spec_runtime.target import Target


class _Start(Protocol):
    """Where the root's parent state comes from."""

    @property
    def run_seconds(self) -> float: ...

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None: ...

    def state(self, token: int) -> np.ndarray:
        """f32[1, W] before the root `token`, the last committed token."""

    def skip(self, token: int) -> None:
        """As `state`, when no state is needed."""

    def commit(self, step: Step) -> None: ...

    def truncate(self, length: int) -> None: ...


class LastFeature:
    """The start graph reads the last committed position's feature alone: `features` f32[1, F] ->
    `state` f32[1, W]."""

    def __init__(self, backend: Backend) -> None:
        self.run_seconds = 0.0
        self._backend = backend
        self._feature_1F: np.ndarray | None = None

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        assert features_TF is not None, "no features"
        self._feature_1F = features_TF[-1:].copy()  # not to hold the whole prompt

    def state(self, token: int) -> np.ndarray:
        assert self._feature_1F is not None, "state before start"
        begin = time.perf_counter()
        result = self._backend.run({"features": self._feature_1F}, ["state"])
        self.run_seconds += time.perf_counter() - begin
        return result["state"]

    def skip(self, token: int) -> None:
        pass

    def commit(self, step: Step) -> None:
        assert step.features is not None, "no features"
        self._feature_1F = step.features[-1:].copy()

    def truncate(self, length: int) -> None:
        self._feature_1F = None  # `start` brings the next one


class CachedPairs:
    """The start graph has a cache and takes pairs, see DrafterRows; `state` f32[M, W] of the last
    one."""

    def __init__(self, rows: DrafterRows) -> None:
        self._rows = rows

    @property
    def run_seconds(self) -> float:
        return self._rows.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._rows.start(prompt, features_TF, reused)

    def state(self, token: int) -> np.ndarray:
        self._rows.tokens.append(token)
        return self._rows.run(["state"])["state"]

    def skip(self, token: int) -> None:
        self._rows.tokens.append(token)

    def commit(self, step: Step) -> None:
        self._rows.commit(step)

    def truncate(self, length: int) -> None:
        self._rows.truncate(length)


class SequentialProposer:
    """Level by level: the step graph takes a level's nodes, `input_ids` i64[N], each with its
    parent's `state` f32[N, W], at `level` i64[1] (0 for the root), and gives `guess_ids` i64[N, C],
    `guess_log_probs` f32[N, C] and the nodes' own states, `state.out` f32[N, W]."""

    wants_features = True

    def __init__(self, start: _Start, step: Backend, *, num_guesses: int, max_width: int) -> None:
        self._start = start
        self._backend = step
        self._num_guesses = num_guesses
        self._max_width = max_width
        self._step_seconds = 0.0

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, threads: int | None, target: Target
    ) -> SequentialProposer:
        from spec_runtime.backends import open_graph  # here: it may pull in an engine

        info = require_config(info, ("num_guesses", "max_width"), ("start", "step"))
        capacity = bundle.manifest.target.max_length + bundle.manifest.target.scratch
        graph = info.graphs["start"]
        backend = open_graph(bundle, graph, capacity, threads)
        start: _Start = (
            LastFeature(backend)
            if graph.form == "stateless"
            else CachedPairs(
                DrafterRows(backend, open_cache(graph.form, capacity), wants_features=True)
            )
        )
        return cls(
            start,
            open_graph(bundle, info.graphs["step"], 1, threads),
            num_guesses=info.config["num_guesses"],
            max_width=info.config["max_width"],
        )

    @property
    def run_seconds(self) -> float:
        return self._start.run_seconds + self._step_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._start.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        if budget.is_root_only:
            self._start.skip(token)
            return TokenTree.root(token)
        state_NW = self._start.state(token)  # of all nodes run so far, the root's parent first
        level = 0

        def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
            nonlocal state_NW, level
            # row 0 is the root's parent, so node i's own state is row i + 1
            rows = [parent + 1 for parent in nodes.parents[first:]] if first else [0]
            feeds = {
                "input_ids": np.array(nodes.tokens[first:], np.int64),
                "state": state_NW[rows],
                "level": np.array([level], np.int64),
            }
            begin = time.perf_counter()
            result = self._backend.run(feeds, ["guess_ids", "guess_log_probs", "state.out"])
            self._step_seconds += time.perf_counter() - begin
            state_NW = np.concatenate([state_NW, result["state.out"]])
            level += 1
            return result["guess_ids"], result["guess_log_probs"]

        return grow_by_levels(token, expand, budget, self._num_guesses, self._max_width)

    def commit(self, step: Step) -> None:
        self._start.commit(step)

    def truncate(self, length: int) -> None:
        self._start.truncate(length)
