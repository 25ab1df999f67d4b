"""Measures a drafter on held-out answers: accuracy per guess, and simulated accepted length.

The accepted length is simulated along the target's known greedy answers with the trees that the
runtime grows, so that no target has to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses

VALIDATION_BUDGET = Budget(max_nodes=16)
VALIDATION_TOKENS = 40_000  # bounds the time that one validation takes


@dataclass(frozen=True)
class Validation:
    """The result: top-1 and top-5 accuracy per guess (k = 0 is the token after the root), and the
    simulated accepted length with `VALIDATION_BUDGET`."""

    top1_K: tuple[float, ...]
    top5_K: tuple[float, ...]
    accepted_length: float


def held_out_sequences(num_training: int, length_N: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences to validate on, at least one: those from `num_training`
    on, as far as they have `VALIDATION_TOKENS` tokens in all."""
    pool = np.arange(num_training, len(length_N))
    return pool[: max(1, int(np.searchsorted(np.cumsum(length_N[pool]), VALIDATION_TOKENS)))]


def validate(
    batches: Iterable[Batch], guesses: Callable[[Batch], tuple[Tensor, Tensor]]
) -> Validation:
    """Returns the accuracy and accepted length over all sequences of `batches`.

    `guesses` gives token ids i64 and log-probabilities f32, both [B, T-1, K, C], of a batch.
    """
    hits_K, top5_K, count_K = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    committed = steps = 0
    for batch in batches:
        ids, log_probs = (x.cpu().numpy() for x in guesses(batch))
        token_BT, loss_BT = batch.token_BT.cpu().numpy(), batch.loss_BT.cpu().numpy()
        for row, length in enumerate(batch.length_B.tolist()):
            token_T, loss_T = token_BT[row, :length], loss_BT[row, :length]
            hit, hit5, count = guess_accuracy(token_T, loss_T, ids[row])
            hits_K, top5_K, count_K = hits_K + hit, top5_K + hit5, count_K + count
            more = simulate(token_T, loss_T, ids[row], log_probs[row], VALIDATION_BUDGET)
            committed, steps = committed + more[0], steps + more[1]
    count_K = np.maximum(count_K, 1)
    return Validation(
        tuple((hits_K / count_K).tolist()),
        tuple((top5_K / count_K).tolist()),
        committed / max(steps, 1),
    )


def guess_accuracy(
    token_T: np.ndarray, loss_T: np.ndarray, ids_RKC: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns top-1 hits, top-5 hits and the number of labelled guesses of one sequence, i64[K].

    Guess k at row t is about token t+2+k. Only answer tokens count, those with loss_T True.
    """
    R, K, _ = ids_RKC.shape
    hit, hit5, count = (np.zeros(K, dtype=np.int64) for _ in range(3))
    for k in range(K):
        rows = np.arange(min(R, len(token_T) - 2 - k)) if len(token_T) > 2 + k else np.arange(0)
        rows = rows[loss_T[rows + 2 + k] & loss_T[rows + 2]]
        match = ids_RKC[rows, k, :5] == token_T[rows + 2 + k, None]
        hit[k], hit5[k], count[k] = match[:, 0].sum(), match.any(1).sum(), len(rows)
    return hit, hit5, count


def simulate(
    token_T: np.ndarray,
    loss_T: np.ndarray,
    ids_RKC: np.ndarray,
    log_prob_RKC: np.ndarray,
    budget: Budget,
) -> tuple[int, int]:
    """Returns (committed tokens, verify steps) of drafting along a known greedy answer.

    Drafts and accepts as the runtime would: the first answer token comes from prefill; each step
    commits the tree's path along the answer, and the bonus. Tokens 3 5 | 6 7 8 9 with the answer
    behind the bar: 6 is the first root. If 7 and 8 are guessed, one step commits 7, 8 and the
    bonus 9: (3, 1).
    """
    answer = np.flatnonzero(loss_T)
    # position is the root token's index; a token has to stand before it
    position, end = max(int(answer[0]), 1), int(answer[-1])
    committed = steps = 0
    while position < end:
        t = position - 1  # the row with the feature of t and token t+1, the root
        tree = grow(int(token_T[position]), Guesses(ids_RKC[t], log_prob_RKC[t]), budget)
        accepted = len(tree.follow(token_T[position + 1 : end + 1].tolist()))
        advance = min(accepted + 1, end - position)
        committed, steps, position = committed + advance, steps + 1, position + advance
    return committed, steps
