"""Finds what followed the end of a text before, and estimates how likely it follows again.

The index holds one text. It knows nothing of trees.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from spec_runtime.proposers.suffix_automaton import Match, SuffixAutomaton


class Estimates(NamedTuple):
    """Rows of four numbers, each for matches from one length on."""

    lengths: tuple[int, ...]
    rows: tuple[tuple[float, float, float, float], ...]


# The estimate that a token followed k times of the n times that its match of some length was
# followed by anything is right again:
#
#     P = 1 / (1 + exp(-(a + b log k + c log(n - k + 1) + d [it followed last])))
#
# with a row (a, b, c, d) for matches from each length on. One table is for the longest match, the
# other for a shorter suffix, where n and P are about tokens that did not follow a longer match.
# Fitted on greedy answers of the demo target to 3,000 prompts: 1,500 of
# the training seeds and 1,500 that it sampled itself, none of an evaluation. On rows kept apart
# estimates of .24, .53, .86 and .97 came true .26, .54, .86 and .98 of the time. After drafted
# tokens the same tables are taken, since the match is longer by them if they are right. There they
# hold up to paths of about .8; likelier ones of several tokens came true less often than they say.
LONGEST = Estimates(
    lengths=(1, 2, 3, 4, 5, 7, 10, 16, 32),
    rows=(
        (-1.20, 1.28, -0.77, 0.10),
        (-0.57, 1.41, -1.31, 0.67),
        (-0.30, 1.34, -1.60, 0.82),
        (-0.36, 1.42, -1.58, 1.14),
        (-0.04, 1.54, -1.94, 1.16),
        (0.34, 1.78, -2.32, 1.20),
        (0.53, 1.69, -2.61, 1.50),
        (0.74, 1.41, -3.61, 2.02),
        (2.04, 0.00, -6.68, 2.80),
    ),
)
SHORTER = Estimates(
    lengths=(1, 2, 3, 5),
    rows=(
        (-2.36, 0.65, -0.10, 0.56),
        (-2.18, 0.97, -0.24, 1.08),
        (-1.75, 0.97, -0.38, 1.19),
        (-1.53, 1.70, -0.72, 1.46),
    ),
)
MAX_LEVELS = 2  # the longest match and a shorter one,
_LEAST_LEFT = 0.25  # which is looked at only if so much probability is left for it
MAX_FOLLOWERS = 4  # of each match, the most frequent


class TextIndex:
    """Indexes the text so far. A place in or after it is the longest suffix that occurred in it."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end of the text."""
        self._automaton.extend(tokens)

    def truncate(self, length: int) -> None:
        """Cuts the text to its first `length` tokens."""
        if length:
            self._automaton.truncate(length)
        else:
            self._automaton = SuffixAutomaton()

    def end(self) -> Match:
        """Returns the place at the end of the text."""
        return self._automaton.suffix()

    def advance(self, place: Match, token: int) -> Match:
        """Returns the place one token further, as if the text went on from `place` with `token`."""
        return self._automaton.advance(place, token)

    def continuations(self, place: Match, least: float = 0.0) -> list[tuple[int, float]]:
        """Returns tokens that followed before, each with the estimated probability that it follows.

        The longest match comes first, then a suffix of it for what it leaves over; tokens whose
        probability is below `least` may be missing. Within a match the most frequent come first,
        of these the newest.
        """
        found: dict[int, float] = {}
        automaton, match, left, table = self._automaton, place, 1.0, LONGEST
        least = max(least, _LEAST_LEFT)
        seen: set[int] | None = None  # tokens that followed a longer match
        for _ in range(MAX_LEVELS):
            if match.length == 0 or left < least:
                break
            followers = automaton.followers(match)
            if seen:
                followers = [each for each in followers if each[2] not in seen]
            row = table.rows[bisect_right(table.lengths, match.length) - 1]
            match = automaton.shorter(match)
            if not followers:
                continue
            total = sum([count for count, _, _ in followers])
            newest = max([last for _, last, _ in followers])
            share = 0.0
            for count, last, token in followers[:MAX_FOLLOWERS]:
                probability = _estimate(row, count, total, last == newest)
                share += probability
                found[token] = left * probability
            left, table = left * max(0.0, 1.0 - share), SHORTER
            seen = (seen or set()).union([token for _, _, token in followers])
        return list(found.items())


def _estimate(
    row: tuple[float, float, float, float], count: int, total: int, is_newest: bool
) -> float:
    constant, by_count, by_others, newest = row
    score = constant + newest if is_newest else constant
    if total > 1:
        score += by_count * math.log(count) + by_others * math.log(total - count + 1)
    return 1.0 / (1.0 + math.exp(-score))
