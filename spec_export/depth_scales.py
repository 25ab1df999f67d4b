"""Fits how far the log-probabilities of a one-pass drafter's guesses can be trusted, by guess.

Guess k is scaled as log q' = slope_k · log q + offset_k. Slope and offset are those that make what
was seen likeliest, each candidate being right with probability q':

    L = Σ_right log q' + Σ_wrong log(1 − q'),

counted where the answer's tokens before it were among the candidates, since only there does it
matter how likely guess k is. The slope is one over a temperature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from spec_runtime.trees.guesses import Guesses, sum_at_most_one

LEAST_POSITIONS = 50  # a guess seen less often keeps its probabilities
SLOPES = (0.25, 4.0)
NUM_HALVINGS = 30
NUM_BINS = 10  # of the expected calibration error

# By guess: log-probabilities f64[P, C], best first, and which candidate was right, bool[P, C].
Trials = list[tuple[np.ndarray, np.ndarray]]


def by_guess(seen: Sequence[tuple[Guesses, Sequence[int]]]) -> Trials:
    """Returns what was seen of each guess: `seen` holds, for each root, a drafter's guesses and the
    tokens that followed. There is at least one."""
    log_probs: list[list[np.ndarray]] = [[] for _ in seen[0][0].token_KC]
    hits: list[list[np.ndarray]] = [[] for _ in log_probs]
    for guess, truth in seen:
        before = 0  # guess 0 is behind the root, which it does not depend on
        for k, token in enumerate(truth[: len(guess)]):
            id_1C, log_prob_1C = guess.behind(k, [before])
            log_probs[k].append(log_prob_1C[0])
            hits[k].append(id_1C[0] == token)
            if not hits[k][-1].any():
                break
            before = token
    return [
        (np.array(x, np.float64), np.array(y, np.bool_))
        for x, y in zip(log_probs, hits, strict=True)
    ]


def fit(seen: Trials) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the scales, [slope, offset] of each guess, and the expected calibration error of each
    guess, [before, after]."""
    scales, errors = [], []
    for log_prob_PC, hit_PC in seen:
        slope, offset = fit_one(log_prob_PC, hit_PC)
        scaled_PC = sum_at_most_one(slope * log_prob_PC + offset)
        scales.append([round(slope, 5), round(offset, 5)])
        both = (calibration_error(x, hit_PC) for x in (log_prob_PC, scaled_PC))
        errors.append([round(error, 5) for error in both])
    return scales, errors


def fit_one(log_prob_PC: np.ndarray, hit_PC: np.ndarray) -> tuple[float, float]:
    """Returns the likeliest slope and offset of one guess.

    L falls away from its one maximum on all sides, so both are found by narrowing an interval.
    """
    if len(hit_PC) < LEAST_POSITIONS or not hit_PC.any():
        return 1.0, 0.0
    is_possible_PC = log_prob_PC > -math.inf
    right_H = log_prob_PC[is_possible_PC & hit_PC]
    wrong_M = log_prob_PC[is_possible_PC & ~hit_PC]
    highest = max(right_H.max(initial=-math.inf), wrong_M.max(initial=-math.inf))

    def best(slope: float) -> tuple[float, float]:
        """Returns the likeliest offset for this slope, and its loss."""
        top = -slope * highest - 1e-6  # no probability may reach 1
        low, high = top - 20.0, top
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            q_M = np.exp(slope * wrong_M + middle)
            is_above = (q_M / (1 - q_M)).sum() > len(right_H)
            low, high = (low, middle) if is_above else (middle, high)
        q_M = np.exp(slope * wrong_M + low)
        loss = -(slope * right_H.sum() + low * len(right_H)) - np.log1p(-q_M).sum()
        return float(low), float(loss)

    slope = math.exp(_lowest(lambda x: best(math.exp(x))[1], *map(math.log, SLOPES)))
    return slope, best(slope)[0]


def calibration_error(log_prob_PC: np.ndarray, hit_PC: np.ndarray) -> float:
    """Returns the expected calibration error of the best candidate, 0.0 without positions.

    That is the mean of |share that was right − mean probability| over ten bins of equal width by
    probability, weighted by the positions in them.
    """
    if not len(hit_PC):
        return 0.0
    q_P, hit_P = np.exp(log_prob_PC[:, 0]), hit_PC[:, 0]
    bin_P = np.minimum(q_P * NUM_BINS, NUM_BINS - 1).astype(np.int64)
    gap_B = np.bincount(bin_P, hit_P - q_P, NUM_BINS)
    return float(np.abs(gap_B).sum() / len(q_P))


def _lowest(f: Callable[[float], float], low: float, high: float) -> float:
    """Returns where f, which has one valley from `low` to `high`, is lowest (golden section)."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    f_left, f_right = f(left), f(right)
    for _ in range(NUM_HALVINGS):
        if f_left < f_right:
            high, right, f_right = right, left, f_left
            left = high - golden * (high - low)
            f_left = f(left)
        else:
            low, left, f_left = left, right, f_right
            right = low + golden * (high - low)
            f_right = f(right)
    return (low + high) / 2
