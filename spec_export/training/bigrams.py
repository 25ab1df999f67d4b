"""Counts which tokens follow which in the answers, for drafters whose guesses do not know each
other; see drafters/bigram_pairs.py for what a drafter makes of them.

Of N answer tokens n(c) are c, and n(p, c) of the n(p) tokens after a p are c:

    P(c) = n(c) / N,    P(c|p) = (n(p, c) + s·P(c)) / (n(p) + s),

    b(p, c) = w · log (P(c|p) / P(c)).

A pair that was seen once counts as one that was not, which halves the table. w is below 1 because
the drafter's own guess has seen the context, and with it much of what p says.
"""

from collections.abc import Sequence

import numpy as np

from spec_export.training.data import Example

WEIGHT = 0.8  # w
SMOOTHING = 16.0  # s
FEWEST = 2  # times that a pair of the table was seen

Table = dict[str, np.ndarray]


def table(
    examples: Sequence[Example], draft_token_ids: np.ndarray, vocab_size: int
) -> Table | None:
    """Returns the table of the draft vocabulary's tokens i64[Vd]; None if no pair was seen twice.

    Its arrays are `previous` and `next` i32[P], the pairs (p, c) in ascending order, with `bias`
    f32[P], their b(p, c); and `token` i32[U], ascending, with `unseen` f32[U], the b(p, c) of a
    token p with every c for which the table has no pair.
    """
    is_drafted_V = np.zeros(vocab_size, bool)
    is_drafted_V[draft_token_ids] = True
    parts = [_followed(example) for example in examples]
    previous_N, next_N = (
        np.concatenate(each).astype(np.int64) for each in zip(*parts, strict=True)
    )
    count_V = np.bincount(next_N, minlength=vocab_size)
    before_V = np.bincount(previous_N, minlength=vocab_size)
    is_kept_N = is_drafted_V[previous_N] & is_drafted_V[next_N]
    pair_N = previous_N[is_kept_N] * vocab_size + next_N[is_kept_N]
    pair_P, seen_P = np.unique(pair_N, return_counts=True)
    pair_P, seen_P = pair_P[seen_P >= FEWEST], seen_P[seen_P >= FEWEST]
    if not len(pair_P):
        return None
    previous_P, next_P = np.divmod(pair_P, vocab_size)
    share_P = count_V[next_P] / len(next_N)
    ratio_P = (seen_P / share_P + SMOOTHING) / (before_V[previous_P] + SMOOTHING)
    token_U = np.flatnonzero(is_drafted_V & (before_V > 0))
    return {
        "previous": previous_P.astype(np.int32),
        "next": next_P.astype(np.int32),
        "bias": (WEIGHT * np.log(ratio_P)).astype(np.float32),
        "token": token_U.astype(np.int32),
        "unseen": (WEIGHT * np.log(SMOOTHING / (before_V[token_U] + SMOOTHING))).astype(np.float32),
    }


def _followed(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Returns the answer's tokens and the token before each, both [n]."""
    is_answer_T = example.loss_T[1:]
    return example.token_T[:-1][is_answer_T], example.token_T[1:][is_answer_T]
