"""Prompt lookup: what it drafts, within its budget, and that its index follows the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.step import Step
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import Terms


def lookup() -> MergedProposer:
    return MergedProposer(PlainProposer())


def drafted(tree: TokenTree) -> list[str]:
    """The leaves, as text from below the root."""
    leaves = [i for i in range(tree.num_nodes) if not tree.children(i) and i]
    return ["".join(map(chr, tree.token_N[tree.path(i)[1:]])) for i in leaves]


def propose(text: str, budget: Budget) -> TokenTree:
    """The tree after this text, whose last character is the root."""
    proposer = lookup()
    proposer.start([ord(c) for c in text[:-1]], None, 0)
    return proposer.propose(ord(text[-1]), budget)


@pytest.mark.parametrize(
    ("text", "budget", "expected"),
    [
        ("abcx.cy.abc", Budget(3), ["x."]),  # the longest n-gram wins over the newer "cy"
        ("bcx.abc", Budget(4), ["x.a"]),  # a shorter one, where longer ones are new
        ("cx.abc", Budget(4), ["x.a"]),
        ("abcdefg", Budget(12), []),
        ("a", Budget(12), []),
        ("abababab", Budget(12), ["ab" * 5 + "a"]),  # a running repetition
        ("abcdefgh.abc", Budget(12, max_depth=2), ["de"]),
        ("abcdefgh.abc", Budget(12, max_depth=0), []),
    ],
)
def test_what_followed_the_end_of_the_text(text: str, budget: Budget, expected: list[str]) -> None:
    assert drafted(propose(text, budget)) == expected


def test_several_matches_share_the_tree_and_their_beginnings() -> None:
    # the most frequent first: "12", then "9"; behind "12" the newest first
    tree = propose(".ab9,;ab12x:!ab12y?-ab", Budget(20, max_depth=3))
    assert {"12x", "12y", "9,;"} <= set(drafted(tree))
    first, second = tree.children(0)[:2]
    assert [chr(tree.token_N[node]) for node in (first, second)] == ["1", "9"]
    behind = tree.children(tree.children(first)[0])
    assert [chr(tree.token_N[node]) for node in behind] == ["y", "x"]


def test_nodes_come_by_falling_probability_and_end_where_the_budget_says() -> None:
    text = ".ab9..ab12x..ab12y..ab"
    tree = propose(text, Budget(20))
    assert tree.log_prob_N is not None
    assert (np.diff(tree.log_prob_N) <= 0).all()
    likely = propose(text, Budget(20, growth=Grown(0.1)))
    assert likely.num_nodes == (tree.log_prob_N >= np.log(0.1)).sum() < tree.num_nodes
    assert (likely.token_N == tree.token_N[: likely.num_nodes]).all()
    dear = Grown(terms=Terms([10.0 * n for n in range(1, 21)]))
    assert propose(text, Budget(20, growth=dear)).num_nodes == 1


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_budget_counts_the_root(max_nodes: int) -> None:
    tree = propose(".ab9..ab12x..ab12y..ab", Budget(max_nodes))
    assert tree.num_nodes <= max_nodes
    if max_nodes >= 2:
        assert tree.num_nodes > 1


@pytest.mark.parametrize("seed", range(10))
def test_index_after_commits_and_truncation_is_that_of_the_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposer, text = lookup(), rng.integers(0, 3, 10).tolist()
    proposer.start(text, None, 0)
    for _ in range(60):
        root = int(rng.integers(0, 3))
        tree = proposer.propose(root, Budget(12))
        fresh = lookup()
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
    proposer = lookup()
    proposer.start([1, 2, 3], None, 0)
    proposer.propose(4, Budget(5))  # never committed
    proposer.truncate(0)
    proposer.start([7, 8, 7], None, 0)
    assert proposer.propose(8, Budget(5)).token_N.tolist() == [8, 7, 8, 7, 8]
