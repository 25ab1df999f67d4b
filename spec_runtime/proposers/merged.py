"""Two drafts in one tree: a neural drafter's, and the continuation prompt lookup finds.

They fail differently: the drafter knows the language, lookup knows this very text. Knows only the
two proposers; any tree chosen deterministically keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import merge
from spec_runtime.trees.tree import TokenTree

if TYPE_CHECKING:
    from spec_runtime.proposers.base import Proposer
    from spec_runtime.step import Step


class MergedProposer:
    """At most `lookup_nodes` of a tree's nodes come from lookup, the rest from the drafter.

    A single matching token says little, so lookup speaks from two-token matches on. Nodes both
    propose are there once.
    """

    def __init__(self, drafter: Proposer, lookup_nodes: int) -> None:
        assert lookup_nodes >= 1, lookup_nodes
        self.wants_features = drafter.wants_features
        self.drafter = drafter
        self.lookup_nodes = lookup_nodes
        self._lookup = LookupProposer(max_matches=2, min_ngram=2)

    @property
    def run_seconds(self) -> float:
        return self.drafter.run_seconds

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        self.drafter.start(prompt, features_TF, reused)
        self._lookup.start(prompt, None, reused)

    def propose(self, token: int, budget: Budget) -> TokenTree:
        share = Budget(min(self.lookup_nodes + 1, budget.max_nodes), max_depth=budget.max_depth)
        found = self._lookup.propose(token, share)
        drafted = self.drafter.propose(token, budget.behind(found.num_nodes - 1))
        if found.num_nodes == 1 or drafted.draws:  # drawn trees stay as they were drawn
            return drafted
        return merge(found, drafted, budget.max_nodes)

    def commit(self, step: Step) -> None:
        self.drafter.commit(step)
        self._lookup.commit(step)

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)
        self._lookup.truncate(length)
