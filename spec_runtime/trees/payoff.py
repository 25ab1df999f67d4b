"""Computes how many nodes of a draft pay for their time.

A tree of n nodes, the root among them, whose drafted nodes lie on paths of probability
P_1 ≥ P_2 ≥ … and whose step takes t(n) ms commits

    rate(n) = (1 + Σ_{i<n} P_i) / t(n)

tokens a millisecond in expectation. Where the rate r of many steps is known, as it is within an
answer, the tree that raises it most is the one of the largest

    worth(n) = 1 + Σ_{i<n} P_i - r t(n):

a sure guess is then no reason to leave out others that pay. t may have steps, so the best n is
looked for among all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def probabilities(
    log_prob_N: Sequence[float] | np.ndarray, reliability: Sequence[Sequence[float]] = ()
) -> np.ndarray:
    """Returns f64[N]: how often paths of these log-probabilities are accepted.

    `reliability` is a curve of points (predicted probability, observed acceptance), ascending in
    both, that begins at (0, 0). Without points, each path is accepted as often as predicted.
    """
    probability_N = np.exp(np.asarray(log_prob_N, np.float64))
    if not reliability:
        return probability_N
    predicted, observed = np.array([(0.0, 0.0), *reliability]).T
    return np.interp(probability_N, predicted, observed)


def best_size(
    probability_N: np.ndarray,
    step_ms: Sequence[float] | np.ndarray,
    extra_ms: float = 0.0,
    rate: float = 0.0,
) -> tuple[int, float]:
    """Returns the best n, and its worth at this rate; without one, its rate.

    `probability_N` falls and leaves out the root; `step_ms[n - 1]` is t(n), to which `extra_ms` is
    added. The longer of the two is cut to the other's length.

    Example: P = [.5, .1], t = [10, 11, 12]: rates .1, 1.5 / 11 and 1.6 / 12, so n = 2.
    """
    n = min(len(probability_N) + 1, len(step_ms))
    tokens_N = 1.0 + np.concatenate([[0.0], np.cumsum(probability_N[: n - 1])])
    ms_N = np.asarray(step_ms[:n]) + extra_ms
    worth_N = tokens_N - rate * ms_N if rate else tokens_N / ms_N
    best = int(worth_N.argmax())
    return best + 1, float(worth_N[best])


class Outlook:
    """Says, while a tree grows by falling probability, whether more nodes could still pay.

    With n nodes, those of the next one's probability P and no better ones to come, any larger tree
    of m nodes commits at most tokens(n) + (m - n) P in t(m).
    """

    def __init__(
        self,
        step_ms: Sequence[float],
        reliability: Sequence[Sequence[float]] = (),
        extra_ms: float = 0.0,
        rate: float = 0.0,
    ) -> None:
        self._ms_N = np.asarray(step_ms, np.float64) + extra_ms
        self._more_N = np.arange(1, len(step_ms))
        self._reliability = reliability
        self._tokens, self._num_nodes, self._rate = 1.0, 1, rate
        self._best = float(self._worth(1.0, self._ms_N[0]))

    def add(self, probability: float) -> bool:
        """Takes the next node, whose path has this probability, or returns False if neither it nor
        any after it can be worth more."""
        worth = probability
        if self._reliability:
            worth = float(probabilities([math.log(probability)], self._reliability)[0])
        n = self._num_nodes
        most_N = self._tokens + worth * self._more_N[: len(self._ms_N) - n]
        if not (self._worth(most_N, self._ms_N[n:]) > self._best).any():
            return False
        self._tokens += worth
        self._num_nodes += 1
        self._best = max(self._best, float(self._worth(self._tokens, self._ms_N[n])))
        return True

    def _worth(self, tokens: Any, ms: Any) -> Any:
        return tokens - self._rate * ms if self._rate else tokens / ms


def another_level_pays(
    kept_N: np.ndarray,
    level_W: np.ndarray,
    step_ms: Sequence[float],
    level_ms: float,
    num_run: int,
    num_left: int,
    rate: float = 0.0,
) -> bool:
    """Returns True if drafting more levels could be worth more, were all guesses right.

    After `num_run` levels the best nodes have the probabilities `kept_N`, falling, and the nodes of
    the last level, of probabilities `level_W`, would be expanded next. The children of a node
    together have at most its probability, so at best one child has all of it, and so on down to
    the last of `num_left` levels.
    """
    _, worth = best_size(kept_N, step_ms, (num_run - 1) * level_ms, rate)
    for more in range(1, num_left + 1):
        best_case = -np.sort(-np.concatenate([kept_N, np.tile(level_W, more)]))
        if best_size(best_case, step_ms, (num_run - 1 + more) * level_ms, rate)[1] > worth:
            return True
    return False
