"""Trees: structure, masks as grids, growth by probability, merging."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spec_runtime.tree import Budget, TokenTree, ancestors, depths, grow, merge


def tree_of(tokens: list[int], parents: list[int]) -> TokenTree:
    return TokenTree(np.array(tokens), np.array(parents))


def grid(mask: np.ndarray) -> str:
    return "\n".join("".join("x" if cell else "." for cell in row) for row in mask)


def paths(tree: TokenTree) -> list[list[int]]:
    """Each node as the tokens from below the root to it."""
    return [tree.token_N[tree.path(i)[1:]].tolist() for i in range(1, tree.num_nodes)]


# 5 ─┬─ 7 ─┬─ 9 ── 4
#    │     └─ 6
#    └─ 8 ─── 9
EXAMPLE = tree_of([5, 7, 8, 9, 6, 9, 4], [0, 0, 0, 1, 1, 2, 3])


def test_structure() -> None:
    assert EXAMPLE.num_nodes == 7
    assert EXAMPLE.depth_N.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert EXAMPLE.children(1) == [3, 4]
    assert EXAMPLE.children(6) == []
    assert EXAMPLE.child(0, 8) == 2
    assert EXAMPLE.child(2, 9) == 5
    assert EXAMPLE.child(0, 9) is None
    assert EXAMPLE.path(6) == [0, 1, 3, 6]
    assert EXAMPLE.path(0) == [0]


def test_ancestor_mask_of_a_tree() -> None:
    assert grid(EXAMPLE.ancestor_NN) == "\n".join(
        [
            "x......",
            "xx.....",
            "x.x....",
            "xx.x...",
            "xx..x..",
            "x.x..x.",
            "xx.x..x",
        ]
    )


def test_ancestor_mask_of_a_chain_and_a_root() -> None:
    chain = TokenTree.chain([1, 2, 3, 4])
    assert chain.parent_N.tolist() == [0, 0, 1, 2]
    assert chain.depth_N.tolist() == [0, 1, 2, 3]
    assert grid(chain.ancestor_NN) == "x...\nxx..\nxxx.\nxxxx"
    assert grid(TokenTree.root(3).ancestor_NN) == "x"


def test_chain_shortcut_agrees_with_the_sweep() -> None:
    """A tree that is a chain with one more leaf takes the general way, a chain the shortcut."""
    bent = np.array([0, 0, 1, 2, 3, 0])
    assert (depths(bent)[:5] == depths(bent[:5])).all()
    assert (ancestors(bent)[:5, :5] == ancestors(bent[:5])).all()


@pytest.mark.parametrize("parents", [[0, 2, 0], [1, 0], [0, 1]])
def test_parents_come_first(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        tree_of([1] * len(parents), parents)


def test_grow_takes_paths_by_probability() -> None:
    token_KC = np.array([[7, 8, 9], [4, 5, 6]])
    probability_KC = np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]])
    tree = grow(1, token_KC, np.log(probability_KC), Budget(max_nodes=6))
    # .6, .42, .3, .21, .12
    assert paths(tree) == [[7], [7, 4], [8], [8, 4], [7, 5]]


@pytest.mark.parametrize("seed", range(20))
def test_grow_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, width = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    probability = np.sort(rng.dirichlet(np.ones(width + 1), depth)[:, :width])[:, ::-1]
    tokens = np.stack([rng.permutation(20)[:width] for _ in range(depth)])
    floor, size = float(rng.uniform(0, 0.1)), int(rng.integers(1, 30))
    tree = grow(0, tokens, np.log(probability), Budget(size, floor))
    everything = {
        tuple(int(tokens[d, r]) for d, r in enumerate(ranks)): float(
            np.prod([probability[d, r] for d, r in enumerate(ranks)])
        )
        for k in range(1, depth + 1)
        for ranks in itertools.product(range(width), repeat=k)
    }
    best = sorted((p for p in everything.values() if p >= floor), reverse=True)[: size - 1]
    found = [everything[tuple(path)] for path in paths(tree)]
    np.testing.assert_allclose(found, best, rtol=1e-9)  # products in another order
    assert tree.num_nodes <= size


def test_grow_respects_depth_and_impossible_candidates() -> None:
    token_KC = np.array([[7, 8], [4, 5]])
    log_prob_KC = np.array([[0.0, -np.inf], [-0.1, -3.0]])
    assert paths(grow(1, token_KC, log_prob_KC, Budget(9, max_depth=1))) == [[7]]
    assert paths(grow(1, token_KC, log_prob_KC, Budget(9))) == [[7], [7, 4], [7, 5]]
    assert grow(1, token_KC, log_prob_KC, Budget(9, max_depth=0)).num_nodes == 1
    assert grow(1, token_KC, log_prob_KC, Budget(1)).num_nodes == 1


def test_merge_is_a_union_without_duplicates() -> None:
    a = tree_of([1, 2, 3], [0, 0, 1])
    b = tree_of([1, 5, 2, 3, 4], [0, 0, 0, 2, 2])
    assert paths(merge(a, b, 10)) == [[2], [2, 3], [5], [2, 4]]
    # full: what is there already is still found, what is new is left out with all below it
    assert paths(merge(a, b, 4)) == [[2], [2, 3], [5]]
    c = tree_of([1, 9, 8, 2, 7], [0, 0, 1, 0, 3])
    assert paths(merge(a, c, 3)) == [[2], [2, 3]]


def test_budget_is_validated() -> None:
    for bad in ({"max_nodes": 0}, {"max_nodes": 2, "min_probability": 1.5}):
        with pytest.raises(ValueError, match="expected"):
            Budget(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_depth"):
        Budget(3, max_depth=-1)
    assert Budget(4).within(2) == Budget(4, max_depth=2)
    assert Budget(4, max_depth=1).within(2) == Budget(4, max_depth=1)
