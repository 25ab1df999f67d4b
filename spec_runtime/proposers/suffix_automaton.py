"""Indexes all substrings of a growing text, with how often and where last each occurred.

A suffix automaton (Blumer et al. 1985) takes amortised constant time and space a token. Each state
stands for the substrings that end at the same places; its link leads to the longest suffix that
also ends elsewhere. SAM-Decoding drafts by such an automaton, SuffixDecoding by frequencies in a
suffix tree; here the states carry the counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Each token is counted in at most this many states, longest suffix first. Only a text that repeats
# itself without end has more: "a a a a …" would cost time that grows with its square. Its shorter
# substrings are then counted too low.
MAX_COUNTED = 64


class Match(NamedTuple):
    """A suffix of some text that occurs in the automaton's text: its state and its length."""

    state: int
    length: int


NO_MATCH = Match(0, 0)


# A token that followed a substring: how often, after how many tokens of the text last, and itself.
Follower = tuple[int, int, int]


class _Change(NamedTuple):
    """Changes that adding one token made, beyond those that the automaton itself shows."""

    previous: int  # the state of the whole text before
    split: int  # the state that was cloned, or 0 if none was
    lasts: tuple[int, ...]  # `last` of the states that counted the token, before it


class SuffixAutomaton:
    """Holds a text that is extended and cut at its end.

    Example, the text 5 7 5 7 9: the substring (7) was followed by 5 once and by 9 once; the longest
    suffix of 5 7 9 5 that occurs in it is (5), which was followed by 7 twice.
    """

    def __init__(self, max_counted: int = MAX_COUNTED) -> None:
        self._max_counted = max_counted
        # of each state; 0 is the empty substring's
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]  # of its longest substring
        self._count: list[int] = [0]
        self._last: list[int] = [0]
        self._whole = 0  # the state of the whole text
        self._changes: list[_Change] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end of the text."""
        for token in tokens:
            self._add(token)

    def truncate(self, length: int) -> None:
        """Cuts the text to its first `length` tokens, exactly as if no more had been added."""
        while len(self._changes) > length:
            self._remove(self._changes.pop())

    def suffix(self) -> Match:
        """Returns the longest suffix of the text that occurs in it earlier, too."""
        state = self._link[self._whole]
        return Match(state, self._length[state]) if state > 0 else NO_MATCH

    def advance(self, match: Match, token: int) -> Match:
        """Returns the longest suffix of `match` and `token` that occurs in the text."""
        state, length = match
        while token not in self._next[state]:
            if state == 0:
                return NO_MATCH
            state = self._link[state]
            length = self._length[state]
        return Match(self._next[state][token], length + 1)

    def shorter(self, match: Match) -> Match:
        """Returns the longest suffix of `match` that occurs in more places; NO_MATCH at the end."""
        state = max(0, self._link[match.state])
        return Match(state, self._length[state])

    def followers(self, match: Match) -> list[Follower]:
        """Returns the tokens that followed `match`, the most frequent first, of equally frequent
        ones the newest."""
        count, last = self._count, self._last
        next_ = self._next[match.state]
        found = [(count[state], last[state], token) for token, state in next_.items()]
        if len(found) > 1:
            found.sort(reverse=True)
        return found

    def _add(self, token: int) -> None:
        next_, link, length = self._next, self._link, self._length
        previous, whole, split = self._whole, len(next_), 0
        self._new_state({}, 0, length[previous] + 1, 0, 0)
        state = previous
        while state >= 0 and token not in next_[state]:
            next_[state][token] = whole
            state = link[state]
        if state >= 0:
            known = next_[state][token]
            if length[known] == length[state] + 1:
                link[whole] = known
            else:
                split, clone = known, len(next_)
                self._new_state(
                    dict(next_[known]),
                    link[known],
                    length[state] + 1,
                    self._count[known],
                    self._last[known],
                )
                while state >= 0 and next_[state].get(token) == known:
                    next_[state][token] = clone
                    state = link[state]
                link[known] = link[whole] = clone
        self._whole = whole
        self._changes.append(_Change(previous, split, self._counted(whole)))

    def _counted(self, whole: int) -> tuple[int, ...]:
        """Counts the text's end in the states of its suffixes; returns where they were last."""
        link, count, last = self._link, self._count, self._last
        lasts: list[int] = []
        end, state = len(self._changes) + 1, whole
        while state > 0 and len(lasts) < self._max_counted:
            lasts.append(last[state])
            count[state] += 1
            last[state] = end
            state = link[state]
        return tuple(lasts)

    def _remove(self, change: _Change) -> None:
        next_, link = self._next, self._link
        whole, token_state = self._whole, change.previous
        state = whole
        for last in change.lasts:
            self._count[state] -= 1
            self._last[state] = last
            state = link[state]
        token = next(t for t, to in next_[token_state].items() if to == whole)
        state = change.previous
        while state >= 0 and next_[state].get(token) == whole:
            del next_[state][token]
            state = link[state]
        if change.split:
            clone = whole + 1
            while state >= 0 and next_[state].get(token) == clone:
                next_[state][token] = change.split
                state = link[state]
            link[change.split] = link[clone]
        for column in (self._next, self._link, self._length, self._count, self._last):
            del column[whole:]
        self._whole = change.previous

    def _new_state(
        self, next_: dict[int, int], link: int, length: int, count: int, last: int
    ) -> None:
        self._next.append(next_)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._last.append(last)
