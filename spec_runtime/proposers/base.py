"""Declares what the loop sees of a drafter, and the proposer of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree


class Proposer(Protocol):
    """What the loop sees of a drafter.

    Between calls a proposer has seen as many tokens as the target has committed rows; the root
    of the next tree comes with `propose`.
    """

    wants_features: bool

    @property
    def run_seconds(self) -> float:
        """Spent in engine runs so far; 0.0 without an engine."""

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """After prefill. `reused` prompt tokens were there before; features are of the others."""

    def propose(self, token: int, budget: Budget) -> TokenTree:
        """A tree rooted at `token`, the last committed token."""

    def commit(self, step: Step) -> None:
        """What became of the tree last proposed."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; 0 must work from any state."""


class PlainProposer:
    """Plain decoding: every tree is its root."""

    wants_features = False
    run_seconds = 0.0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        pass

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree.root(token)

    def commit(self, step: Step) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass
