"""Guesses conditioned in pairs: in trees of every growth each parent orders its own children."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from small_trees import paths

from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown, Growth, Static
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses

# Behind 7 comes 4, behind 8 comes 5; behind 4 comes 2, behind 5 comes 1.
TOKENS = np.array([[7, 8], [4, 5], [1, 2]])
CONDITIONED = Guesses(
    TOKENS,
    np.log([[0.6, 0.3], [0.5, 0.4], [0.5, 0.4]]),
    np.log([[[0.9, 0.1], [0.2, 0.7]], [[0.3, 0.6], [0.8, 0.1]]]),
)


def random_guesses(rng: np.random.Generator, K: int, C: int, has_pairs: bool) -> Guesses:
    log_prob_KC = np.log(np.sort(rng.dirichlet(np.ones(C + 1), K)[:, :C])[:, ::-1])
    token_KC = np.stack([rng.permutation(40)[:C] for _ in range(K)])
    pair_KCC = np.log(rng.dirichlet(np.ones(C + 1), (K - 1, C))[:, :, :C]).astype(np.float32)
    return Guesses(token_KC, log_prob_KC.astype(np.float32), pair_KCC if has_pairs else None)


def everything(guesses: Guesses) -> dict[tuple[int, ...], float]:
    """Returns all paths of tokens with their log-probabilities, in plain loops."""
    num_levels, num_candidates = guesses.token_KC.shape
    found = {}
    for depth in range(1, num_levels + 1):
        for ranks in itertools.product(range(num_candidates), repeat=depth):
            log_prob = float(guesses.log_prob_KC[0, ranks[0]])
            for k in range(1, depth):
                row_C = guesses.log_prob_KC[k]
                if guesses.pair_KCC is not None:
                    row_C = guesses.pair_KCC[k - 1, ranks[k - 1]]
                log_prob += float(row_C[ranks[k]])
            found[tuple(int(guesses.token_KC[k, r]) for k, r in enumerate(ranks))] = log_prob
    return found


def test_each_parent_orders_its_own_children() -> None:
    tree = grow(1, CONDITIONED, Budget(7))
    # .6, .54, .324, .3, .21, .168 (8 5 1); the next would be 7-4-1 (.162)
    assert paths(tree) == [[7], [7, 4], [7, 4, 2], [8], [8, 5], [8, 5, 1]]
    assert tree.log_prob_N is not None
    expected = [1, 0.6, 0.54, 0.324, 0.3, 0.21, 0.168]
    assert np.exp(tree.log_prob_N) == pytest.approx(expected)


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_grown_against_brute_force(seed: int, has_pairs: bool) -> None:
    rng = np.random.default_rng(seed)
    guesses = random_guesses(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)), has_pairs)
    size, floor = int(rng.integers(1, 40)), float(rng.choice([0.0, 0.05]))
    tree = grow(0, guesses, Budget(size, growth=Grown(floor)))
    known = everything(guesses)
    best = sorted((p for p in known.values() if np.exp(p) >= floor), reverse=True)[: size - 1]
    found = [known[tuple(path)] for path in paths(tree)]
    np.testing.assert_allclose(found, best, rtol=1e-6)
    assert tree.log_prob_N is not None
    np.testing.assert_allclose(tree.log_prob_N, [0.0, *found], rtol=1e-6)
    assert len(set(map(tuple, paths(tree)))) == tree.num_nodes - 1
    first = Guesses(guesses.token_KC[:1], guesses.log_prob_KC[:1])
    assert paths(grow(0, guesses, Budget(size, 1))) == paths(grow(0, first, Budget(size)))


GROWTHS: dict[str, Growth] = {
    "grown": Grown(),
    "static": Static(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1))),
    "along": AlongTruth((3, 2, 1)),
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_pairs_that_know_nothing_change_nothing(growth: str) -> None:
    rng = np.random.default_rng(3)
    probability_KC = np.sort(rng.dirichlet(np.ones(5), 3)[:, :4])[:, ::-1]
    log_prob_KC, token_KC = np.log(probability_KC), np.tile([3, 2, 1, 9], (3, 1))
    pair_KCC = log_prob_KC[1:, None].repeat(4, axis=1)
    budget = Budget(20, growth=GROWTHS[growth])
    alone = grow(0, Guesses(token_KC, log_prob_KC), budget)
    paired = grow(0, Guesses(token_KC, log_prob_KC, pair_KCC), budget)
    assert alone.num_nodes > 6
    assert set(map(tuple, paths(paired))) == set(map(tuple, paths(alone)))
    if growth != "grown":  # whose equal products may come in another order
        assert paths(paired) == paths(alone)


def test_static_ranks_are_those_of_the_parent() -> None:
    tree = grow(0, CONDITIONED, Budget.static(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))))
    assert paths(tree) == [[7], [8], [7, 4], [8, 5], [8, 4], [8, 5, 1]]


def test_along_the_truth_each_token_conditions_the_next() -> None:
    tree = grow(0, CONDITIONED, Budget(2, growth=AlongTruth((8, 4, 1))))
    assert paths(tree) == [[7], [8], [8, 5], [8, 4], [8, 4, 2], [8, 4, 1]]
    assert tree.log_prob_N is not None
    assert np.exp(tree.log_prob_N[1:]) == pytest.approx([0.6, 0.3, 0.21, 0.06, 0.036, 0.018])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_record_q_behind_their_own_parent(temperature: float) -> None:
    growth = Drawn((2, 2, 1), temperature, False, np.random.default_rng(0))
    tree = grow(0, CONDITIONED, Budget(20, growth=growth))
    assert CONDITIONED.pair_KCC is not None
    inner = [node for node in range(tree.num_nodes) if tree.depth_N[node] < 3]
    assert sorted(tree.draws) == inner
    for node, drawn in tree.draws.items():
        k = int(tree.depth_N[node])
        log_prob_C = CONDITIONED.log_prob_KC[0]
        if k:
            rank = TOKENS[k - 1].tolist().index(int(tree.token_N[node]))
            log_prob_C = CONDITIONED.pair_KCC[k - 1, rank]
        q_C = np.exp(log_prob_C / temperature)
        found = dict(zip(drawn.id_C.tolist(), drawn.q_C.tolist(), strict=True))
        expected = dict(zip(TOKENS[k].tolist(), (q_C / q_C.sum()).tolist(), strict=True))
        assert found == pytest.approx(expected)


def test_impossible_pairs_are_left_out() -> None:
    pair_KCC = np.array([[[-np.inf, -0.1], [-np.inf, -np.inf]]])
    guesses = Guesses(TOKENS[:2], np.array([[-0.1, -2.0], [-0.5, -0.9]]), pair_KCC)
    assert paths(grow(0, guesses, Budget(9))) == [[7], [7, 5], [8]]
    assert grow(0, guesses, Budget(9, max_depth=0)).num_nodes == 1
    assert grow(0, guesses, Budget(1)).num_nodes == 1
    growth = Drawn((2, 2), 1.0, True, np.random.default_rng(0))
    drawn = grow(0, guesses, Budget(9, growth=growth))
    assert [8, 4] not in paths(drawn)
    assert [8, 5] not in paths(drawn)
