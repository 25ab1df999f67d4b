"""What is worth its time: how many nodes and levels of a tree, at what times."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small import known
from small_trees import Table, paths
from tuning import COSTS

from spec_runtime.pace.costs import CERTAIN
from spec_runtime.pace.reliability import monotone, observed, replayed
from spec_runtime.trees.best_first import grow_best_first
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.grow import cut, grow, grow_by_levels
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import Terms


def random_times(rng: np.random.Generator, size: int) -> tuple[float, ...]:
    """Of any shape, also falling in places."""
    return tuple((rng.uniform(2, 12) + rng.normal(0.4, 0.8, size).cumsum().clip(-1)).tolist())


@pytest.mark.parametrize("seed", range(20))
def test_a_grown_tree_is_the_best_of_all_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probability = np.sort(rng.dirichlet(np.ones(3), 2)[:, :2])[:, ::-1]
    tokens = np.array([[7, 8], [4, 5]])
    step_ms = random_times(rng, 7)
    tree = grow(
        1, Guesses(tokens, np.log(probability)), Budget(7, growth=Grown(terms=Terms(step_ms)))
    )
    ranks = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    worth = {
        path: float(np.prod([probability[d, r] for d, r in enumerate(path)])) for path in ranks
    }
    rates = [
        (1 + sum(worth[path] for path in chosen)) / step_ms[len(chosen)]
        for k in range(7)
        for chosen in itertools.combinations(ranks, k)
        if all(len(path) == 1 or path[:1] in chosen for path in chosen)
    ]
    assert len(rates) == 25, "of 64 subsets those with all parents"
    rate = np.exp(known(tree.log_prob_N)).sum() / step_ms[tree.num_nodes - 1]
    assert rate == pytest.approx(max(rates), rel=1e-9)


def test_times_decide_how_many_nodes() -> None:
    guesses = Guesses(np.array([[7, 8, 9]]), np.log(np.array([[0.5, 0.2, 0.1]])))

    def size(*step_ms: float) -> int:
        return grow(1, guesses, Budget(4, growth=Grown(terms=Terms(step_ms)))).num_nodes

    assert size(10, 10, 10, 10) == 4
    assert size(10, 16, 17, 18) == 1, "half a token for six tenths of a step"
    assert size(10, 12, 15, 15.5) == 2
    assert size(10, 16, 16, 16) == 4, "a step that its first node alone does not pay"
    doubted = Grown(0.0, ((0.2, 0.02), (0.5, 0.3)), Terms((10, 12, 13, 14)))
    assert grow(1, guesses, Budget(4, growth=doubted)).num_nodes == 2
    trusted = replace(doubted, reliability=())
    assert grow(1, guesses, Budget(4, growth=trusted)).num_nodes == 3
    static = Budget(4, growth=Static(((0,), (1,), (2,))))
    assert grow(1, guesses, static).num_nodes == 4, "a static tree stays as it is"


@pytest.mark.parametrize("seed", range(20))
def test_growing_node_by_node_stops_where_no_further_node_can_pay(seed: int) -> None:
    """Against the tree of all nodes, cut afterwards: what stops early has lost nothing by it."""
    rng = np.random.default_rng(seed)
    size = 40
    curve = np.sort(rng.uniform(0, 1, (2, 4))).T.tolist() if seed % 2 else []
    terms = Terms(random_times(rng, size), 0.3, seed % 3 * 0.05, (1.0, 0.6, 4.0)[seed // 3 % 3])
    grown = Grown(0.001, tuple(tuple(point) for point in curve), terms)
    behind: dict[tuple[int, ...], np.ndarray] = {}
    num_asked = 0

    def children(path: tuple[int, ...], least: float) -> list[tuple[int, float]]:
        nonlocal num_asked
        num_asked += 1
        if path not in behind:
            behind[path] = rng.dirichlet([0.5] * 4)[:3]
        return list(enumerate(behind[path].tolist()))

    def grow_it(growth: Grown) -> TokenTree:
        budget = Budget(size, max_depth=6, growth=growth)
        root: tuple[int, ...] = ()
        return grow_best_first(9, root, children, lambda path, token: (*path, token), budget, 2)

    everything = grow_it(replace(grown, terms=None))
    num_all, num_asked = num_asked, 0
    tree, expected = grow_it(grown), cut(everything, grown, num_levels=2)
    assert paths(tree) == paths(expected)
    assert num_asked <= num_all
    if seed == 0:
        assert (num_asked, num_all, tree.num_nodes) == (16, 37, 16)


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_run_as_long_as_they_can_pay(seed: int) -> None:
    """Against all numbers of levels: one that stops early has lost nothing by it."""
    rng = np.random.default_rng(seed)
    depth, size, level_ms = 4, 30, float(rng.uniform(0, 2))
    terms = Terms(random_times(rng, size), level_ms)
    budget = Budget(size, growth=Grown(terms=terms))

    def best_rate(num_levels: int) -> tuple[float, TokenTree, int]:
        table = Table(seed)
        tree = grow_by_levels(1, table.expand, budget.within(num_levels), depth, max_width=9)
        everything = table.everything(depth)
        tokens = 1 + sum(np.exp(everything[tuple(path)]) for path in paths(tree))
        run = len(table.levels)
        ms = terms.step_ms[tree.num_nodes - 1] + (run - 1) * level_ms
        return float(tokens / ms), tree, run

    rate, _, num_run = best_rate(depth)
    for num_levels in range(num_run, depth + 1):
        table = Table(seed)
        full = grow_by_levels(1, table.expand, Budget(size, max_depth=num_levels), depth, 9)
        _, hindsight = terms.best_size(np.exp(known(full.log_prob_N)[1:]), num_levels)
        assert hindsight <= rate * (1 + 1e-9), (num_levels, num_run)
    terms = replace(terms, level_ms=0.0)
    free = Budget(size, growth=Grown(terms=terms))
    everything = sorted(np.exp(list(Table(seed).everything(2).values())), reverse=True)
    tree = grow_by_levels(1, Table(seed).expand, free, 2, max_width=9)
    _, best = terms.best_size(np.array(everything))
    got = np.exp(known(tree.log_prob_N)).sum() / terms.step_ms[tree.num_nodes - 1]
    assert got == pytest.approx(best)


def test_dear_levels_are_not_run() -> None:
    step_ms = tuple(10 + 0.1 * n for n in range(1, 31))
    runs = []
    for level_ms in (0.0, 3.0, 50.0):
        table = Table(3)
        budget = Budget(30, growth=Grown(terms=Terms(step_ms, level_ms)))
        grow_by_levels(1, table.expand, budget, 4, 9)
        runs.append(len(table.levels))
    assert runs[0] == 4
    assert runs[2] == 1
    assert runs[1] < 4


@pytest.mark.parametrize("seed", range(20))
def test_the_least_probability_leaves_out_only_what_is_never_worth_its_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    step_ms = 10 + rng.uniform(0.4, 0.5, 24).cumsum()
    points = tuple(
        (p, p * factor) for p, factor in zip((0.05, 0.2, 0.5, 0.9), (0.4, 0.5, 0.9, 1), strict=True)
    )
    terms = Terms(step_ms, 0.2, rate=0.1, trust=float(rng.uniform(0.5, 1.5)))
    least = terms.least_probability(points)
    assert least > 0
    log_prob_KC = np.log(np.sort(rng.dirichlet(np.ones(9), 3), axis=1)[:, ::-1])
    guesses = Guesses(np.tile(np.arange(9), (3, 1)), log_prob_KC)
    trees = [
        grow(0, guesses, Budget(24, growth=Grown(each, points, terms))) for each in (0.0, least)
    ]
    assert paths(trees[0]) == paths(trees[1])
    assert Terms((10.0, 9.0, 12.0), rate=0.1).least_probability(points) == 0


def test_trust_is_a_factor_on_each_probability() -> None:
    terms = Terms((10, 11, 12, 13), rate=0.1, trust=0.5)
    assert terms.best_size(np.array([0.5, 0.3, 0.1])) == (3, pytest.approx(1 + 0.25 + 0.15 - 1.2))
    assert replace(terms, trust=4.0).best_size(np.array([0.5]))[1] == pytest.approx(2 - 1.1)


def test_requests_that_share_a_pass_each_commit_a_token() -> None:
    """A pass that all wait for is longer by a node, and two tokens come without it."""
    probability_N = np.array([0.3])
    assert Terms((10, 12)).best_size(probability_N)[0] == 2
    assert Terms((10, 12), num_requests=2).best_size(probability_N)[0] == 1


def test_a_reliability_is_validated() -> None:
    for bad in (((0.5, 0.4), (0.4, 0.5)), ((0.4, 0.5), (0.5, 0.4)), ((0.4, 0.5), (0.5, 1.4))):
        with pytest.raises(ValueError, match="expected"):
            Grown(reliability=bad)


# ---- how often recorded trees are right, and what they would give at other costs ----


def tree(probabilities: list[float]) -> TokenTree:
    parents = np.array([0, 0, 0, 1])  # 5 has 7 and 8; 7 has 9
    return TokenTree(np.array([5, 7, 8, 9]), parents, np.log(np.array([1.0, *probabilities])))


def test_a_run_says_how_often_each_probability_is_right() -> None:
    sure, unsure = tree([0.9, 0.06, 0.5]), tree([0.5, 0.3, 0.1])
    seen = [(sure, [0, 1, 3])] * 8 + [(unsure, [0, 1])] * 4 + [(unsure, [0, 2])] * 4
    found = {round(p, 3): hit for p, hit in observed(seen)}
    # 0.5: `sure`'s 9 and `unsure`'s 7
    assert found == {0.9: 1.0, 0.5: 12 / 16, 0.3: 0.5, 0.1: 0.0, 0.06: 0.0}
    assert observed([(TokenTree.chain([5, 7]), [0, 1])]) == ()


def test_recorded_trees_are_cut_as_they_would_be() -> None:
    """A plain step takes 10 ms, one with a node 12 1/3 and one with three 15."""
    whole = TokenTree.chain([5, 7, 8, 9])
    likely = TokenTree(whole.token_N, whole.parent_N, np.log([1.0, 0.9, 0.8, 0.01]))
    seen = [(likely, [0, 1, 2, 3]), (likely, [0])]
    nodes, gain = replayed(seen, Budget(8, growth=Grown(reliability=CERTAIN)), COSTS)
    assert (nodes, gain.accepted_length) == (3, 2.0)
    assert gain.speedup == pytest.approx(2 * 10 / (9 + 4 * 2 / 3 + 2), abs=1e-4)
    doubted = Budget(8, growth=Grown(reliability=((1.0, 0.1),)))
    assert replayed(seen, doubted, COSTS)[0] == 1
    assert replayed(seen, Budget(2), COSTS)[1].accepted_length == 1.5
    assert replayed(seen, Budget(8), COSTS)[0] == 4, "without a reliability they stay whole"
    assert replayed([(whole, [0, 1])], doubted, COSTS)[0] == 4, "without probabilities too"


def test_monotone_pools_what_is_out_of_order() -> None:
    assert monotone([(0.2, 0.1, 3), (0.1, 0.3, 1)]) == (
        (0.1, pytest.approx(0.15)),
        (0.2, pytest.approx(0.15)),
    )
    rng = np.random.default_rng(0)
    rows = [(p, float(rng.uniform()), float(rng.uniform(0, 5))) for p in rng.uniform(size=30)]
    Grown(reliability=monotone([*rows, (0.0, 0.5, 1), (0.5, 0.5, 0)]))
