"""Measures a drafter on held-out answers: accuracy and calibration of each guess, and simulated
accepted length.

The accepted length is simulated along the target's known greedy answers with the trees that the
runtime grows, so that no target has to run. Guesses that are conditioned on the guess before are
measured after that guess's true token, as they stand in a tree below an accepted node.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_export.drafters.layers import Batch
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses

VALIDATION_BUDGET = Budget(max_nodes=16)
VALIDATION_TOKENS = 40_000  # bounds the time that one validation takes
QUESTIONS = 16  # sequences of a validation by the runtime
CALIBRATION_BINS = 10
# A batch's guesses: token ids i64 and log-probabilities f32, both [B, T-1, K, C], and the pairs
# f32[B, T-1, K-1, C, C] of conditioned guesses (see Guesses) or None.
GuessesOf = Callable[[Batch], tuple[Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True)
class Validation:
    """The result: top-1 and top-5 accuracy per guess (k = 0 is the token after the root), the
    simulated accepted length with `VALIDATION_BUDGET`, and the expected calibration error per
    guess (see `Calibration.errors`)."""

    top1_K: tuple[float, ...]
    top5_K: tuple[float, ...]
    accepted_length: float
    ece_K: tuple[float, ...]


def held_out_sequences(num_training: int, length_N: np.ndarray) -> np.ndarray:
    """Returns the indices of the sequences to validate on, at least one: those from `num_training`
    on, as far as they have `VALIDATION_TOKENS` tokens in all."""
    pool = np.arange(num_training, len(length_N))
    return pool[: max(1, int(np.searchsorted(np.cumsum(length_N[pool]), VALIDATION_TOKENS)))]


def validate(batches: Iterable[Batch], guesses_of: GuessesOf) -> Validation:
    """Returns accuracy, calibration and accepted length over all sequences of `batches`."""
    hits_K, top5_K, count_K = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    calibration = Calibration()
    committed = steps = 0
    for batch in batches:
        ids, log_probs, pairs = guesses_of(batch)
        ids_BRKC, log_prob_BRKC = ids.cpu().numpy(), log_probs.cpu().numpy()
        pair_BRKCC = None if pairs is None else pairs.cpu().numpy()
        token_BT, loss_BT = batch.token_BT.cpu().numpy(), batch.loss_BT.cpu().numpy()
        for row, length in enumerate(batch.length_B.tolist()):
            token_T, loss_T = token_BT[row, :length], loss_BT[row, :length]
            guessed = ids_BRKC[row], log_prob_BRKC[row]
            pair_RKCC = None if pair_BRKCC is None else pair_BRKCC[row]
            behind = guessed if pair_RKCC is None else behind_truth(token_T, *guessed, pair_RKCC)
            hit, hit5, count = guess_accuracy(token_T, loss_T, behind[0])
            hits_K, top5_K, count_K = hits_K + hit, top5_K + hit5, count_K + count
            calibration.add(token_T, loss_T, *behind)
            more = simulate(token_T, loss_T, *guessed, VALIDATION_BUDGET, pair_RKCC)
            committed, steps = committed + more[0], steps + more[1]
    count_K = np.maximum(count_K, 1)
    return Validation(
        tuple((hits_K / count_K).tolist()),
        tuple((top5_K / count_K).tolist()),
        committed / max(steps, 1),
        calibration.errors(),
    )


class Calibration:
    """Compares how probable each guess's best token was said to be with how often it was right."""

    def __init__(self) -> None:
        # by guess: probability and hit of each labelled guess's best token
        self._guesses: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def add(
        self, token_T: np.ndarray, loss_T: np.ndarray, ids_RKC: np.ndarray, log_prob_RKC: np.ndarray
    ) -> None:
        """Adds the labelled guesses of one sequence, see `guess_accuracy`."""
        R, K, _ = ids_RKC.shape
        self._guesses = self._guesses or [[] for _ in range(K)]
        for k, of_guess in enumerate(self._guesses):
            rows = _labelled_rows(loss_T, R, k)
            hit = ids_RKC[rows, k, 0] == token_T[rows + 2 + k]
            of_guess.append((np.exp(log_prob_RKC[rows, k, 0].astype(np.float64)), hit))

    def errors(self) -> tuple[float, ...]:
        """Returns the expected calibration error of each guess, in bins of equal width.

        It is Σ_b share_b · |mean probability_b − accuracy_b|, share_b being the share of the
        guesses whose probability lies in bin b. Guesses of probability 0.9 that are right in 7 of
        10 cases have an error of 0.2.
        """
        errors = []
        for of_guess in self._guesses:
            probability, hit = (np.concatenate(x) for x in zip(*of_guess, strict=True))
            bins = np.minimum((probability * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
            gap_B = np.bincount(bins, probability - hit, CALIBRATION_BINS)
            errors.append(float(np.abs(gap_B).sum() / max(len(hit), 1)))
        return tuple(errors)


def behind_truth(
    token_T: np.ndarray, ids_RKC: np.ndarray, log_prob_RKC: np.ndarray, pair_RKCC: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns conditioned guesses after the true token of the guess before, best first: token ids
    and log-probabilities, both [R, K, C].

    `pair_RKCC` [R, K-1, C, C] is as in Guesses. Where the true token is no candidate, or is past
    the end, the guess stays as it is without a condition.
    """
    ids_RKC, log_prob_RKC = ids_RKC.copy(), log_prob_RKC.copy()
    before_RKC = ids_RKC.copy()
    R, K, _ = ids_RKC.shape
    for k in range(1, K):
        rows = np.arange(max(0, min(R, len(token_T) - 1 - k)))
        is_parent = before_RKC[rows, k - 1] == token_T[rows + 1 + k, None]
        rows, parent = rows[is_parent.any(1)], is_parent.argmax(1)[is_parent.any(1)]
        log_prob_NC = pair_RKCC[rows, k - 1, parent]
        order_NC = np.argsort(-log_prob_NC, axis=1, kind="stable")
        log_prob_RKC[rows, k] = np.take_along_axis(log_prob_NC, order_NC, 1)
        ids_RKC[rows, k] = np.take_along_axis(before_RKC[rows, k], order_NC, 1)
    return ids_RKC, log_prob_RKC


def guess_accuracy(
    token_T: np.ndarray, loss_T: np.ndarray, ids_RKC: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns top-1 hits, top-5 hits and the number of labelled guesses of one sequence, i64[K].

    Guess k at row t is about token t+2+k. Only answer tokens count, those with loss_T True.
    """
    R, K, _ = ids_RKC.shape
    hit, hit5, count = (np.zeros(K, dtype=np.int64) for _ in range(3))
    for k in range(K):
        rows = _labelled_rows(loss_T, R, k)
        match = ids_RKC[rows, k, :5] == token_T[rows + 2 + k, None]
        hit[k], hit5[k], count[k] = match[:, 0].sum(), match.any(1).sum(), len(rows)
    return hit, hit5, count


def _labelled_rows(loss_T: np.ndarray, num_rows: int, k: int) -> np.ndarray:
    """Returns the rows whose guess k and guess 0 are both about answer tokens, i64[N]."""
    rows = np.arange(max(0, min(num_rows, len(loss_T) - 2 - k)))
    return rows[loss_T[rows + 2 + k] & loss_T[rows + 2]]


def simulate(
    token_T: np.ndarray,
    loss_T: np.ndarray,
    ids_RKC: np.ndarray,
    log_prob_RKC: np.ndarray,
    budget: Budget,
    pair_RKCC: np.ndarray | None = None,
) -> tuple[int, int]:
    """Returns (committed tokens, verify steps) of drafting along a known greedy answer.

    Drafts and accepts as the runtime would: the first answer token comes from prefill; each step
    commits the tree's path along the answer, and the bonus. A sequence of several turns has as many
    answers. `pair_RKCC` [R, K-1, C, C] is that of conditioned guesses, see Guesses. Tokens
    3 5 | 6 7 8 9 with the answer after the bar: 6 is the first root. If 7 and 8 are guessed, one
    step commits 7, 8 and the bonus 9: (3, 1).
    """
    committed = steps = 0
    for start, end in _answers(loss_T):
        position = max(start, 1)  # the root token's index: a token has to stand before it
        while position < end:
            t = position - 1  # the row with the feature of t and token t+1, the root
            pair_KCC = None if pair_RKCC is None else pair_RKCC[t]
            guesses = Guesses(ids_RKC[t], log_prob_RKC[t], pair_KCC)
            tree = grow(int(token_T[position]), guesses, budget)
            accepted = len(tree.follow(token_T[position + 1 : end + 1].tolist()))
            advance = min(accepted + 1, end - position)
            committed, steps, position = committed + advance, steps + 1, position + advance
    return committed, steps


def _answers(loss_T: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields the first and the last index of each run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.pad(loss_T.astype(np.int8), 1)))
    for start, behind in edges.reshape(-1, 2).tolist():
        yield start, behind - 1
