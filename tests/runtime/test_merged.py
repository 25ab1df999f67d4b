"""A drafter's tree with lookup's candidates in it: shape, budget, and an unchanged output."""

from __future__ import annotations

import numpy as np
import pytest

from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree


class Fixed:
    """A drafter that always guesses the same chain, and notes what it is told."""

    wants_features = True
    run_seconds = 2.5

    def __init__(self, *guesses: int) -> None:
        self.guesses, self.calls = guesses, list[str]()

    def start(self, prompt: object, features_TF: object, reused: int) -> None:
        self.calls.append("start")

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree.chain([token, *self.guesses][: budget.max_nodes])

    def commit(self, step: Step) -> None:
        self.calls.append("commit")

    def truncate(self, length: int) -> None:
        self.calls.append("truncate")


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_N[tree.path(node)].tolist()) for node in range(tree.num_nodes)}


@pytest.mark.parametrize(
    ("max_nodes", "expected"),
    [
        # "1 2" was followed by 3 4 1; the drafter says 3 9
        (8, {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 1), (2, 3, 9)}),
        (4, {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 1)}),
        (2, {(2,), (2, 3)}),
        (1, {(2,)}),
    ],
)
def test_both_drafts_are_in_the_tree_once(max_nodes: int, expected: set[tuple[int, ...]]) -> None:
    proposer = MergedProposer(Fixed(3, 9), lookup_nodes=3)
    proposer.start([1, 2, 3, 4, 1], None, 0)
    assert paths(proposer.propose(2, Budget(max_nodes))) == expected
    assert proposer.run_seconds == 2.5
    assert proposer.wants_features


def test_one_matching_token_is_no_match() -> None:
    tokens = [7, 2, 3, 4, 1]  # 2 was there, but not behind a 1
    alone = LookupProposer()
    alone.start(tokens, None, 0)
    assert alone.propose(2, Budget(8)).num_nodes > 1
    proposer = MergedProposer(Fixed(9), lookup_nodes=3)
    proposer.start(tokens, None, 0)
    assert paths(proposer.propose(2, Budget(8))) == {(2,), (2, 9)}


def test_both_are_told_of_every_step() -> None:
    drafter = Fixed(9)
    proposer = MergedProposer(drafter, lookup_nodes=4)
    proposer.start([1, 2, 3], None, 0)
    proposer.propose(1, Budget(8))
    proposer.commit(Step([2, 5], 1, [0, 1], np.zeros((2, 1), np.float32)))
    # the text is now 1 2 3 1 2, and 5 is the root
    assert drafter.calls == ["start", "commit"]
    proposer.truncate(4)
    assert paths(proposer.propose(2, Budget(8))) == {(2,), (2, 3), (2, 3, 1), (2, 3, 1, 2), (2, 9)}
    proposer.truncate(0)
    assert drafter.calls == ["start", "commit", "truncate", "truncate"]
