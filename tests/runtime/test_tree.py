"""Trees: structure, masks as grids, growth by probability, merging."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small import known
from small_trees import Table, budget_of, grid, paths, tree_of

from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown, Static
from spec_runtime.trees.grow import TreeBuilder, grow, grow_by_levels, merge
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree, ancestors, depths

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


def test_a_tree_that_ends_at_some_tokens() -> None:
    assert EXAMPLE.ending_at({3, 5}) is EXAMPLE  # the root is no end
    ended = EXAMPLE.ending_at({9})
    assert ended.token_N.tolist() == [5, 7, 8, 9, 6, 9]
    assert ended.parent_N.tolist() == [0, 0, 0, 1, 1, 2]
    draws: Any = {node: f"{node}" for node in range(4)}
    drawn = replace(EXAMPLE, draws=draws, log_prob_N=np.arange(7.0))
    ended = drawn.ending_at({7})
    assert (ended.token_N.tolist(), ended.parent_N.tolist()) == ([5, 7, 8, 9], [0, 0, 0, 2])
    assert (ended.draws, known(ended.log_prob_N).tolist()) == ({0: "0", 2: "2"}, [0, 1, 2, 5])


def test_ancestor_mask_of_a_tree() -> None:
    assert grid(ancestors(EXAMPLE.parent_N)) == "\n".join(
        ["x......", "xx.....", "x.x....", "xx.x...", "xx..x..", "x.x..x.", "xx.x..x"]
    )


def test_ancestor_mask_of_a_chain_and_a_root() -> None:
    chain = TokenTree.chain([1, 2, 3, 4])
    assert chain.parent_N.tolist() == [0, 0, 1, 2]
    assert chain.depth_N.tolist() == [0, 1, 2, 3]
    assert grid(ancestors(chain.parent_N)) == "x...\nxx..\nxxx.\nxxxx"
    assert grid(ancestors(TokenTree.root(3).parent_N)) == "x"


def test_a_node_that_is_its_own_parent_is_a_root() -> None:
    forest = np.array([0, 1, 0, 1, 3])
    assert depths(forest).tolist() == [0, 0, 1, 1, 2]
    assert grid(ancestors(forest)) == "\n".join(["x....", ".x...", "x.x..", ".x.x.", ".x.xx"])


@pytest.mark.parametrize("parents", [[0, 2, 0], [1, 0], [0, 1]])
def test_parents_come_first(parents: list[int]) -> None:
    with pytest.raises(AssertionError):
        tree_of([1] * len(parents), parents)


def test_grow_takes_paths_by_probability() -> None:
    token_KC = np.array([[7, 8, 9], [4, 5, 6]])
    probability_KC = np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1]])
    tree = grow(1, Guesses(token_KC, np.log(probability_KC)), Budget(max_nodes=6))
    # .6, .42, .3, .21, .12
    assert paths(tree) == [[7], [7, 4], [8], [8, 4], [7, 5]]


def test_grow_respects_depth_and_impossible_candidates() -> None:
    token_KC = np.array([[7, 8], [4, 5]])
    log_prob_KC = np.array([[0.0, -np.inf], [-0.1, -3.0]])
    guesses = Guesses(token_KC, log_prob_KC)
    assert paths(grow(1, guesses, Budget(9, max_depth=1))) == [[7]]
    assert paths(grow(1, guesses, Budget(9))) == [[7], [7, 4], [7, 5]]
    assert grow(1, guesses, Budget(9, max_depth=0)).num_nodes == 1
    assert grow(1, guesses, Budget(1)).num_nodes == 1


@pytest.mark.parametrize("seed", range(20))
def test_levels_against_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, size, floor = int(rng.integers(1, 5)), int(rng.integers(2, 40)), rng.uniform(0, 0.1)
    table = Table(seed)
    everything = table.everything(depth)
    tree = grow_by_levels(1, table.expand, Budget(size, growth=Grown(floor)), depth, max_width=size)
    best = sorted((p for p in everything.values() if np.exp(p) >= floor), reverse=True)
    found = [everything[tuple(path)] for path in paths(tree)]
    np.testing.assert_allclose(found, best[: size - 1])
    assert len({tuple(path) for path in paths(tree)}) == tree.num_nodes - 1
    # only what may still count is expanded
    expanded = [path for level in table.levels[1:] for path in level]
    assert all(np.exp(everything[path]) >= floor for path in expanded)


def test_levels_of_a_drafter_that_gives_no_probabilities_make_a_tree_all_the_same() -> None:
    """Log-probabilities above 0, and NaN, come of damaged weights and of overflow."""
    level = itertools.count()

    def expand(nodes: TreeBuilder, first: int) -> tuple[np.ndarray, np.ndarray]:
        count, k = len(nodes) - first, next(level)
        id_NC = np.array([[10 * k + 1, 10 * k + 2, 10 * k + 3]]).repeat(count, 0)
        return id_NC, np.array([[5.0 * k, np.nan, -1.0]], np.float32).repeat(count, 0)

    tree = grow_by_levels(0, expand, Budget(8), num_levels=3, max_width=2)
    found = paths(tree)
    assert [1] in found
    assert [1, 11, 21] in found
    assert not any(token % 10 == 2 for path in found for token in path)


STATIC = ((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1))


def test_a_static_tree_has_exactly_its_paths() -> None:
    token_KC = np.array([[7, 8, 9], [4, 5, 6], [1, 2, 3]])
    log_prob_KC = np.log(np.array([[0.9, 0.05, 0.0], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]]) + 1e-30)
    budget = Budget(7, growth=Static(STATIC))
    guesses = Guesses(token_KC, log_prob_KC)
    tree = grow(0, guesses, budget)
    assert paths(tree) == [[7], [8], [7, 4], [7, 6], [8, 4], [7, 6, 2]]
    assert paths(grow(0, guesses, budget.within(2))) == paths(tree)[:5]
    assert paths(grow(0, Guesses(token_KC[:1], log_prob_KC[:1]), budget)) == [[7], [8]]
    assert grow(0, guesses, budget.within(0)).num_nodes == 1


def test_a_static_tree_goes_without_ranks_that_the_drafter_has_not() -> None:
    guesses = Guesses(np.array([[7, 8], [4, 5], [1, 2]]), np.zeros((3, 2)))
    ranks = ((0,), (2,), (0, 1), (2, 0), (0, 10**9), (0, 10**9, 0), (0, 1, 3))
    assert paths(grow(0, guesses, budget_of(ranks))) == [[7], [7, 5]]
    assert grow(0, guesses, budget_of(((5,), (5, 0)))).num_nodes == 1


def test_a_static_tree_level_by_level() -> None:
    table = Table(1)
    tree = grow_by_levels(1, table.expand, Budget(7, growth=Static(STATIC)), 5, max_width=1)

    def tokens(ranks: tuple[int, ...]) -> list[int]:
        path: list[int] = []
        for rank in ranks:
            path.append(int(table.guess(tuple(path))[0][rank]))
        return path

    assert paths(tree) == [tokens(ranks) for ranks in STATIC]
    # leaves are not expanded
    inner: list[list[tuple[int, ...]]] = [[()], [(0,), (1,)], [(0, 2)]]
    assert table.levels == [[tuple(tokens(ranks)) for ranks in level] for level in inner]
    table = Table(1)
    tree = grow_by_levels(1, table.expand, Budget(7, max_depth=2, growth=Static(STATIC)), 5, 1)
    assert (tree.num_nodes, len(table.levels)) == (6, 2)
    assert grow_by_levels(1, table.expand, Budget(7, growth=Static(())), 5, 1).num_nodes == 1


def static(*paths: tuple[int, ...]) -> Callable[[], Budget]:
    return lambda: Budget(3, growth=Static(paths))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (static((0,), (1, 0)), r"got path \[1, 0\], expected .* parent"),
        (static(()), r"got path \[\]"),
        (static((-1,)), r"got path \[-1\]"),
        (static((0,), (0,)), "got 2 paths, expected different ones"),
        (static((0,), (1,), (2,)), "got 3 paths, expected .* fewer than max_nodes, 3"),
        (lambda: Budget(0), "got max_nodes 0, expected"),
        (lambda: Budget(3, max_depth=-1), "got max_depth -1, expected"),
        (lambda: Grown(min_probability=1.5), "got min_probability 1.5, expected"),
    ],
)
def test_budgets_are_validated(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()
    assert Budget(4).within(2) == Budget(4, max_depth=2)
    assert Budget(4, max_depth=1).within(2) == Budget(4, max_depth=1)


@pytest.mark.parametrize("seed", range(10))
def test_grown_trees_know_their_probabilities_and_begin_with_the_smaller_ones(seed: int) -> None:
    """What calibration builds on: of a tree of 40 nodes the first 12 are the tree of 12."""
    table = Table(seed)
    token_KC, log_prob_KC = map(np.stack, zip(*(table.guess((k,)) for k in range(4)), strict=True))

    def both(size: int) -> list[TokenTree]:
        by_levels = grow_by_levels(1, Table(seed).expand, Budget(size), 4, max_width=3)
        return [grow(1, Guesses(token_KC, log_prob_KC), Budget(size)), by_levels]

    everything = table.everything(4)
    independent = {
        tuple(int(token_KC[k, r]) for k, r in enumerate(ranks)): sum(
            float(log_prob_KC[k, r]) for k, r in enumerate(ranks)
        )
        for depth in range(1, 5)
        for ranks in itertools.product(range(3), repeat=depth)
    }
    for expected, large, small in zip((independent, everything), both(40), both(12), strict=True):
        found = [expected[tuple(path)] for path in paths(large)]
        np.testing.assert_allclose(known(large.log_prob_N), [0.0, *found], rtol=1e-6)
        assert small.num_nodes == 12 < large.num_nodes
        assert paths(large)[:11] == paths(small)


def test_along_the_truth_all_candidates_are_there() -> None:
    token_KC = np.array([[7, 8, 9], [4, 5, 6], [1, 2, 3]])
    log_prob_KC = np.log(np.array([[0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]))
    guesses = Guesses(token_KC, log_prob_KC)
    tree = grow(0, guesses, Budget(2, growth=AlongTruth((8, 4, 3))))
    first = [[7], [8], [9]]
    second, third = [[8, x] for x in (4, 5, 6)], [[8, 4, x] for x in (1, 2, 3)]
    assert paths(tree) == [*first, *second, *third]
    assert np.exp(known(tree.log_prob_N)[[0, 2, 4, 9]]) == pytest.approx([1, 0.3, 0.21, 0.042])
    # no further than the first token that is not guessed, the truth's end, the budget, the drafter
    for truth, expected in [
        ((7, 9, 1), [*first, [7, 4], [7, 5], [7, 6]]),
        ((2, 4, 1), first),
        ((8,), first),
        ((), []),
    ]:
        assert paths(grow(0, guesses, Budget(2, growth=AlongTruth(truth)))) == expected
    shallow = Budget(2, max_depth=2, growth=AlongTruth((8, 4, 3)))
    assert paths(grow(0, guesses, shallow)) == [*first, *second]
    shallow = Budget(2, growth=AlongTruth((8, 4)))
    assert paths(grow(0, Guesses(token_KC[:1], log_prob_KC[:1]), shallow)) == first


def test_merge_is_a_union_without_duplicates() -> None:
    a = tree_of([1, 2, 3], [0, 0, 1])
    b = tree_of([1, 5, 2, 3, 4], [0, 0, 0, 2, 2])
    assert paths(merge(a, b, 10)) == [[2], [2, 3], [5], [2, 4]]
    # full: what is there already is still found, what is new is left out with all below it
    assert paths(merge(a, b, 4)) == [[2], [2, 3], [5]]
    c = tree_of([1, 9, 8, 2, 7], [0, 0, 1, 0, 3])
    assert paths(merge(a, c, 3)) == [[2], [2, 3]]


# ---- trees whose children are drawn: what q is, in which order, and how many ----


IDS, PROBABILITIES = np.array([7, 8, 9]), np.array([0.4, 0.2, 0.1])  # the best of more


def rule(*widths: int, temperature: float = 1.0, with_replacement: bool = False) -> Drawn:
    return Drawn(widths, temperature, with_replacement, np.random.default_rng(1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_q_is_the_candidates_tempered_and_renormalised(temperature: float) -> None:
    drawn = known(rule(1, temperature=temperature).draw(IDS, np.log(PROBABILITIES), 2))
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
        drawn = known(draws.draw(IDS, np.log(PROBABILITIES), 2))
        count[drawn.order] += 1
    assert count[p == 0].sum() == 0
    spread = np.sqrt(num * p * (1 - p))
    assert (abs(count - num * p) <= 5 * spread).all()


def test_impossible_candidates_are_not_drawn() -> None:
    log_prob_C = np.array([-0.1, -math.inf, -2.0])
    drawn = known(rule(1).draw(IDS, log_prob_C, 3))
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
