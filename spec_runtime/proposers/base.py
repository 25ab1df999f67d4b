"""Declares what the loop and the fused step see of a drafter; plain decoding has a proposer too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from spec_runtime.backends import Backend
from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree


class Proposer(Protocol):
    """Drafts a tree a step, and keeps its own state in step with the target's committed rows.

    Between calls a proposer has seen as many tokens as the target has committed rows; the root
    of the next tree comes with `propose`. `wants_features` asks the target for features.
    """

    wants_features: bool

    @property
    def run_seconds(self) -> float:
        """Seconds spent in graph runs so far; 0.0 without a graph."""

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """Begins a generation, after the prompt's pass.

        The first `reused` tokens of the prompt were there before; `features_TF` f32[T, F] are those
        of the other tokens, None if the proposer wants none.
        """

    def propose(self, token: int, budget: Budget) -> TokenTree:
        """Returns a tree rooted at `token`, the last committed token."""

    def commit(self, step: Step) -> None:
        """Takes in what became of the tree last proposed."""

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens; 0 must work from any state."""


class StatelessProposer:
    """Keeps nothing of what it is told; a subclass proposes."""

    wants_features = False
    run_seconds = 0.0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        pass

    def commit(self, step: Step) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass


class PlainProposer(StatelessProposer):
    """Decodes plainly: every tree is its root."""

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree.root(token)


class Follower(Protocol):
    """Keeps a one-pass drafter's state in step with fused steps, which it does not see run."""

    def enter(self, token: int) -> None:
        """Completes all rows before the first step, whose root is `token`."""

    def follow(self, tokens: list[int]) -> None:
        """Takes over the drafter's rows of one step, which the graph wrote; `tokens` as in Step."""

    def leave(self, feature_1F: np.ndarray) -> None:
        """Takes the feature of the last committed position, after the last fused step."""


@runtime_checkable
class Fusable(Protocol):
    """A one-pass proposer whose drafting a fused step can take over."""

    def fusable(self) -> tuple[Follower, Backend | None]:
        """Returns who follows the fused steps, and the backend whose cache they write, if any."""
