"""Sequential drafters without a cache of their guesses: one small run a level, the whole level in
one batch.

For Hydra, the semi-autoregressive head and ReDrafter: what a guess depends on is one state vector
per node, which the graph makes and this file only carries from parent to child. Knows no network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.backends import Backend, Runtime
from spec_runtime.bundle import BANK_ROWS, STATE_ROWS, require_config
from spec_runtime.proposers.rows import DrafterRows, LastFeature
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder, grow_by_levels
from spec_runtime.trees.tree import TokenTree

if TYPE_CHECKING:
    from spec_runtime.bundle import Bundle, DrafterInfo
    from spec_runtime.step import Step
    from spec_runtime.target import Target


class SequentialProposer:
    """Level by level: the step graph takes a level's nodes, `input_ids` i64[N], each with its
    parent's `state` f32[N, W], at `level` i64[1] (0 for the root), and gives `guess_ids` i64[N, C],
    `guess_log_probs` f32[N, C] and the nodes' own states, `state.out` f32[N, W]. The start graph
    gives the root's parent's `state` f32[1, W], of the last committed position's feature or pair.

    is_banked: the states stay in a bank that both graphs share, row 0 for the root's parent and
    row i + 1 for node i; `state_rows` i64[N] and `bank_rows` i64[N] say which are read and written.
    """

    def __init__(
        self,
        start: LastFeature | DrafterRows,
        step: Backend,
        *,
        num_guesses: int,
        max_width: int,
        is_banked: bool = False,
    ) -> None:
        self.wants_features = start.wants_features
        self._start = start
        self._is_banked = is_banked
        self._backend = step
        self._num_guesses = num_guesses
        self._max_width = max_width
        self._step_seconds = 0.0

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> SequentialProposer:
        from spec_runtime.backends import open_graph  # here: it may pull in an engine

        info = require_config(info, ("num_guesses", "max_width"), ("start", "step"))
        first, step = info.graphs["start"], info.graphs["step"]
        start: LastFeature | DrafterRows = (
            LastFeature.open(bundle, first, runtime, target)
            if first.form == "stateless"
            else DrafterRows.open(bundle, first, runtime, target, wants_features=True)
        )
        is_banked = step.has_input(STATE_ROWS)
        return cls(
            start,
            open_graph(bundle, step, start.backend.capacity, runtime, banks=start.backend)
            if is_banked
            else open_graph(bundle, step, 1, runtime),
            num_guesses=info.config["num_guesses"],
            max_width=info.config["max_width"],
            is_banked=is_banked,
        )

    @property
    def run_seconds(self) -> float:
        return self._start.run_seconds + self._step_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._start.start(prompt, features_TF, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._start.add(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        # of all nodes run so far, the root's parent first; None: they are in the bank
        state_NW = self._start.run([] if self._is_banked else ["state"]).get("state")
        outputs = ["guess_ids", "guess_log_probs"]
        if not self._is_banked:
            outputs.append("state.out")
        level = 0

        def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
            nonlocal state_NW, level
            # row 0 is the root's parent, so node i's own state is row i + 1
            rows = [parent + 1 for parent in nodes.parents[first:]] if first else [0]
            feeds = {
                "input_ids": np.array(nodes.tokens[first:], np.int64),
                "level": np.array([level], np.int64),
            }
            if state_NW is None:
                feeds[STATE_ROWS] = np.array(rows, np.int64)
                feeds[BANK_ROWS] = np.arange(first, len(nodes.tokens), dtype=np.int64) + 1
            else:
                feeds["state"] = state_NW[rows]
            begin = time.perf_counter()
            result = self._backend.run(feeds, outputs)
            self._step_seconds += time.perf_counter() - begin
            if state_NW is not None:
                state_NW = np.concatenate([state_NW, result["state.out"]])
            level += 1
            return result["guess_ids"], result["guess_log_probs"]

        return grow_by_levels(token, expand, budget, self._num_guesses, self._max_width)

    def commit(self, step: Step) -> None:
        self._start.commit(step)

    def truncate(self, length: int) -> None:
        self._start.truncate(length)
