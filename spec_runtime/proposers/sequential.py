"""Drafts with sequential drafters that keep no cache of their guesses: one small run a level.

In Hydra, the semi-autoregressive head and ReDrafter a guess depends on one state vector per node.
The graph makes the states; this file only carries them from parent to child. A level is one batch.
"""

from __future__ import annotations

import numpy as np

from spec_runtime import backends
from spec_runtime.backends import Backend, GraphRun, Runtime
from spec_runtime.bundle.manifest import BANK_ROWS, STATE_ROWS, Bundle, DrafterInfo, require_config
from spec_runtime.loop.proposer import Drafting, grow_with
from spec_runtime.loop.target import Target
from spec_runtime.proposers.rows import DrafterRows, Expanding, LastFeature, RowsProposer
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import TreeBuilder, growing
from spec_runtime.trees.tree import TokenTree


class SequentialProposer(RowsProposer):
    """Runs a start graph and then, level by level, a step graph.

    The step graph takes a level's nodes, `input_ids` i64[N], each with its parent's `state`
    f32[N, W], at `level` i64[1] (0 for the root). It returns `guess_ids` i64[N, C],
    `guess_log_probs` f32[N, C] and the nodes' own states, `state.out` f32[N, W]. The start graph
    makes the `state` f32[1, W] of the root's parent from the last committed position's feature or
    pair.

    is_banked: the states stay in a bank that both graphs share, row 0 for the root's parent and row
    i + 1 for node i; `state_rows` i64[N] and `bank_rows` i64[N] say which rows are read and
    written.
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
        super().__init__(start)
        self._is_banked = is_banked
        self._backend = step
        self._num_guesses = num_guesses
        self._max_width = max_width
        self._step_seconds = 0.0
        # of all nodes run for this tree, the root's parent first; None: they are in the bank
        self._state_NW: np.ndarray | None = None
        self._level = 0  # the next one to run

    @classmethod
    def open(
        cls, bundle: Bundle, info: DrafterInfo | None, runtime: Runtime, target: Target
    ) -> SequentialProposer:
        """Opens a drafter of the bundle."""
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
            backends.open_graph(bundle, step, start.backend.capacity, runtime, banks=start.backend)
            if is_banked
            else backends.open_graph(bundle, step, 1, runtime),
            num_guesses=info.config["num_guesses"],
            max_width=info.config["max_width"],
            is_banked=is_banked,
        )

    @property
    def run_seconds(self) -> float:
        return super().run_seconds + self._step_seconds

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._rows.add(token)
        if budget.is_root_only:
            return TokenTree.root(token)
        start = yield from self._rows.run([] if self._is_banked else ["state"])
        self._state_NW, self._level = start.get("state"), 0
        levels = growing(token, budget, self._num_guesses, self._max_width)
        return (yield from grow_with(levels, self._expand))

    def _expand(self, nodes: TreeBuilder, first: int) -> Expanding:
        # row 0 is the root's parent, so node i's own state is row i + 1
        rows = [parent + 1 for parent in nodes.parents[first:]] if first else [0]
        feeds = {
            "input_ids": np.array(nodes.tokens[first:], np.int64),
            "level": np.array([self._level], np.int64),
        }
        outputs = ["guess_ids", "guess_log_probs"]
        if self._state_NW is None:
            feeds[STATE_ROWS] = np.array(rows, np.int64)
            feeds[BANK_ROWS] = np.arange(first, len(nodes.tokens), dtype=np.int64) + 1
        else:
            feeds["state"] = self._state_NW[rows]
            outputs.append("state.out")
        run = GraphRun(self._backend, feeds, outputs)
        yield run
        self._step_seconds += run.seconds
        result = run.results
        if self._state_NW is not None:
            self._state_NW = np.concatenate([self._state_NW, result["state.out"]])
        self._level += 1
        return result["guess_ids"], result["guess_log_probs"]
