"""Trees whose children are drawn: what q is, in which order, how many, and what is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from spec_runtime.trees.budget import Budget, Drawn, Grown, Static
from spec_runtime.trees.grow import TreeBuilder, grow, grow_by_levels, merge
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

IDS, PROBABILITIES = np.array([7, 8, 9]), np.array([0.4, 0.2, 0.1])  # the best of more


def rule(*widths: int, temperature: float = 1.0, with_replacement: bool = False) -> Drawn:
    return Drawn(widths, temperature, with_replacement, np.random.default_rng(1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_q_is_the_candidates_tempered_and_renormalised(temperature: float) -> None:
    drawn = rule(1, temperature=temperature).draw(IDS, np.log(PROBABILITIES), 2)
    assert drawn is not None
    q = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(drawn.q_C, q / q.sum(), rtol=1e-12)
    assert drawn.id_C.tolist() == [7, 8, 9]


@pytest.mark.parametrize("with_replacement", [False, True])
def test_order_of_draws_follows_q(with_replacement: bool) -> None:
    """The law of the first two draws, against the product of q and what is left of q."""
    draws = rule(2, with_replacement=with_replacement)
    q = PROBABILITIES / PROBABILITIES.sum()
    p = np.outer(q, q)
    if not with_replacement:
        p = p * (1 - np.eye(3)) / (1 - q)[:, None]
    count, num = np.zeros((3, 3)), 4000
    for _ in range(num):
        drawn = draws.draw(IDS, np.log(PROBABILITIES), 2)
        assert drawn is not None
        count[drawn.order] += 1
    assert count[p == 0].sum() == 0
    spread = np.sqrt(num * p * (1 - p))
    assert (abs(count - num * p) <= 5 * spread).all()


def test_impossible_candidates_are_not_drawn() -> None:
    log_prob_C = np.array([-0.1, -math.inf, -2.0])
    drawn = rule(1).draw(IDS, log_prob_C, 3)
    assert drawn is not None
    assert sorted(drawn.order) == [0, 2]  # so few are left
    assert rule(1).draw(IDS, np.full(3, -math.inf), 2) is None


class Spy:
    """Three equally likely candidates behind any node; notes which nodes are expanded."""

    def __init__(self) -> None:
        self.levels: list[list[int]] = []

    def __call__(self, nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
        self.levels.append(nodes.tokens[first:])
        n = len(nodes) - first
        return np.tile(IDS + 10 * len(self.levels), (n, 1)), np.full((n, 3), -1.5)


def drawn_tree(budget: Budget, num_levels: int = 5, max_width: int = 9) -> tuple[TokenTree, Spy]:
    spy = Spy()
    return grow_by_levels(1, spy, budget, num_levels, max_width), spy


def sizes(tree: TokenTree) -> list[int]:
    """Nodes by depth."""
    return np.bincount(tree.depth_N).tolist()


@pytest.mark.parametrize(
    ("widths", "budget", "expected"),
    [
        ((1, 1, 1), Budget(9), [1, 1, 1, 1]),
        ((3,), Budget(9), [1, 3]),
        ((3, 2, 1), Budget(30), [1, 3, 6, 6]),
        ((3, 2, 1), Budget(30, max_depth=2), [1, 3, 6]),
        ((3, 2, 1), Budget(9), [1, 3, 5]),  # as many as there is room for
        ((3, 2, 1), Budget(30, growth=Grown(0.9)), [1, 3, 6, 6]),  # not asked
        ((3, 2, 1), Budget(30, growth=Static(((0,),))), [1, 3, 6, 6]),
        ((3,), Budget(1), [1]),
        ((3,), Budget(9, max_depth=0), [1]),
    ],
)
def test_shape(widths: tuple[int, ...], budget: Budget, expected: list[int]) -> None:
    budget = replace(budget, growth=rule(*widths))
    tree, spy = drawn_tree(budget)
    assert sizes(tree) == expected
    assert len(spy.levels) == len(expected) - 1
    # the same from one pass
    token_KC = np.array([IDS + 10 * k for k in (1, 2, 3)])
    assert sizes(grow(1, Guesses(token_KC, np.full((3, 3), -1.5)), budget)) == expected
    for node in range(tree.num_nodes):
        drawn = tree.draws.get(node)
        order = () if drawn is None else drawn.order
        tokens = [] if drawn is None else drawn.id_C[list(order)].tolist()
        assert [tree.token_N[child] for child in tree.children(node)] == tokens


def test_equal_draws_share_a_node_and_stay_in_the_order() -> None:
    tree, _ = drawn_tree(Budget(99, growth=rule(20, with_replacement=True)))
    assert sizes(tree) == [1, 3]
    assert len(tree.draws[0].order) == 20


def test_no_more_nodes_are_run_than_the_drafter_has_room_for() -> None:
    tree, spy = drawn_tree(Budget(99, growth=rule(3, 3, 3)), max_width=4)
    assert sizes(tree) == [1, 3, 9, 12]
    assert [len(level) for level in spy.levels] == [1, 3, 4]
    # those run are the first of their level, and get the children
    assert [node for node in tree.draws if tree.depth_N[node] == 2] == [4, 5, 6, 7]


def test_same_stream_same_tree() -> None:
    trees = [drawn_tree(Budget(20, growth=rule(2, 2)))[0].token_N.tolist() for _ in range(2)]
    assert trees[0] == trees[1]


def test_drawn_trees_are_not_merged() -> None:
    tree, _ = drawn_tree(Budget(9, growth=rule(2)))
    with pytest.raises(AssertionError):
        merge(TokenTree.root(1), tree, 9)


@pytest.mark.parametrize(("widths", "temperature"), [((), 1.0), ((2, 0), 1.0), ((1,), 0.0)])
def test_bad_rules(widths: tuple[int, ...], temperature: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        rule(*widths, temperature=temperature)
