"""Holds what a one-pass drafter guesses: the candidates of each depth, and how likely each is.

The guesses are either independent of each other or conditioned in pairs: then a candidate's
probability depends on which candidate its parent is, and each parent orders its children itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_runtime.trees.coupling import GUESS, NEXT, Coupling


@dataclass(frozen=True, eq=False)
class Guesses:
    """K guesses of C candidates each.

    Row k of `token_KC` i64[K, C] holds the candidates at depth k + 1, best first, with their
    log-probabilities `log_prob_KC` f32[K, C]. A candidate's rank is its place in this row, whatever
    its parent. `pair_KCC` f32[K - 1, C, C], if given, conditions them: entry [k, p, c] is the
    log-probability of candidate c of row k + 1 behind candidate p of row k, and `log_prob_KC` then
    counts at the first depth alone.

    Example, K = C = 2: tokens [[7, 8], [4, 5]], probabilities [[.6, .3], [.5, .2]] and pairs
    [[[.9, .1], [.2, .7]]] mean that 4 is likelier behind 7 (.9) and 5 behind 8 (.7).
    """

    token_KC: np.ndarray
    log_prob_KC: np.ndarray
    pair_KCC: np.ndarray | None = None

    def __post_init__(self) -> None:
        K, C = shape = self.token_KC.shape
        assert self.log_prob_KC.shape == shape, (self.log_prob_KC.shape, shape)
        if self.pair_KCC is not None:
            assert self.pair_KCC.shape == (K - 1, C, C), (self.pair_KCC.shape, shape)

    def __len__(self) -> int:
        return len(self.token_KC)

    def order(self, k: int, parent_rank: int) -> tuple[list[int], list[float]]:
        """Returns the candidates of row k behind a parent of this rank in row k - 1, best first:
        their ranks and log-probabilities. Of the first row, `parent_rank` is ignored."""
        if self.pair_KCC is None or k == 0:
            return [*range(self.token_KC.shape[1])], self.log_prob_KC[k].tolist()
        log_prob_C = self.pair_KCC[k - 1, parent_rank]
        rank_C = (-log_prob_C).argsort(kind="stable")
        return rank_C.tolist(), log_prob_C[rank_C].tolist()

    def behind(self, k: int, parent_tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the candidates of row k behind each of these n tokens of row k - 1, best first:
        token ids i64[n, C] and log-probabilities f32[n, C]."""
        if self.pair_KCC is None or k == 0:
            same = [k] * len(parent_tokens)
            return self.token_KC[same], self.log_prob_KC[same]
        before = self.token_KC[k - 1].tolist()
        log_prob_NC = self.pair_KCC[k - 1][[before.index(token) for token in parent_tokens]]
        rank_NC = np.argsort(-log_prob_NC, axis=1, kind="stable")
        return self.token_KC[k][rank_NC], np.take_along_axis(log_prob_NC, rank_NC, axis=1)

    def copy(self) -> Guesses:
        """Returns these guesses in memory of their own."""
        pair_KCC = None if self.pair_KCC is None else self.pair_KCC.copy()
        return Guesses(self.token_KC.copy(), self.log_prob_KC.copy(), pair_KCC)

    def scaled(self, scale_K2: np.ndarray) -> Guesses:
        """Returns these guesses with log q' = slope · log q + offset, where `scale_K2` f64[K, 2]
        holds each guess's slope and offset, as spec-export calibrate fits them.

        The slope is one over a temperature. Candidates whose probabilities would then sum to more
        than 1 are lowered until the sum is 1.
        """
        slope_K1, offset_K1 = scale_K2[:, :1], scale_K2[:, 1:]
        log_prob_KC = sum_at_most_one(slope_K1 * self.log_prob_KC + offset_K1)
        if self.pair_KCC is None:
            return Guesses(self.token_KC, log_prob_KC)
        slope_K11, offset_K11 = slope_K1[1:, :, None], offset_K1[1:, :, None]
        pair_KCC = sum_at_most_one(slope_K11 * self.pair_KCC + offset_K11)
        return Guesses(self.token_KC, log_prob_KC, pair_KCC)

    def coupled(self, coupling: Coupling) -> Guesses:
        """Returns these guesses with the probabilities of being drawn with the coupling's noise.

        Candidates of independent guesses, and of the first one, change their ranks with them.
        """
        by_depth = enumerate(self.token_KC, 1)
        noise_KC = np.stack([coupling.noise_at(depth, id_C) for depth, id_C in by_depth])
        first_1C = coupling.log_probs(noise_KC[:1], self.log_prob_KC[:1], NEXT)
        if self.pair_KCC is None:
            later_KC = coupling.log_probs(noise_KC[1:], self.log_prob_KC[1:], GUESS)
            log_prob_KC = np.concatenate([first_1C, later_KC])
            rank_KC = (-log_prob_KC).argsort(axis=1, kind="stable")
            token_KC = np.take_along_axis(self.token_KC, rank_KC, axis=1)
            return Guesses(token_KC, np.take_along_axis(log_prob_KC, rank_KC, axis=1))
        rank_C = (-first_1C[0]).argsort(kind="stable")
        token_KC, log_prob_KC = self.token_KC.copy(), self.log_prob_KC.astype(np.float64)
        token_KC[0], log_prob_KC[0] = token_KC[0, rank_C], first_1C[0, rank_C]
        pair_KCC = coupling.log_probs(noise_KC[1:, None], self.pair_KCC, GUESS)
        pair_KCC[:1] = pair_KCC[:1, rank_C]
        return Guesses(token_KC, log_prob_KC, pair_KCC)


def sum_at_most_one(log_prob_C: np.ndarray) -> np.ndarray:
    """Returns log-probabilities [..., C], lowered where the probabilities sum to more than 1."""
    sum_1: np.ndarray = np.exp(log_prob_C).sum(-1, keepdims=True)
    lowered: np.ndarray = log_prob_C - np.log(np.maximum(sum_1, 1.0))
    return lowered
