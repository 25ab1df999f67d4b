"""Computes how many nodes of a draft are worth their time; docs/architecture/pace.md has the
equation.

A tree of n nodes, the root among them, whose drafted nodes are accepted with the probabilities
P_1 ≥ P_2 ≥ … and whose step takes t(n) ms, is at the rate r of tokens a millisecond worth

    worth(n) = 1 + Σ_{i<n} P_i - r t(n)

tokens more than other steps of that time. Where no rate is known the tree is the best that has the
highest rate of its own, (1 + Σ P_i) / t(n). t may have steps, so the best n is looked for among
all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Terms:
    """Says what drafting costs now, and what its guesses are worth.

    `step_ms[n - 1]` is the time t(n) of a step with n nodes and one level of drafting, and
    `level_ms` what each further level adds, for a drafter that runs its levels one by one. `rate`
    is that of many steps, 0 where it is not known. Guesses come true `trust` times as often as
    their probabilities say. `num_requests` is how many requests share the pass: each commits a
    token without any draft.
    """

    step_ms: Sequence[float] | np.ndarray
    level_ms: float = 0.0
    rate: float = 0.0
    trust: float = 1.0
    num_requests: int = 1

    def worth(self, tokens: Any, ms: Any) -> Any:
        """Returns the worth of steps with so many tokens in this time."""
        return tokens - self.rate * ms if self.rate else tokens / ms

    def least_probability(self, reliability: Sequence[Sequence[float]]) -> float:
        """Returns a predicted probability below which no node is worth its time: it costs at least
        the least slope of t."""
        slope = max(0.0, float(np.diff(self.step_ms).min(initial=math.inf)))
        least = min(1.0, 0.999 * self.rate * slope / self.trust)  # less, because of rounding
        predicted, observed = _points(reliability)
        return float(np.interp(least, observed, predicted))

    def best_size(self, probability_N: np.ndarray, num_levels: int = 1) -> tuple[int, float]:
        """Returns the best n, and its worth.

        `probability_N` falls and leaves out the root. It or the times, whichever are fewer, say how
        large a tree can be.

        Example: P = [.5, .1], t = [10, 11, 12]: rates .1, 1.5 / 11 and 1.6 / 12, so n = 2.
        """
        n = min(len(probability_N) + 1, len(self.step_ms))
        trusted_N = np.minimum(1.0, self.trust * probability_N[: n - 1])
        tokens_N = self.num_requests + np.concatenate([[0.0], np.cumsum(trusted_N)])
        ms_N = np.asarray(self.step_ms[:n]) + (num_levels - 1) * self.level_ms
        worth_N = self.worth(tokens_N, ms_N)
        best = int(worth_N.argmax())
        return best + 1, float(worth_N[best])

    def is_another_level_worth_it(
        self, kept_N: np.ndarray, level_W: np.ndarray, num_run: int, num_left: int
    ) -> bool:
        """Returns True if drafting more levels could be worth more, were all guesses right.

        After `num_run` levels the best nodes have the probabilities `kept_N`, falling, and the
        nodes of the last level, of probabilities `level_W`, would be expanded next. The children of
        a node together have at most its probability, so at best one child has all of it, and so on
        down to the last of `num_left` levels.
        """
        _, worth = self.best_size(kept_N, num_run)
        for more in range(1, num_left + 1):
            best_case = -np.sort(-np.concatenate([kept_N, np.tile(level_W, more)]))
            if self.best_size(best_case, num_run + more)[1] > worth:
                return True
        return False


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
    return np.interp(probability_N, *_points(reliability))


def _points(reliability: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns f64[2, P]: predicted probabilities and observed acceptances, from (0, 0) on."""
    return np.array([(0.0, 0.0), *reliability]).T


class Outlook:
    """Says, while a tree grows by falling probability, whether more nodes could be worth it.

    With n nodes, those of the next one's probability P and no better ones to come, any larger tree
    of m nodes commits at most tokens(n) + (m - n) P in t(m).
    """

    def __init__(
        self, terms: Terms, reliability: Sequence[Sequence[float]] = (), num_levels: int = 1
    ) -> None:
        self._terms, self._reliability = terms, reliability
        self._ms_N = np.asarray(terms.step_ms) + (num_levels - 1) * terms.level_ms
        self._more_N = np.arange(1, len(self._ms_N))
        self._tokens, self._num_nodes = 1.0, 1
        self._best = float(terms.worth(1.0, self._ms_N[0]))

    def add(self, probability: float) -> bool:
        """Takes the next node, whose path has this probability, or returns False if neither it nor
        any after it can be worth more."""
        if self._reliability:
            probability = float(probabilities([math.log(probability)], self._reliability)[0])
        gained = min(1.0, self._terms.trust * probability)
        n = self._num_nodes
        most_N = self._tokens + gained * self._more_N[: len(self._ms_N) - n]
        if not (self._terms.worth(most_N, self._ms_N[n:]) > self._best).any():
            return False
        self._tokens += gained
        self._num_nodes += 1
        self._best = max(self._best, float(self._terms.worth(self._tokens, self._ms_N[n])))
        return True
