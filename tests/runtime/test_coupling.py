"""Trees that follow the target's noise: they guess its draws better, and change none of them."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from small import known
from small_trees import budget_of, paths

from spec_runtime.loop.generate import _acceptance
from spec_runtime.sampling import Sampler, SamplingParams
from spec_runtime.trees.best_first import grow_best_first
from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown, Growth, Static
from spec_runtime.trees.coupling import COLD, GUESS, Coupling
from spec_runtime.trees.grow import TreeBuilder, grow, grow_by_levels
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

V = 40


def noiseless(position: int, ids: np.ndarray) -> np.ndarray:
    return np.zeros(ids.shape)


def sampler(temperature: float = 1.0, seed: int = 3) -> Sampler:
    return Sampler(SamplingParams(temperature=temperature, seed=seed), V, [0], None)


def coupling_of(sample: Sampler, position: int = 0) -> Coupling:
    return Coupling(sample.noise, sample.params.temperature, position)


def logits(position: int) -> np.ndarray:
    return np.random.default_rng(position).normal(0, 2, V).astype(np.float32)


def log_softmax(x_V: np.ndarray) -> np.ndarray:
    y_V = x_V.astype(np.float64) - x_V.max()
    return np.asarray(y_V - np.log(np.exp(y_V).sum()))


def probability_of(tree: TokenTree, path: Iterable[int]) -> float:
    node = 0
    for token in path:
        child = tree.child(node, token)
        assert child is not None, (token, tree.token_N)
        node = child
    return float(np.exp(known(tree.log_prob_N)[node]))


def test_the_example_of_the_docstring() -> None:
    def noise(position: int, ids: np.ndarray) -> np.ndarray:
        assert position == 7 + 1
        return np.array([0.0, 3.0])[ids]

    found = Coupling(noise, 1.0, 7).probabilities(1, [(0, 0.5), (1, 0.5)])
    assert found == [(0, pytest.approx(0.11, abs=0.005)), (1, pytest.approx(0.89, abs=0.005))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_with_slopes_of_one_the_likeliest_candidate_is_the_draw(temperature: float) -> None:
    """That is the law behind the fitted slopes: q = p, and nothing else is unknown."""
    sample, slopes = sampler(temperature), (1.0, 1.0, 0.0)
    for position in range(5, 105):
        ids = np.arange(V)
        log_p_V = log_softmax(logits(position) / temperature)
        # the rest of no candidates is as good as nothing, and b is multiplied by the temperature
        coupling = replace(coupling_of(sample), temperature=1.0)
        coupled_V = coupling.log_probs(sample.noise(position, ids), log_p_V, slopes)
        assert int(coupled_V.argmax()) == sample(logits(position), position)


def test_probabilities_leave_room_for_other_tokens() -> None:
    sample = sampler()
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    log_prob_NC = np.log([[0.5, 0.3, 0.1], [0.9, 0.1, 1e-9]])
    coupling = coupling_of(sample)
    coupled_NC = coupling.log_probs(sample.noise(1, ids), log_prob_NC)
    assert coupled_NC.shape == (2, 3)
    assert (np.exp(coupled_NC).sum(axis=1) < 1).all()
    for row in range(2):
        alone_C = coupling.log_probs(sample.noise(1, ids[row]), log_prob_NC[row])
        assert coupled_NC[row] == pytest.approx(alone_C)
    impossible_C = coupling.log_probs(np.zeros(3), np.array([0.0, -np.inf, -np.inf]))
    assert np.isneginf(impossible_C[1:]).all()
    assert np.isfinite(impossible_C[0])


def test_near_temperature_zero_probabilities_are_the_drafters() -> None:
    log_prob_C = np.log([0.5, 0.3, 0.1])
    coupling = Coupling(noiseless, 1e-9)
    assert coupling.log_probs(np.zeros(3), log_prob_C) == pytest.approx(log_prob_C)
    warm = replace(coupling, temperature=COLD).log_probs(np.zeros(3), log_prob_C, GUESS)
    assert warm[0] - warm[1] == pytest.approx(GUESS[0] * (log_prob_C[0] - log_prob_C[1]))


def hits(use_noise: bool, num_guesses: int) -> float:
    """Returns how often the draw of p is among so many guesses of someone who knows p."""
    sample, found = sampler(seed=11), 0
    for position in range(400):
        log_p_V = log_softmax(logits(position))

        def expand(
            nodes: TreeBuilder, first: int, log_p_V: np.ndarray = log_p_V
        ) -> tuple[np.ndarray, np.ndarray]:
            best_C = (-log_p_V).argsort()[:16]
            return best_C[None], log_p_V[best_C][None]

        coupling = coupling_of(sample, position - 1) if use_noise else None
        budget = Budget(1 + num_guesses, coupling=coupling)
        tree = grow_by_levels(0, expand, budget, num_levels=1, max_width=1)
        found += tree.child(0, sample(logits(position), position)) is not None
    return found / 400


def test_the_noise_makes_guesses_better() -> None:
    """p has an entropy of about 2 nats; the difference is many standard errors, 0.025 at most."""
    assert hits(use_noise=True, num_guesses=1) > hits(use_noise=False, num_guesses=1) + 0.3
    assert hits(use_noise=True, num_guesses=3) > hits(use_noise=False, num_guesses=3) + 0.2


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_tree_multiplies_the_coupled_probabilities(seed: int, has_pairs: bool) -> None:
    """The first guess's candidates change their ranks, by which pairs are looked up."""
    coupling = coupling_of(sampler(seed=seed), position=2)
    rng = np.random.default_rng(seed)
    K, C = 3, 4
    token_KC = np.stack([rng.permutation(V)[:C] for _ in range(K)])
    log_prob_KC = np.log(rng.dirichlet([0.5] * (C + 1), K)[:, :C])
    log_prob_KC[0] = -np.sort(-log_prob_KC[0])
    pair_KCC = np.log(rng.dirichlet([0.5] * (C + 1), (K - 1, C))[..., :C])
    guesses = Guesses(token_KC, log_prob_KC, pair_KCC if has_pairs else None)
    if not has_pairs:
        pair_KCC = log_prob_KC[1:, None].repeat(C, axis=1)
    tree = grow(1, guesses, Budget(200, coupling=coupling))
    assert tree.num_nodes == 1 + C + C**2 + C**3
    assert (np.diff(known(tree.log_prob_N)) <= 0).all()
    noise_KC = [coupling.noise_at(depth, token_KC[depth - 1]) for depth in (1, 2, 3)]
    first = coupling.log_probs(noise_KC[0], log_prob_KC[0])
    for i in range(C):
        second = coupling.log_probs(noise_KC[1], pair_KCC[0, i], GUESS)
        for j in range(C):
            third = coupling.log_probs(noise_KC[2], pair_KCC[1, j], GUESS)
            for k in range(C):
                path = [int(token_KC[0, i]), int(token_KC[1, j]), int(token_KC[2, k])]
                expected = np.exp(first[i] + second[j] + third[k])
                assert probability_of(tree, path) == pytest.approx(expected)
    narrow = grow(1, guesses, Budget(3, coupling=coupling))
    assert narrow.token_N.tolist() == tree.token_N[:3].tolist()


def test_nodes_found_one_by_one_are_coupled_at_their_depth() -> None:
    coupling = coupling_of(sampler(), position=30)

    def children(place: int, least: float) -> list[tuple[int, float]]:
        return [(5, 0.6), (6, 0.3)] if place < 2 else []

    tree = grow_best_first(
        1, 0, children, lambda place, token: place + 1, Budget(10, coupling=coupling)
    )
    by_depth = [dict(coupling.probabilities(depth, [(5, 0.6), (6, 0.3)])) for depth in (1, 2)]
    assert tree.num_nodes == 7
    for a in (5, 6):
        for b in (5, 6):
            expected = by_depth[0][a] * by_depth[1][b]
            assert probability_of(tree, [a, b]) == pytest.approx(expected)
    assert coupling.probabilities(1, []) == []


def test_only_target_sampling_above_temperature_zero_is_coupled() -> None:
    """Acceptance by rejection draws the children itself: trees that follow p's noise would bias
    it."""
    sample = sampler(0.8)

    def budget(**given: object) -> Budget:
        params = SamplingParams(seed=3, **given)  # type: ignore[arg-type]
        return _acceptance(params, sample, Budget(8))[1]

    coupling = known(budget(temperature=0.8).coupling)
    assert coupling.temperature == 0.8
    ids = np.array([3, 4])
    assert coupling.noise(9, ids).tolist() == sample.noise(9, ids).tolist()
    assert budget(temperature=0.8).rooted_at(9).coupling == coupling.rooted_at(9)
    assert budget().coupling is None
    assert budget().rooted_at(9) == Budget(8)
    assert budget(temperature=0.8, acceptance="typical").coupling is None
    rejection = budget(temperature=0.8, acceptance="rejection")
    assert rejection.coupling is None
    assert isinstance(rejection.growth, Drawn)


def test_noise_counts_in_proportion_to_the_temperature() -> None:
    """A draw adds noise to the logits over T: in log-probabilities, T times the noise."""
    gaps = []
    for temperature in (1.0, 2.0):
        coupling = Coupling(lambda position, ids: ids, temperature)
        log_prob_C = coupling.log_probs(np.array([0.0, 3.0]), np.log([0.4, 0.4]))
        gaps.append(log_prob_C[1] - log_prob_C[0])
    assert gaps[1] == pytest.approx(2 * gaps[0])


# ---- guesses conditioned in pairs: each parent orders its own children ----


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
    expected = [1, 0.6, 0.54, 0.324, 0.3, 0.21, 0.168]
    assert np.exp(known(tree.log_prob_N)) == pytest.approx(expected)


@pytest.mark.parametrize("has_pairs", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_grown_against_brute_force(seed: int, has_pairs: bool) -> None:
    rng = np.random.default_rng(seed)
    guesses = random_guesses(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)), has_pairs)
    size, floor = int(rng.integers(1, 40)), float(rng.choice([0.0, 0.05]))
    tree = grow(0, guesses, Budget(size, growth=Grown(floor)))
    log_probs = everything(guesses)
    best = sorted((p for p in log_probs.values() if np.exp(p) >= floor), reverse=True)[: size - 1]
    found = [log_probs[tuple(path)] for path in paths(tree)]
    np.testing.assert_allclose(found, best, rtol=1e-6)
    np.testing.assert_allclose(known(tree.log_prob_N), [0.0, *found], rtol=1e-6)
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
    tree = grow(0, CONDITIONED, budget_of(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0))))
    assert paths(tree) == [[7], [8], [7, 4], [8, 5], [8, 4], [8, 5, 1]]


def test_along_the_truth_each_token_conditions_the_next() -> None:
    tree = grow(0, CONDITIONED, Budget(2, growth=AlongTruth((8, 4, 1))))
    assert paths(tree) == [[7], [8], [8, 5], [8, 4], [8, 4, 2], [8, 4, 1]]
    assert np.exp(known(tree.log_prob_N)[1:]) == pytest.approx([0.6, 0.3, 0.21, 0.06, 0.036, 0.018])


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
