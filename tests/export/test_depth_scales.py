"""Slopes and offsets of guesses: what is fitted is what made them wrong, and all growths use it."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export import depth_scales
from spec_export.depth_scales import Trials
from spec_runtime.trees.guesses import Guesses


def drawn(slope: float, offset: float, num: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probabilities f64[P, 3] and hits that follow q' = e^offset · q^slope."""
    rng = np.random.default_rng(0)
    log_prob_PC = np.log(np.sort(rng.dirichlet(np.ones(4), num)[:, :3])[:, ::-1])
    q_PC = np.exp(slope * log_prob_PC + offset)
    assert q_PC.sum(1).max() < 1
    at_P = (rng.random(num)[:, None] > q_PC.cumsum(1)).sum(1)
    return log_prob_PC, at_P[:, None] == np.arange(3)


def answers(slope: float, offset: float, num: int = 6000) -> list[list[Trials]]:
    """Returns the trials of `drawn` as those of twelve answers' only guess."""
    log_prob_PC, hit_PC = drawn(slope, offset, num)
    parts = zip(np.array_split(log_prob_PC, 12), np.array_split(hit_PC, 12), strict=True)
    return [[part] for part in parts]


@pytest.mark.parametrize(("slope", "offset"), [(1.0, -0.1), (1.6, -0.2), (0.7, -1.0)])
def test_the_scale_that_made_the_hits_is_found(slope: float, offset: float) -> None:
    got = depth_scales.fit_one(*drawn(slope, offset), prior=1)
    assert got == pytest.approx((slope, offset), abs=0.08)
    (scale,), ((before, after),) = depth_scales.fit(answers(slope, offset, 60_000))
    assert scale == pytest.approx([slope, offset], abs=0.08)
    assert after < 0.02
    if slope != 1:
        assert before > 3 * after


def test_the_fit_is_the_likeliest_with_the_prior() -> None:
    """The gradient of L and of the prior's L, the latter over positions as the drafter says."""
    log_prob_PC, hit_PC = drawn(1.6, -0.2, 400)
    slope, offset = depth_scales.fit_one(log_prob_PC, hit_PC, prior=100)
    assert 1.0 < slope < 1.6

    def loss(slope: float, offset: float) -> float:
        z_PC, q_PC = slope * log_prob_PC + offset, np.exp(log_prob_PC)
        right, wrong = z_PC, np.log(1 - np.exp(z_PC))
        seen = np.where(hit_PC, right, wrong).sum()
        return -seen - 100 / 400 * (q_PC * right + (1 - q_PC) * wrong).sum()

    nearby = [loss(slope + s, offset + o) for s in (-0.01, 0, 0.01) for o in (-0.01, 0, 0.01)]
    assert min(nearby) == nearby[4]


def test_the_fewer_positions_the_less_is_changed() -> None:
    fits = [depth_scales.fit_one(*drawn(0.7, -1.0, num)) for num in (20_000, 500, 20)]
    offsets = [offset for _, offset in fits]
    assert offsets == sorted(offsets)
    assert fits[-1] == pytest.approx((1.0, 0.0), abs=0.05)
    assert depth_scales.fit_one(np.zeros((0, 3)), np.zeros((0, 3), np.bool_)) == (1.0, 0.0)
    assert depth_scales.calibration_error(np.zeros((0, 3)), np.zeros((0, 3), np.bool_)) == 0


def test_what_does_not_help_on_answers_left_out_is_not_applied() -> None:
    """Each answer is wrong in its own way: even ones are always right, odd ones never."""
    log_prob_PC = np.log(np.tile([0.5, 0.3], (500, 1)))
    seen = [[(log_prob_PC, np.tile([i % 2 == 0, False], (500, 1)))] for i in range(2)]
    log_probs, hits = zip(*(answer[0] for answer in seen), strict=True)
    together = depth_scales.fit_one(np.concatenate(log_probs), np.concatenate(hits))
    assert together != (1.0, 0.0)
    assert depth_scales.fit(seen) == ([[1.0, 0.0]], [[0.0, 0.0]])
    # a single answer leaves nothing to judge a fit by; nor does a guess that was never reached
    assert depth_scales.fit(seen[:1]) == ([[1.0, 0.0]], [[0.5, 0.5]])
    nothing = (log_prob_PC[:0], np.zeros((0, 2), np.bool_))
    assert depth_scales.fit([[nothing], [nothing]]) == ([[1.0, 0.0]], [[0.0, 0.0]])


def test_the_error_after_is_that_of_answers_left_out() -> None:
    """By hand, two answers: each is scaled by what was fitted to the other one."""
    seen = [answers(1.6, -0.2, 12_000)[i] for i in (0, 1)]
    _, ((_, after),) = depth_scales.fit(seen)
    scaled = [
        depth_scales.scaled(seen[i][0][0], *depth_scales.fit_one(*seen[1 - i][0])) for i in (0, 1)
    ]
    hits = np.concatenate([answer[0][1] for answer in seen])
    expected = depth_scales.calibration_error(np.concatenate(scaled), hits)
    assert after == pytest.approx(expected, abs=1e-5)


def test_calibration_error_by_hand() -> None:
    log_prob_PC = np.log([[0.62], [0.66], [0.15], [0.15]])
    hit_PC = np.array([[True], [True], [False], [True]])
    # |2 − 1.28| / 4 + |1 − 0.3| / 4
    assert depth_scales.calibration_error(log_prob_PC, hit_PC) == pytest.approx(0.355)


def test_trials_end_with_the_first_miss_and_are_conditioned_on_the_truth() -> None:
    guesses = Guesses(
        np.array([[7, 8], [4, 5]]),
        np.log([[0.6, 0.3], [0.5, 0.4]]),
        np.log([[[0.9, 0.1], [0.2, 0.7]]]),
    )
    first, second = depth_scales.by_guess([(guesses, [8, 4, 9]), (guesses, [3, 4]), (guesses, [7])])
    np.testing.assert_allclose(np.exp(first[0]), [[0.6, 0.3]] * 3)
    assert first[1].tolist() == [[False, True], [False, False], [True, False]]
    np.testing.assert_allclose(np.exp(second[0]), [[0.7, 0.2]])  # behind 8, 5 comes first
    assert second[1].tolist() == [[False, True]]
