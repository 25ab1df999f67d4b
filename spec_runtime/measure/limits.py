"""Derives what rounding may do to a logit, from rows that were computed in two forms.

At reduced precisions one token's logits depend on how many rows the pass has, and on where its
ancestors' rows lie in the cache, through the rounding of each row's inputs. The audit (audit.py)
therefore measures *chain rows*: the last rows of each plain answer, computed one by one and again
as a path of up to 16 nodes through a tree, whose other nodes lie between them; so are the rows of
the answer before them. No draft and no acceptance is part of that, so whatever differs is rounding.

Two limits follow, each with the number of false alarms that a sound audit has to expect:

- ``gap``: two texts may part where the rounding closed the gap between the target's likeliest
  token and another one. A gap of g logits is closed if one form of the row moves the two logits
  towards each other by more than g. How far pairs of likely tokens move is measured on the chain
  rows, and so is how many tokens lie at each gap below the likeliest one. The expected number of
  partings beyond a limit L, of N rows, is then

      N · mean over chain rows of Σ_j [g_j > L] · P(move > g_j),

  with j the likely tokens below the best. L is the smallest value for which it is at most
  `FALSE_ALARMS`. Where moves are small, as at fp16, few of the gaps measured are as small, and the
  sum says nothing. So L is also at least what a density d of gaps from 0 on asks for,

      N · d · ∫ P(move > g) dg from L on  =  `FALSE_ALARMS`,

  d being half of the rows over the median gap below the likeliest token.
- ``row``: the largest |Δlogit| over the vocabulary between a tree's row and plain decoding's. Its
  limit is where the expected number of sound rows above it falls to `FALSE_ALARMS`.

P is the measured share up to the last twentieth and an exponential tail with the mean excess beyond
it. The deviations of real int8 and int4 targets fall faster than that, so that the expected numbers
are upper estimates. They presume that an audited row deviates as the chain rows do.

With a temperature the same limits hold for gaps of log p + Gumbel noise; the expected numbers are
those of greedy decoding.

Neither limit is ever above what a global rule would give: the largest |Δlogit| of any chain row for
a gap, twice that for a row. That rule took the largest of some 49,000 logits, most of them of
tokens nobody would say, for what may happen between two tokens, and called a gap of 2.8 logits
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FALSE_ALARMS = 0.01  # expected of one sound audit, for each of the two limits
TINY = 1e-9  # logits, where most rows tie
LIKELY = 8  # tokens of a row whose logits are compared with each other
TAIL_SHARE, TAIL_VALUES = 0.05, 20  # of the values, and at least this many, tell the tail


class ChainRow(NamedTuple):
    """One row computed by itself and in a tree.

    ``delta`` is the largest |Δlogit| over the vocabulary. ``gap_C`` are the gaps from the likeliest
    token to the next ones, in the row computed by itself, and ``move_C`` says by how much each gap
    is smaller in the tree's row. Logits [5, 3, 1] by itself and [4.5, 3.5, 1] in the tree give
    delta 0.5, gap_C [2, 4] and move_C [1, 0.5].
    """

    delta: float
    gap_C: np.ndarray
    move_C: np.ndarray


def chain_row(alone_V: np.ndarray, tree_V: np.ndarray) -> ChainRow:
    """Compares one row's logits f32[V] computed by itself with those computed in a tree."""
    likely = np.argpartition(-alone_V, min(LIKELY, len(alone_V)) - 1)[:LIKELY]
    likely = likely[np.argsort(-alone_V[likely])]
    gap_C = alone_V[likely[0]] - alone_V[likely[1:]]
    tree_gap_C = tree_V[likely[0]] - tree_V[likely[1:]]
    return ChainRow(float(np.abs(tree_V - alone_V).max()), gap_C, gap_C - tree_gap_C)


class Tail(NamedTuple):
    """An exponential tail: P(X > x) = share · exp((start − x) / scale) for x ≥ start."""

    start: float
    share: float
    scale: float

    @classmethod
    def fit(cls, values: np.ndarray) -> Tail:
        """Fits the tail to the largest values; their mean excess is the scale."""
        ordered = np.sort(values)
        count = min(max(TAIL_VALUES, math.ceil(TAIL_SHARE * len(ordered))), (len(ordered) + 1) // 2)
        start = float(ordered[-count])
        return cls(start, count / len(ordered), float((ordered[-count:] - start).mean()))

    def beyond(self, x: np.ndarray | float) -> np.ndarray:
        """Returns P(X > x), at most 1."""
        if self.scale == 0:
            return np.where(np.asarray(x) < self.start, 1.0, 0.0)
        return np.minimum(1.0, self.share * np.exp((self.start - np.asarray(x)) / self.scale))

    def limit(self, probability: float) -> float:
        """Returns the x that values exceed with this probability; at least the start."""
        if self.scale == 0:
            return self.start
        return self.start + self.scale * max(0.0, math.log(self.share / probability))


@dataclass(frozen=True)
class Limits:
    """The largest gap and the largest |Δlogit| of a row, in logits, that rounding explains, and how
    many sound ones are expected beyond them in the audit."""

    gap: float
    row: float
    false_gaps: float
    false_rows: float


EXACT = Limits(0.0, 0.0, 0.0, 0.0)


def derive(rows: Sequence[ChainRow], num_tokens: int, num_rows: int) -> Limits:
    """Derives the limits of an audit that compares ``num_tokens`` tokens and ``num_rows`` rows."""
    if not rows:
        return EXACT
    delta_R = np.array([row.delta for row in rows])
    largest = float(delta_R.max())
    deltas = Tail.fit(delta_R)
    row = min(deltas.limit(FALSE_ALARMS / max(1, num_rows)), 2 * largest)

    gap_P = np.concatenate([each.gap_C for each in rows])
    moves = Tail.fit(np.concatenate([each.move_C for each in rows]))
    gap_P = -np.sort(-gap_P)  # from the widest on
    expected_P = max(1, num_tokens) / len(rows) * np.cumsum(moves.beyond(gap_P))
    num_sound = int((expected_P <= FALSE_ALARMS).sum())
    gap = float(gap_P[num_sound]) if num_sound < len(gap_P) else 0.0
    median = float(np.median([each.gap_C[0] for each in rows]))
    partings = max(1, num_tokens) * 0.5 * moves.scale / max(median, TINY)  # over P(move > L)
    gap = min(max(gap, moves.limit(FALSE_ALARMS / max(partings, FALSE_ALARMS))), largest)
    num_beyond = int((gap_P > gap).sum())
    false_gaps = float(expected_P[num_beyond - 1]) if num_beyond else 0.0
    return Limits(gap, row, false_gaps, float(num_rows * deltas.beyond(row)))
