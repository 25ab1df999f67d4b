"""Holds what a one-pass drafter guesses: the candidates of each depth, and how likely each is.

The guesses are either independent of each other or conditioned in pairs: then a candidate's
probability depends on which candidate its parent is, and each parent orders its children itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
