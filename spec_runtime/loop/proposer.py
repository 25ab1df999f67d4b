"""Declares what the loop sees of a drafter; plain decoding has a proposer too."""

from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from spec_runtime.backends import GraphRun, run_at_once
from spec_runtime.bundle.manifest import FEATURES
from spec_runtime.loop.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import Candidates, Growing, TreeBuilder
from spec_runtime.trees.tree import TokenTree

Drafting = Generator[GraphRun, None, TokenTree]  # see Proposer.drafting


class Proposer(Protocol):
    """Drafts a tree a step, and keeps its own state in step with the target's committed rows.

    Between calls a proposer has seen as many tokens as the target has committed rows; the root
    of the next tree comes with `propose`. `wants_features` asks the target for features. What
    `reads_answers` reads those after all nodes of its trees, whatever is accepted of them.
    """

    wants_features: bool
    reads_answers: bool

    @property
    def run_seconds(self) -> float:
        """Seconds spent in graph runs so far; 0.0 without a graph."""

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        """Begins a generation, after the prompt's pass.

        The first `reused` tokens of the prompt were there before; `features_TF` f32[T, F] are those
        of the other tokens, None if the proposer wants none.
        """

    def drafting(self, token: int, budget: Budget) -> Drafting:
        """Yields the runs of graphs that it needs, one after the other, and returns a tree rooted
        at `token`, the last committed token."""

    def propose(self, token: int, budget: Budget) -> TokenTree:
        """Returns the tree that `drafting` does, running each graph at once."""

    def commit(self, step: Step) -> None:
        """Takes in what became of the tree last proposed."""

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens; 0 must work from any state."""


class OpenedDrafter(NamedTuple):
    """A drafter ready to draft: its proposer and the trees that it may spend.

    `features` names the target's outputs that it reads. `expected_accepted_length` was measured
    when the bundle was built or checked, if it was. `is_tuned` says that a profile of
    `spec-runtime tune` chose the budget.
    """

    name: str
    proposer: Proposer
    budget: Budget
    features: tuple[str, ...] = (FEATURES,)
    expected_accepted_length: float | None = None
    is_tuned: bool = False


class WithRuns:
    """Drafts with graphs; a subclass has `drafting`."""

    reads_answers = False

    @abstractmethod
    def drafting(self, token: int, budget: Budget) -> Drafting:
        """See Proposer.drafting."""

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return run_at_once(self.drafting(token, budget))


class WithoutRuns:
    """Drafts without a graph; a subclass has `propose`."""

    reads_answers = False

    @abstractmethod
    def propose(self, token: int, budget: Budget) -> TokenTree:
        """See Proposer.propose."""

    def drafting(self, token: int, budget: Budget) -> Drafting:
        yield from ()
        return self.propose(token, budget)


def grow_with(
    levels: Growing, expand: Callable[[TreeBuilder, int], Generator[GraphRun, None, Candidates]]
) -> Drafting:
    """Returns the tree that `levels` grows (trees.grow.growing), of the candidates that the runs of
    `expand(nodes, first)` find for the nodes of each level."""
    try:
        level = next(levels)
        while True:
            level = levels.send((yield from expand(*level)))
    except StopIteration as end:
        tree: TokenTree = end.value
        return tree


class StatelessProposer(WithoutRuns):
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
