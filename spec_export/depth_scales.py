"""Fits how far the log-probabilities of a one-pass drafter's guesses can be trusted, by guess.

Guess k is scaled as log q' = slope_k · log q + offset_k; the slope is one over a temperature. Slope
and offset are those that make what was seen likeliest, each candidate being right with
probability q':

    L = Σ_right log q' + Σ_wrong log(1 − q'),

counted where the answer's tokens before it were among the candidates, since only there does it
matter how likely guess k is.

A few prompts do not say much about two numbers, so there is a prior: `PRIOR_POSITIONS` more
positions, at which each candidate was right as often as the drafter says. Near slope 1 and offset 0
their L is that of a Gaussian around them. Scales are applied where they also raise L on answers
that were left out of the fit; elsewhere slope and offset stay 1 and 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_runtime.trees.guesses import Guesses, sum_at_most_one

PRIOR_POSITIONS = 1000  # chosen by L on answers left out, see docs/guide/trees.md
MOST_FOLDS = 8  # the answers of one fold at a time are left out
SLOPES = (0.25, 4.0)
HIGHEST = -1e-4  # log-probability, above which log(1 − q) would say more than is known
NUM_STEPS = 60  # of Newton's method
NUM_BINS = 10  # of the expected calibration error

# One guess's trials: log-probabilities f64[P, C], best first, and which candidate was right,
# bool[P, C].
Trials = tuple[np.ndarray, np.ndarray]


def by_guess(seen: Sequence[tuple[Guesses, Sequence[int]]]) -> list[Trials]:
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


def fit(seen: Sequence[Sequence[Trials]]) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the scales, [slope, offset] of each guess, and the expected calibration error of each
    guess, [before, after], the latter by scales that were fitted to other answers.

    seen: for each answer, the trials of each guess. There is at least one answer.
    """
    of_guesses = zip(*seen, strict=True)
    fitted = [_fit_guess([each for each in trials if len(each[1])]) for trials in of_guesses]
    return [scale for scale, _ in fitted], [error for _, error in fitted]


def _fit_guess(answers: list[Trials]) -> tuple[list[float], list[float]]:
    """Returns [slope, offset] and the calibration error [before, after] of one guess."""
    if not answers:
        return [1.0, 0.0], [0.0, 0.0]
    num_folds = min(MOST_FOLDS, len(answers))
    folds = [_joined(answers[first::num_folds]) for first in range(num_folds)]
    log_prob_PC, hit_PC = _joined(folds)
    before = round(calibration_error(log_prob_PC, hit_PC), 5)
    if num_folds < 2:
        return [1.0, 0.0], [before, before]
    left_out = []
    for fold, (held_PC, _) in enumerate(folds):
        scale = fit_one(*_joined(folds[:fold] + folds[fold + 1 :]))
        left_out.append(scaled(held_PC, *scale))
    held_out_PC = np.concatenate(left_out)
    if log_likelihood(held_out_PC, hit_PC) <= log_likelihood(log_prob_PC, hit_PC):
        return [1.0, 0.0], [before, before]
    slope, offset = fit_one(log_prob_PC, hit_PC)
    after = round(calibration_error(held_out_PC, hit_PC), 5)
    return [round(slope, 5), round(offset, 5)], [before, after]


def _joined(trials: Sequence[Trials]) -> Trials:
    log_probs, hits = zip(*trials, strict=True)
    return np.concatenate(log_probs), np.concatenate(hits)


def scaled(log_prob_PC: np.ndarray, slope: float, offset: float) -> np.ndarray:
    """Returns the log-probabilities as a proposer scales them."""
    return sum_at_most_one(slope * log_prob_PC + offset)


def log_likelihood(log_prob_PC: np.ndarray, hit_PC: np.ndarray) -> float:
    """Returns L of the module docstring, of candidates that are possible at all."""
    is_possible_PC = log_prob_PC > -np.inf
    log_q_M = np.minimum(log_prob_PC[is_possible_PC], HIGHEST)
    hit_M = hit_PC[is_possible_PC]
    return float(log_q_M[hit_M].sum() + np.log1p(-np.exp(log_q_M[~hit_M])).sum())


def fit_one(
    log_prob_PC: np.ndarray, hit_PC: np.ndarray, prior: float = PRIOR_POSITIONS
) -> tuple[float, float]:
    """Returns the likeliest slope and offset of one guess, with a prior worth so many positions.

    L has one maximum, which Newton's method finds: each step is halved until L is higher there.
    """
    if not len(hit_PC):
        return 1.0, 0.0
    is_possible_PC = log_prob_PC > -np.inf
    log_q_M = np.minimum(log_prob_PC[is_possible_PC], HIGHEST)
    share = prior / len(hit_PC)
    right_M = hit_PC[is_possible_PC] + share * np.exp(log_q_M)
    wrong_M = 1 + share - right_M
    input_M2 = np.stack((log_q_M, np.ones_like(log_q_M)), 1)

    def loss(scale_2: np.ndarray) -> float:
        z_M = input_M2 @ scale_2
        if z_M.max() > HIGHEST or not SLOPES[0] <= scale_2[0] <= SLOPES[1]:
            return np.inf
        return float(-(right_M @ z_M) - wrong_M @ np.log1p(-np.exp(z_M)))

    scale_2 = np.array([1.0, 0.0])
    lowest = loss(scale_2)
    for _ in range(NUM_STEPS):
        q_M = np.exp(input_M2 @ scale_2)
        odds_M = q_M / (1 - q_M)
        gradient_2 = input_M2.T @ (wrong_M * odds_M - right_M)
        hessian_22 = (input_M2.T * (wrong_M * odds_M * (1 + odds_M))) @ input_M2
        step_2 = np.linalg.lstsq(hessian_22, -gradient_2, rcond=None)[0]
        halves = (scale_2 + step_2 / 2**n for n in range(20))
        better = next((each for each in halves if loss(each) < lowest), None)
        if better is None:
            break
        scale_2, lowest = better, loss(better)
    return float(scale_2[0]), float(scale_2[1])


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
