"""The rules of acceptance: hand cases. Their law is tested in test_output_law.py."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from spec_runtime.loop.accept import by_rejection, by_target_sampling, by_typical
from spec_runtime.trees.tree import Draws, TokenTree

# 5 ─┬─ 7 ── 9
#    └─ 8
TREE = TokenTree(np.array([5, 7, 8, 9]), np.array([0, 0, 0, 1]))


@pytest.mark.parametrize(
    ("drawn", "path", "bonus", "visited"),
    [
        ({0: 7, 1: 9, 3: 2}, [0, 1, 3], 2, [0, 1, 3]),  # all accepted
        ({0: 1}, [0], 1, [0]),  # first refused
        ({0: 8, 2: 3}, [0, 2], 3, [0, 2]),  # the second branch
        ({0: 7, 1: 8}, [0, 1], 8, [0, 1]),  # 8 is the root's child, not this node's
        ({0: 9}, [0], 9, [0]),  # 9 is a grandchild
    ],
)
def test_walk(drawn: dict[int, int], path: list[int], bonus: int, visited: list[int]) -> None:
    asked = []

    def draw(node: int) -> int:
        asked.append(node)
        return drawn[node]

    assert by_target_sampling(TREE, draw) == (path, bonus)
    assert asked == visited  # no other row is touched


def test_empty_draft_is_plain_decoding() -> None:
    assert by_target_sampling(TokenTree.root(4), lambda node: 6) == ([0], 6)


def drawn(order: tuple[int, ...], with_replacement: bool = True) -> TokenTree:
    """Root 9 with children drawn from q = (.5, .3, .2) over tokens 0, 1, 2."""
    tokens = list(dict.fromkeys(order))
    draws = Draws(np.array([0, 1, 2]), np.array([0.5, 0.3, 0.2]), order, with_replacement)
    parents = np.zeros(1 + len(tokens), np.int64)
    return TokenTree(np.array([9, *tokens]), parents, draws={0: draws})


def uniforms(*values: float) -> Callable[[], float]:
    return iter(values).__next__


def test_no_rounding_lets_in_what_the_target_excludes() -> None:
    """A draw that q gives next to nothing, where p and q are the same otherwise."""
    draws = Draws(np.array([0, 1]), np.array([1.0, 1e-17]), (1,), with_replacement=True)
    tree = TokenTree(np.array([9, 1]), np.zeros(2, np.int64), draws={0: draws})
    found = by_rejection(tree, lambda node: np.array([1.0, 0.0]), uniforms(0.5, 0.5))
    assert found == ([0], 0)


P = np.array([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize(
    ("tree", "values", "path", "bonus"),
    [
        # .1 / .5 = .2: accepted below it; the second value is the bonus's, at node 1
        (drawn((0,)), (0.19, 0.05), [0, 1], 0),
        # refused: what is left is (0, 0, .1, .4) / .5
        (drawn((0,)), (0.2, 0.19), [0], 2),
        (drawn((0,)), (0.2, 0.21), [0], 3),
        # token 2: .3 / .2, always accepted
        (drawn((2,)), (0.999, 0.05), [0, 1], 0),
        # 0 refused twice: the second time its p is 0, and even u = 0 does not accept it
        (drawn((0, 0)), (0.2, 0.0, 0.999), [0], 3),
        # 0 refused, then 2 with p = .2 of what is left, q = .2 again: accepted
        (drawn((0, 2)), (0.2, 0.99, 0.05), [0, 2], 0),
        # without replacement q of 2 is now .4: .2 / .4
        (drawn((0, 2), False), (0.2, 0.49, 0.05), [0, 2], 0),
        # and refused: p = (0, 0, .2, .8), q = (0, .6, .4): 3 alone is left
        (drawn((0, 2), False), (0.2, 0.5, 0.0), [0], 3),
    ],
)
def test_rejection(tree: TokenTree, values: tuple[float, ...], path: list[int], bonus: int) -> None:
    assert by_rejection(tree, lambda node: P, uniforms(*values)) == (path, bonus)


def test_rejection_of_all_candidates_leaves_the_rest() -> None:
    """Without replacement until none is left: no 0 / 0 behind the last."""
    p = np.array([0.0, 0.0, 0.0, 1.0])
    with np.errstate(all="raise"):
        assert by_rejection(drawn((0, 1, 2), False), lambda n: p, uniforms(0, 0, 0, 0.5)) == (
            [0],
            3,
        )


def test_rejection_where_p_is_q_accepts_whatever_the_rounding() -> None:
    p = np.array([np.nextafter(0.5, 0), 0.3, 0.2, 0.0])
    with np.errstate(all="raise"):
        accepted = by_rejection(drawn((0,)), lambda n: p, uniforms(np.nextafter(1, 0), 0.5))
    assert accepted == ([0, 1], 1)


def test_rejection_tries_undrawn_children_as_point_masses() -> None:
    """Drawn at the root, given below it: the given ones are looked up like target sampling's."""
    tree = drawn((2,))
    tree = TokenTree(
        np.append(tree.token_N, [1, 3]), np.append(tree.parent_N, [1, 1]), draws=tree.draws
    )
    # cumulated P: .1 .3 .6 1; node 3 carries 3, node 2 carries 1
    assert by_rejection(tree, lambda n: P, uniforms(0, 0.7, 0.5)) == ([0, 1, 3], 2)
    assert by_rejection(tree, lambda n: P, uniforms(0, 0.2, 0.99)) == ([0, 1, 2], 3)
    assert by_rejection(tree, lambda n: P, uniforms(0, 0.5)) == ([0, 1], 2)


def test_rejection_never_draws_the_impossible() -> None:
    """At both ends of [0, 1), and where p does not sum to 1."""
    p = np.array([0.0, 0.7, 0.0, 0.2, 0.0])
    root = TokenTree.root(9)
    assert by_rejection(root, lambda n: p, uniforms(0.0)) == ([0], 1)
    assert by_rejection(root, lambda n: p, uniforms(float(np.nextafter(1, 0)))) == ([0], 3)


# 5 ─┬─ 0 ─┬─ 0 ── 3
#    │     └─ 1
#    ├─ 1 ─┬─ 0
#    │     └─ 1 ── 0
#    └─ 2
DEEP = TokenTree(np.array([5, 0, 1, 2, 0, 1, 0, 1, 3, 0]), np.array([0, 0, 0, 0, 1, 1, 2, 2, 4, 7]))
SHARP, FLAT = np.array([0.9, 0.06, 0.03, 0.01]), np.array([0.3, 0.3, 0.2, 0.2])


def test_typical_by_hand() -> None:
    # H(SHARP) = .43, so that delta exp(-H) = .195 > epsilon .1: only token 0 passes
    assert by_typical(DEEP, lambda n: SHARP, 0.1, 0.3) == ([0, 1, 4], 0)
    # H(FLAT) = 1.37: the threshold .076 lets all four pass, and the deepest path of most
    # probability wins: 1-1-0 (.3³) before 0-0-3 (.3² · .2)
    assert by_typical(DEEP, lambda n: FLAT, 0.1, 0.3) == ([0, 2, 7, 9], 0)
    # the likeliest first step is not the longest path's
    one_next = {0: SHARP, 7: SHARP}
    found = by_typical(DEEP, lambda n: one_next.get(n, np.roll(SHARP, 1)), 0.05, 0.3)
    assert found == ([0, 2, 7, 9], 1)
    # nothing passes: the bonus is the argmax
    assert by_typical(DEEP, lambda n: np.array([0.0, 0.0, 0.0, 1.0]), 0.1, 0.3) == ([0], 3)


def test_typical_is_strict() -> None:
    even = np.full(4, 0.25)
    tree = TokenTree(np.array([5, 0]), np.array([0, 0]))
    assert by_typical(tree, lambda n: even, 0.25, 9.0) == ([0], 0)
    assert by_typical(tree, lambda n: even, 0.2499, 9.0) == ([0, 1], 0)


@pytest.mark.parametrize("seed", range(30))
def test_typical_is_the_best_of_all_paths(seed: int) -> None:
    """Medusa's way: each path from the root tested on its own, then the longest, then the
    likeliest of them."""
    rng = np.random.default_rng(seed)
    n, epsilon = int(rng.integers(1, 25)), float(rng.uniform(0.02, 0.25))
    parents = [0, *(int(rng.integers(0, i)) for i in range(1, n))]
    tokens = np.arange(n) % 6  # siblings may be equal: the first counts
    tree = TokenTree(tokens, np.array(parents))
    p_N6 = rng.dirichlet(np.full(6, 0.7), n)
    ranked = []
    for leaf in range(n):
        path = tree.path(leaf)
        score = 0.0
        for parent, node in itertools.pairwise(path):
            p = p_N6[parent]
            threshold = min(epsilon, math.sqrt(epsilon) * math.exp((p * np.log(p)).sum()))
            if not p[tokens[node]] > threshold or tree.child(parent, tokens[node]) != node:
                break
            score += math.log(p[tokens[node]])
        else:
            ranked.append((-len(path), -score, path))
    path = min(ranked)[2]
    wanted = (path, int(p_N6[path[-1]].argmax()))
    assert by_typical(tree, lambda node: p_N6[node], epsilon, math.sqrt(epsilon)) == wanted


def test_typical_holds_where_float32_loses_probabilities() -> None:
    """A share that only float64 holds adds nothing to the entropy, instead of spoiling it."""
    p_V = np.array([0.5, 0.5, 1e-60])
    tree = TokenTree(np.array([5, 0]), np.array([0, 0]))
    # H = log 2, so that the threshold is .8 / 2 = .4 and not epsilon
    assert by_typical(tree, lambda node: p_V, epsilon=0.9, delta=0.8)[0] == [0, 1]
