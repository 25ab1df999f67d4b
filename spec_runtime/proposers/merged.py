"""Merges two drafts into one tree: a drafter's, and the continuations that prompt lookup finds.

They fail differently: the drafter knows the language, lookup knows this very text. Any tree that is
chosen deterministically keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.proposers.base import Proposer
from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import merge
from spec_runtime.trees.tree import TokenTree


class MergedProposer(ProposerWrapper):
    """Adds at most `lookup_nodes` nodes from prompt lookup to the trees of a drafter's proposer.

    A single matching token says little, so lookup only counts matches of two tokens or more. A node
    that both propose is there once.
    """

    def __init__(self, drafter: Proposer, lookup_nodes: int) -> None:
        assert lookup_nodes >= 1, lookup_nodes
        super().__init__(drafter)
        self.lookup_nodes = lookup_nodes
        self._lookup = LookupProposer(max_matches=2, min_ngram=2)

    @property
    def drafter(self) -> Proposer:
        """The proposer without lookup."""
        return self._proposer

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        super().start(prompt, features_TF, reused)
        self._lookup.start(prompt, None, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        share = Budget(min(self.lookup_nodes + 1, budget.max_nodes), max_depth=budget.max_depth)
        found = self._lookup.propose(token, share)
        drafted = super().propose(token, budget.behind(found.num_nodes - 1))
        if found.num_nodes == 1 or drafted.draws:  # drawn trees stay as they were drawn
            return drafted
        return merge(found, drafted, budget.max_nodes)

    def commit(self, step: Step) -> None:
        super().commit(step)
        self._lookup.commit(step)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._lookup.truncate(length)
