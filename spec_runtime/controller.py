"""Falls back to plain decoding while drafting does not pay, and tries again now and then.

A proposer around another one. It keeps exponential averages of the tokens committed a step and of
what the step cost by the machine profile; below the speed of plain decoding it rests,

    tokens / ms  <  1 / plain ms.

All of it follows from the committed tokens and the measured costs, never from a clock, so that the
same prompt gets the same trees again. Knows no drafter and no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.tree import Budget, TokenTree

if TYPE_CHECKING:
    from spec_runtime.generate import Step
    from spec_runtime.profile import Costs
    from spec_runtime.proposers import Proposer

WEIGHT = 1 / 16  # of the newest step in the averages
PROBE_STEPS = 8  # speculative steps after a rest before they are judged
FIRST_REST, LONGEST_REST = 32, 256  # plain steps; a rest after a failed probe is twice as long


class Controller:
    """Speculates with `proposer`, or proposes roots alone.

    `accepted_length` and `speedup`: what `tune` saw, where the averages begin each generation.
    After a rest they begin at the break-even point, so that the probe alone decides.
    """

    def __init__(
        self, proposer: Proposer, costs: Costs, accepted_length: float, speedup: float
    ) -> None:
        self.wants_features = proposer.wants_features
        self._proposer = proposer
        self._costs = costs
        self._first_tokens = accepted_length
        self._first_ms = accepted_length * costs.plain / speedup
        self._rest = 0  # plain steps still to come
        self._reset()

    @property
    def run_seconds(self) -> float:
        return self._proposer.run_seconds

    @property
    def is_resting(self) -> bool:
        return self._rest > 0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._proposer.start(prompt, features_TF, reused)
        self._reset()

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self._is_judged = not (self.is_resting or budget.is_root_only)
        tree = self._proposer.propose(token, budget.within(0) if self.is_resting else budget)
        if self._is_judged:
            # where nothing was found, or nothing paid, one level has been drafted all the same
            num_levels = max(1, int(tree.depth_N.max()))
            self._step_ms = self._costs.of(tree.num_nodes, num_levels)
        return tree

    def commit(self, step: Step) -> None:
        self._proposer.commit(step)
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._probe = PROBE_STEPS
                self._tokens, self._ms = 1.0, self._costs.plain
        elif self._is_judged:
            self._tokens += WEIGHT * (len(step.tokens) - self._tokens)
            self._ms += WEIGHT * (self._step_ms - self._ms)
            self._judge()

    def truncate(self, length: int) -> None:
        self._proposer.truncate(length)

    def _judge(self) -> None:
        if self._probe:
            self._probe -= 1
            if self._probe:
                return
            if self._pays():
                self._next_rest = FIRST_REST
                return
        if not self._pays():
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)

    def _pays(self) -> bool:
        return self._tokens * self._costs.plain >= self._ms

    def _reset(self) -> None:
        self._rest = 0
        self._probe = 0  # speculative steps until the next verdict
        self._next_rest = FIRST_REST
        self._is_judged = False
        self._step_ms = 0.0  # of the tree last proposed
        self._tokens, self._ms = self._first_tokens, self._first_ms
