"""Sampling reproduces p, is keyed by position and id, and respects top-k and top-p."""

import math
from typing import Any

import numpy as np
import pytest

from spec_runtime.errors import UserError
from spec_runtime.sampling import (
    MAX_SHIFT,
    MIN_TEMPERATURE,
    Sampler,
    SamplingParams,
    TopLogits,
    token_logprob,
)

# the 1 - 1e-6 quantile of chi-square by degrees of freedom: seeds are fixed, so it cannot flake
CHI_SQUARE = {5: 35.9, 7: 40.5, 35: 88.4}


def chi_square(count: np.ndarray, p: np.ndarray) -> float:
    expected = p * count.sum()
    return float(((count - expected) ** 2 / expected).sum())


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    return p / p.sum()


def sampler(vocab_size: int = 8, prompt: tuple[int, ...] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**{"temperature": 1.0, "seed": 0, **params}), vocab_size, prompt)


LOW = (1e-2, 1e-3, 1e-4, 1e-5, MIN_TEMPERATURE)


@pytest.mark.parametrize(
    ("by", "temperature"), [("seed", 1.0), *(("position", t) for t in (0.5, 1.0, 2.0, *LOW))]
)
def test_draws_follow_p(by: str, temperature: float) -> None:
    """Of large logits that lie as close together as the temperature is low."""
    noise = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2])
    logits = (20 + temperature * noise).astype(np.float32)
    p = softmax(logits.astype(np.float64) / temperature)
    fixed, count = sampler(temperature=temperature), np.zeros(8)
    np.testing.assert_allclose(fixed.probabilities(logits, 0), p, rtol=1e-5)
    for i in range(6000):
        draw = sampler(temperature=temperature, seed=i) if by == "seed" else fixed
        count[draw(logits, 7 if by == "seed" else i)] += 1
    assert chi_square(count, p) < CHI_SQUARE[7]


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """50 000 ids share 5 % of the mass: their draws are as frequent and as spread as p says."""
    logits = np.full(50_000, np.log(0.05 / 49_999), np.float32)
    logits[0] = np.log(0.95)
    draw = sampler(50_000)
    drawn = np.array([draw(logits, i) for i in range(2000)])
    rare = drawn[drawn > 0]
    assert abs(len(rare) - 100) < 5 * np.sqrt(2000 * 0.05 * 0.95)
    assert abs(rare.mean() - 25_000) < 5 * 50_000 / np.sqrt(12 * len(rare))


@pytest.mark.parametrize("temperature", [1.0, *LOW])
def test_the_winner_is_exact_at_every_temperature(temperature: float) -> None:
    """Against exact float64 scores; none of the rows raises."""
    rng = np.random.default_rng(0)
    draw = sampler(3000, temperature=temperature)
    for position in range(300):
        logits = (rng.normal(size=3000) * rng.uniform(0.1, 8)).astype(np.float32)
        if position % 2:  # many near the best one
            logits = (25 + temperature * logits).astype(np.float32)
        v = (draw.hash_bits(position) + 0.5) * 2.0**-32
        exact = logits.astype(np.float64) / temperature - np.log(-np.log1p(-v))
        token = draw(logits, position)
        assert exact[token] >= exact.max() - 1e-4
        assert temperature < 1 or token == exact.argmax()
        top = draw.draw_from_top(top_of(logits, 64), position)
        assert top in (None, token)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"min_p": 0.1, "top_k": 9}])
def test_filters_work_at_the_lowest_temperature(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    draw = sampler(3000, temperature=MIN_TEMPERATURE, **params)
    for position in range(100):
        logits = (rng.normal(size=3000) * rng.uniform(0.1, 30)).astype(np.float32)
        token = draw(logits, position)
        assert draw.draw_from_top(top_of(logits, 64), position) in (None, token)
        assert logits.max() - logits[token] < 1e-4


def test_the_largest_shifts_leave_a_distribution() -> None:
    logits = np.array([20.0, 19.0, -5.0, 3.0], np.float32)
    for temperature in (MIN_TEMPERATURE, 1.0, 1e300):
        for sign in (-1, 1):
            for factor in (1e-3, 1e3):
                draw = sampler(
                    4,
                    prompt=(0, 1),
                    temperature=temperature,
                    logit_bias={1: sign * MAX_SHIFT, 2: MAX_SHIFT},
                    presence_penalty=sign * MAX_SHIFT,
                    frequency_penalty=-sign * MAX_SHIFT,
                    repetition_penalty=factor,
                )
                draw.commit([1, 3, 3])
                assert draw.probabilities(logits, 0).sum() == pytest.approx(1)
                assert 0 <= draw(logits, 0) < 4


def test_of_equal_logits_those_with_the_lowest_ids_are_the_best() -> None:
    logits_V = np.array([1, 2, 0, 2, 1, 2, 1, 0], np.float32)
    for num_top in range(10):
        found = token_logprob(logits_V, 4, num_top)
        assert [token for token, _ in found.top] == [1, 3, 5, 0, 4, 6, 2, 7][:num_top]


def test_noise_of_neighbouring_positions_and_seeds_is_independent() -> None:
    logits = np.zeros(6, np.float32)
    count = np.zeros((6, 6))
    seeds = np.zeros((6, 6))
    for i in range(4000):
        draw = sampler(6, seed=i)
        first = draw(logits, 10)
        count[first, draw(logits, 11)] += 1
        seeds[first, sampler(6, seed=i + 1)(logits, 10)] += 1
    assert chi_square(count, np.full((6, 6), 1 / 36)) < CHI_SQUARE[35]
    assert chi_square(seeds, np.full((6, 6), 1 / 36)) < CHI_SQUARE[35]


def test_same_key_same_token_and_no_state() -> None:
    logits = np.random.default_rng(1).normal(size=64).astype(np.float32)
    a, b = sampler(64, seed=5), sampler(64, seed=5)
    forwards = [a(logits, i) for i in range(50)]
    backwards = [b(logits, i) for i in reversed(range(50))][::-1]
    assert forwards == backwards
    assert forwards != [sampler(64, seed=6)(logits, i) for i in range(50)]


def test_no_seed_is_a_fresh_seed() -> None:
    logits = np.zeros(1000, np.float32)
    runs = [[sampler(1000, seed=None)(logits, i) for i in range(8)] for _ in range(2)]
    assert runs[0] != runs[1]


def test_the_highest_temperatures_draw_evenly_what_is_possible() -> None:
    logits = np.array([0.0, 9.0, -np.inf, 3.0], np.float32)
    for temperature in (1e30, 1e300):
        p = sampler(4, temperature=temperature).probabilities(logits, 0)
        np.testing.assert_allclose(p, [1 / 3, 1 / 3, 0, 1 / 3])


def test_temperature_zero_is_the_argmax() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert sampler(4, temperature=0.0)(logits, 3) == 1


def survivors(logits: np.ndarray, **params: Any) -> list[int] | None:
    ids, _ = sampler(len(logits), **params).survivors(logits)
    return None if ids is None else ids.tolist()


def test_top_k_keeps_the_k_best_and_ties_at_the_edge() -> None:
    logits = np.array([0.0, 5.0, 1.0, 4.0, 1.0], np.float32)
    found = [survivors(logits, top_k=k) for k in (2, 3, 5)]
    assert found == [[1, 3], [1, 2, 3, 4], None]
    scaled = sampler(5, top_k=2).survivors(logits)[1]
    assert scaled.tolist() == [0.0, -1.0]  # up to a constant


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [None, 12])
def test_top_p_is_the_smallest_set_of_that_mass(top_p: float, top_k: int | None) -> None:
    logits = np.random.default_rng(2).normal(size=40).astype(np.float32) * 2
    order = np.argsort(-logits)[:top_k]
    p = softmax(logits[order])
    mass, wanted = 0.0, set()
    for token, share in zip(order.tolist(), p, strict=True):
        wanted.add(token)
        mass += share
        if mass >= top_p:
            break
    assert survivors(logits, top_p=top_p, top_k=top_k) == sorted(wanted)


def test_min_p_is_a_share_of_the_best_probability() -> None:
    logits = np.log(np.array([0.5, 0.2, 0.049, 0.051, 0.2], np.float32))
    assert np.flatnonzero(sampler(5, min_p=0.1).probabilities(logits, 0)).tolist() == [0, 1, 3, 4]
    assert survivors(logits, min_p=0.0) is None
    # as likely as the best is the best itself, and its equals
    only = sampler(5, min_p=1.0)
    assert only.probabilities(logits, 0)[0] == 1
    assert only.draw_from_top(top_of(logits, 3), 0) == 0
    assert only.probabilities(logits[[0, 1, 0, 1, 2]], 0).tolist() == [0.5, 0, 0.5, 0, 0]
    # of what top-k left, by its own id
    assert survivors(logits, min_p=0.3, top_k=3) == [0, 1, 4]
    # tempered first: 0.2 / 0.5 squared is 0.16
    assert sampler(5, min_p=0.2, temperature=0.5).probabilities(logits, 0)[1] == 0


def top_of(logits: np.ndarray, k: int) -> TopLogits:
    """As the graph finds it, in float32."""
    ids = np.argsort(-logits, kind="stable")[:k]
    below = np.exp(logits - logits.max())
    logsumexp = np.log(below.sum(dtype=np.float32)) + logits.max()
    return TopLogits(ids, logits[ids], float(logsumexp))


FILTERS: list[tuple[dict[str, Any], float]] = [  # and the least share that the largest settle
    ({}, 0.1),
    ({"temperature": 0.6}, 0.4),
    ({"temperature": 1.6}, 0.02),
    ({"top_k": 20}, 0.95),
    ({"top_k": 64}, 0.0),
    ({"top_k": 3, "temperature": 1.7}, 0.95),
    ({"top_p": 0.9}, 0.2),
    ({"top_p": 0.9, "temperature": 0.6}, 0.25),
    ({"top_p": 0.5, "temperature": 1.3}, 0.04),
    ({"min_p": 0.05}, 0.6),
    ({"min_p": 1e-6}, 0.0),
    ({"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8}, 0.75),
]


@pytest.mark.parametrize(("params", "least"), FILTERS)
def test_the_largest_logits_draw_what_the_whole_row_draws(
    params: dict[str, Any], least: float
) -> None:
    """Or say that they cannot; rows with ties and long tails among them."""
    rng = np.random.default_rng(3)
    draw = sampler(4000, **params)
    drawn = []
    for position in range(400):
        logits = (rng.normal(size=4000) * rng.uniform(0.3, 5)).astype(np.float32)
        if position % 3 == 0:
            logits = np.round(logits * 2).astype(np.float32) / np.float32(2)
        drawn.append(draw.draw_from_top(top_of(logits, 64), position))
        if drawn[-1] is not None:
            assert drawn[-1] == draw(logits, position), position
    settled = np.mean([token is not None for token in drawn])
    assert least <= settled
    assert settled < 1 or "top_k" in params, "some rows are flat"


@pytest.mark.parametrize("params", [params for params, _ in FILTERS])
def test_all_logits_settle_every_draw_but_those_at_the_edge(params: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    draw = sampler(50, **params)
    num_open = 0
    for position in range(300):
        logits = (rng.normal(size=50) * 2).astype(np.float32)
        token = draw.draw_from_top(top_of(logits, 50), position)
        num_open += token is None
        assert token in (None, draw(logits, position))
    assert num_open <= (10 if "top_p" in params else 0)


def test_what_the_largest_logits_leave_open() -> None:
    logits = np.array([3.0, 2.0, 2.0, 1.0, 0.0, 0.0], np.float32)
    # the third is as large as the last one known
    assert sampler(6, top_k=2).draw_from_top(top_of(logits, 2), 0) is None
    assert sampler(6, top_k=2).draw_from_top(top_of(logits, 4), 0) == sampler(6, top_k=2)(logits, 0)
    # .51 + .19: the second of two equal ones would be cut off, which one cannot be told
    assert sampler(6, top_p=0.6).draw_from_top(top_of(logits, 6), 0) is None
    far = np.array([1000.0, 0.0, 0.0, -np.inf], np.float32)
    for k in (2, 3, 4):
        assert sampler(4, top_p=0.9).draw_from_top(top_of(far, k), 0) == (0 if k == 4 else None)
        assert sampler(4).draw_from_top(top_of(far, k), 0) == 0
    for wrong in (math.nan, math.inf):
        top = top_of(logits, 6)._replace(logsumexp=wrong)
        assert sampler(6).draw_from_top(top, 0) is None


@pytest.mark.parametrize(
    ("params", "reads_top", "reads_path"),
    [
        ({}, True, False),
        ({"top_p": 0.9, "temperature": 0.5}, True, False),
        ({"temperature": 0.0}, False, False),
        ({"logprobs": 0}, False, False),
        ({"logit_bias": {1: 1.0}}, False, False),
        ({"presence_penalty": 0.5}, False, True),
        ({"acceptance": "typical"}, False, False),
        ({"acceptance": "rejection"}, False, False),
    ],
)
def test_who_reads_what(params: dict[str, Any], reads_top: bool, reads_path: bool) -> None:
    draw = sampler(8, **params)
    assert (draw.reads_top, draw.reads_path) == (reads_top, reads_path)


def test_penalties_by_hand() -> None:
    """Bias, then repetition over prompt and answer, then frequency and presence over the answer."""
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 3.0, 4: -9.0},
    )
    draw = Sampler(params, 6, prompt=[0, 3, 3])
    draw.commit([1, 2])
    draw.commit([2])
    logits = np.array([4.0, -1.0, 5.0, -2.0, 9.0, 1.0], np.float32)
    assert draw._process is not None
    # 0: 4 / 2; 1: (-1 + 3) / 2 - .5 - .25; 2: 5 / 2 - .5 - .5; 3: -2 · 2; 4: 9 - 9; 5: not seen
    assert draw._process(logits, ()).tolist() == [2.0, 0.25, 1.5, -4.0, 0.0, 1.0]
    assert logits.tolist() == [4.0, -1.0, 5.0, -2.0, 9.0, 1.0]
    # behind the path 2, 5 on a tree: 2 a third time, 5 a first
    assert draw._process(logits, [2, 5]).tolist() == [2.0, 0.25, 1.25, -4.0, 0.0, -0.25]
    assert draw(logits, 9) == 0  # 2 would have been the argmax


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 3}])
def test_draws_follow_probabilities(params: dict[str, Any]) -> None:
    """The distribution that acceptance by rejection works with is the one drawn from."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -2.0], np.float32)
    draw = sampler(6, repetition_penalty=1.5, prompt=(3,), **params)
    p = draw.probabilities(logits, 0, [1, 2])
    assert p.sum() == pytest.approx(1)
    count = np.bincount([draw(logits, i, [1, 2]) for i in range(4000)], minlength=6)
    assert count[p == 0].sum() == 0
    assert chi_square(count[p > 0], p[p > 0]) < CHI_SQUARE[5]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_nan_logits_are_an_error_not_a_token(params: dict[str, Any]) -> None:
    for bad in (np.nan, np.inf):
        logits = np.array([0.0, bad, 1.0], np.float32)
        for call in (sampler(3, **params), sampler(3).probabilities):
            with pytest.raises(FloatingPointError, match="position 4"):
                call(logits, 4)


# Values that each field of SamplingParams refuses.
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [0, "8", 8.5, True, None],
    "temperature": [-1.0, float("nan"), None, "1", True, math.inf, 10**400, np.ones(2)],
    "top_k": [0, 2.0],
    "top_p": [0.0, 1.1, "0.9"],
    "min_p": [-0.1, 1.5, [0.1]],
    "repetition_penalty": [0.0, float("inf"), 1e-40, 1e40, None],
    "presence_penalty": [float("nan"), 1e300, "1"],
    "frequency_penalty": [float("inf"), -1e39],
    "logit_bias": [
        *({-1: 2.0}, {"7": 2.0}, {7: -math.inf}, {5: 1e300}, {True: 1.0}, {5: "1"}),
        *(None, [(5, 1.0)]),
    ],
    "logprobs": [-1, True, "2"],
    "acceptance": ["fastest", None, ["typical"], np.zeros((9, 9))],
    "typical_epsilon": [0.0, 1.1, None],
    "typical_delta": [0.0, "x"],
    "draw_widths": [(), (2, 0), 3, "3", (2.0,)],
    "stop": [("a", ""), None, 3, b"END"],
    "stop_token_ids": [(3, -1), ("3",), None, 3, (True,)],
    "seed": [0.5, True],
    "draw_with_replacement": [1],
    "ignore_eos": [None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_params_are_validated(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"got {name} .*expected") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_numpys_scalars_are_taken_as_pythons() -> None:
    given: dict[str, tuple[Any, Any]] = {
        "max_new_tokens": (np.int64(8), 8),
        "temperature": (np.float32(0.5), 0.5),
        "top_k": (np.int32(3), 3),
        "seed": (np.uint64(7), 7),
        "ignore_eos": (np.bool_(True), True),
        "stop_token_ids": (np.array([1, 2]), (1, 2)),
        "logit_bias": ({np.int64(3): np.float64(1.5)}, {3: 1.5}),
        "draw_widths": (np.array([2, 1]), (2, 1)),
    }
    params = SamplingParams(**{name: numpys for name, (numpys, _) in given.items()})
    for name, (_, pythons) in given.items():
        assert getattr(params, name) == pythons
        assert type(getattr(params, name)) is type(pythons)
    assert SamplingParams(temperature=1).temperature == 1.0


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
