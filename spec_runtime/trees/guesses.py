"""Holds what a one-pass drafter guesses: the candidates of each depth, and how likely each is.

Guesses may be conditioned in pairs: a candidate's probability then depends on which candidate its
parent is, and each parent orders its children itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spec_runtime.trees.coupling import GUESS, NEXT, Coupling


@dataclass(frozen=True, eq=False)
class Guesses:
    """K guesses of C candidates each.

    Row k of `token_KC` i64[K, C] holds the candidates at depth k + 1, best first, with their
    log-probabilities `log_prob_KC` f32[K, C]. A candidate's rank is its place in this row, whatever
    its parent. `pair_KCC` f32[K - 1, C, C], if given, conditions them: entry [k, p, c] is the
    log-probability of candidate c of row k + 1 after candidate p of row k. Of `log_prob_KC` only
    the first row then counts.

    Example, K = C = 2: tokens [[7, 8], [4, 5]], probabilities [[.6, .3], [.5, .2]] and pairs
    [[[.9, .1], [.2, .7]]] mean that 4 is likelier after 7 (.9) and 5 after 8 (.7).
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

    @cached_property
    def after_parent_KCC(self) -> np.ndarray:
        """The pairs; of guesses without any, every row as often as it has possible parents."""
        if self.pair_KCC is not None:
            return self.pair_KCC
        K, C = self.token_KC.shape
        return np.broadcast_to(self.log_prob_KC[1:, None], (K - 1, C, C))

    def after(self, k: int, parent_tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the candidates of row k after each of these n tokens of row k - 1, best first:
        token ids i64[n, C] and log-probabilities f32[n, C]."""
        if k == 0:
            same = [0] * len(parent_tokens)
            return self.token_KC[same], self.log_prob_KC[same]
        before = self.token_KC[k - 1].tolist()
        log_prob_NC = self.after_parent_KCC[k - 1][[before.index(token) for token in parent_tokens]]
        rank_NC = np.argsort(-log_prob_NC, axis=1, kind="stable")
        return self.token_KC[k][rank_NC], np.take_along_axis(log_prob_NC, rank_NC, axis=1)

    def coupled(self, coupling: Coupling) -> Guesses:
        """Returns these guesses with the probabilities of being drawn with the coupling's noise.

        Candidates of the first guess change their ranks with them.
        """
        by_depth = enumerate(self.token_KC, 1)
        noise_KC = np.stack([coupling.noise_at(depth, id_C) for depth, id_C in by_depth])
        first_C = coupling.log_probs(noise_KC[0], self.log_prob_KC[0], NEXT)
        rank_C = (-first_C).argsort(kind="stable")
        token_KC, log_prob_KC = self.token_KC.copy(), self.log_prob_KC.astype(np.float64)
        token_KC[0], log_prob_KC[0] = token_KC[0, rank_C], first_C[rank_C]
        pair_KCC = coupling.log_probs(noise_KC[1:, None], self.after_parent_KCC, GUESS)
        pair_KCC[:1] = pair_KCC[:1, rank_C]
        return Guesses(token_KC, log_prob_KC, pair_KCC)
