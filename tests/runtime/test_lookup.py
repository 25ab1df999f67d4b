"""Prompt lookup: what it drafts, within its budget, and that its index follows the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from spec_runtime.proposers.lookup import LookupProposer
from spec_runtime.step import Step
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree


def drafted(tree: TokenTree) -> list[str]:
    """The leaves, as text from below the root."""
    leaves = [i for i in range(tree.num_nodes) if not tree.children(i) and i]
    return ["".join(map(chr, tree.token_N[tree.path(i)[1:]])) for i in leaves]


def propose(text: str, budget: Budget, **options: int) -> TokenTree:
    """The tree after this text, whose last character is the root."""
    proposer = LookupProposer(**options)
    proposer.start([ord(c) for c in text[:-1]], None, 0)
    return proposer.propose(ord(text[-1]), budget)


def test_the_longest_ngram_wins_over_a_newer_one() -> None:
    # "abc" was followed by x; the newer "c" by y
    assert drafted(propose("abcx.cy.abc", Budget(3), num_tokens=2)) == ["x."]


def test_shorter_ngrams_when_longer_are_new() -> None:
    assert drafted(propose("bcx.abc", Budget(4), num_tokens=3)) == ["x.a"]
    assert drafted(propose("cx.abc", Budget(4), num_tokens=3)) == ["x.a"]


def test_nothing_to_find_is_the_root() -> None:
    assert propose("abcdefg", Budget(12)).num_nodes == 1
    assert propose("a", Budget(12)).num_nodes == 1


def test_several_matches_share_the_tree_and_their_beginnings() -> None:
    # newest first: "12y", then "12x", then "9"
    tree = propose(".ab9..ab12x..ab12y..ab", Budget(20), num_tokens=3)
    assert sorted(drafted(tree)) == ["12x", "12y", "9.."]
    assert len(tree.children(0)) == 2
    assert tree.num_nodes == 1 + 4 + 3


def test_a_running_repetition_drafts_itself() -> None:
    assert drafted(propose("abababab", Budget(12), max_matches=1)) == ["ab"]


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_budget_counts_the_root(max_nodes: int) -> None:
    tree = propose(".ab9..ab12x..ab12y..ab", Budget(max_nodes))
    assert tree.num_nodes <= max_nodes
    if max_nodes >= 2:
        assert tree.num_nodes > 1


def test_depth_is_limited() -> None:
    text = "abcdefgh.abc"
    assert drafted(propose(text, Budget(12, max_depth=2))) == ["de"]
    assert propose(text, Budget(12, max_depth=0)).num_nodes == 1


@pytest.mark.parametrize("seed", range(10))
def test_index_after_commits_and_truncation_is_that_of_the_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposer, text = LookupProposer(), rng.integers(0, 3, 10).tolist()
    proposer.start(text, None, 0)
    for _ in range(60):
        root = int(rng.integers(0, 3))
        tree = proposer.propose(root, Budget(12))
        fresh = LookupProposer()
        fresh.start(text, None, 0)
        again = fresh.propose(root, Budget(12))
        assert (tree.token_N == again.token_N).all()
        assert (tree.parent_N == again.parent_N).all()
        tokens = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
        proposer.commit(Step(tokens, num_accepted=len(tokens) - 1))
        text = [*text, root, *tokens[:-1]]
        if rng.random() < 0.2:
            length = int(rng.integers(0, len(text) + 1))
            proposer.truncate(length)
            text = text[:length] + rng.integers(0, 3, 4).tolist()
            proposer.start(text, None, length)


def test_two_tokens_left_over_from_an_interrupted_step_go_with_truncate_zero() -> None:
    proposer = LookupProposer()
    proposer.start([1, 2, 3], None, 0)
    proposer.propose(4, Budget(5))  # never committed
    proposer.truncate(0)
    proposer.start([7, 8, 7], None, 0)
    assert proposer.propose(8, Budget(5)).token_N.tolist() == [8, 7, 8]
