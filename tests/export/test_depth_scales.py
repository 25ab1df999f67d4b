"""Slopes and offsets of guesses: what is fitted is what made them wrong, and all growths use it."""

from __future__ import annotations

import numpy as np
import pytest

from spec_export import depth_scales
from spec_runtime.trees.guesses import Guesses


def drawn(slope: float, offset: float, num: int = 6000) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probabilities f64[P, 3] and hits that follow q' = e^offset · q^slope."""
    rng = np.random.default_rng(0)
    log_prob_PC = np.log(np.sort(rng.dirichlet(np.ones(4), num)[:, :3])[:, ::-1])
    q_PC = np.exp(slope * log_prob_PC + offset)
    assert q_PC.sum(1).max() < 1
    at_P = (rng.random(num)[:, None] > q_PC.cumsum(1)).sum(1)
    return log_prob_PC, at_P[:, None] == np.arange(3)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, -0.1), (1.6, -0.2), (0.7, -1.0)])
def test_the_scale_that_made_the_hits_is_found(slope: float, offset: float) -> None:
    log_prob_PC, hit_PC = drawn(slope, offset)
    assert depth_scales.fit_one(log_prob_PC, hit_PC) == pytest.approx((slope, offset), abs=0.08)
    (scale,), ((before, after),) = depth_scales.fit([(log_prob_PC, hit_PC)])
    assert scale == pytest.approx([slope, offset], abs=0.08)
    assert after < 0.02
    if slope != 1:
        assert before > 3 * after


def test_too_little_is_no_reason_to_change() -> None:
    log_prob_PC, hit_PC = drawn(0.7, -1.0, 20)
    assert depth_scales.fit_one(log_prob_PC, hit_PC) == (1.0, 0.0)
    assert depth_scales.fit_one(log_prob_PC[:0], hit_PC[:0]) == (1.0, 0.0)
    assert depth_scales.calibration_error(log_prob_PC[:0], hit_PC[:0]) == 0


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
