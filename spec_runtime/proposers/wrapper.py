"""Wraps a proposer, so that a subclass changes some of its calls and passes on the rest."""

from collections.abc import Sequence

import numpy as np

from spec_runtime.loop.proposer import Drafting, Proposer, WithRuns
from spec_runtime.loop.step import Step
from spec_runtime.trees.budget import Budget


class ProposerWrapper(WithRuns):
    """Passes every call on to the proposer inside; a subclass extends some by way of `super()`."""

    def __init__(self, proposer: Proposer) -> None:
        self.wants_features, self.reads_answers = proposer.wants_features, proposer.reads_answers
        self._proposer = proposer

    @property
    def run_seconds(self) -> float:
        return self._proposer.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self._proposer.start(prompt, features_TF, reused)

    def drafting(self, token: int, budget: Budget) -> Drafting:
        return self._proposer.drafting(token, budget)

    def commit(self, step: Step) -> None:
        self._proposer.commit(step)

    def truncate(self, length: int) -> None:
        self._proposer.truncate(length)
