"""The suffix automaton against a search through the text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_runtime.proposers.suffix_automaton import NO_MATCH, Match, SuffixAutomaton
from spec_runtime.proposers.text_index import LONGEST, SHORTER, Estimates, TextIndex

# few different tokens, so that much comes again; each edit cuts the text and then extends it
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.integers(0, 2), max_size=8)), min_size=1, max_size=8
)


def edited(automaton: SuffixAutomaton, edits: list[tuple[float, list[int]]]) -> list[int]:
    text: list[int] = []
    for kept, tokens in edits:
        length = round(kept * len(text))
        automaton.truncate(length)
        automaton.extend(tokens)
        text = text[:length] + tokens
    return text


def ends(text: list[int], part: list[int]) -> list[int]:
    """Where `part` ends in the text."""
    n = len(part)
    return [end for end in range(n, len(text) + 1) if text[end - n : end] == part]


def followers(text: list[int], part: list[int]) -> list[tuple[int, int, int]]:
    found = []
    for token in set(text):
        if places := ends(text, [*part, token]):
            found.append((len(places), places[-1], token))
    return sorted(found, reverse=True)


@given(EDITS)
@settings(max_examples=150, deadline=None)
def test_suffixes_and_followers_are_those_of_a_search(
    edits: list[tuple[float, list[int]]],
) -> None:
    automaton = SuffixAutomaton(max_counted=1000)
    text = edited(automaton, edits)
    match = automaton.suffix()
    again = [n for n in range(1, len(text)) if len(ends(text, text[-n:])) > 1]
    assert match.length == max(again, default=0)
    while match.length:
        part = text[len(text) - match.length :]
        assert automaton.followers(match) == followers(text, part)
        shorter = automaton.shorter(match)
        places = len(ends(text, part))
        more = [n for n in range(1, match.length) if len(ends(text, part[-n:])) > places]
        assert shorter.length == max(more, default=0)
        match = shorter


@given(EDITS, st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=100, deadline=None)
def test_another_text_is_followed(edits: list[tuple[float, list[int]]], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    text = edited(automaton, edits)
    match = NO_MATCH
    for end, token in enumerate(other, 1):
        match = automaton.advance(match, token)
        known = [n for n in range(1, end + 1) if ends(text, other[end - n : end])]
        assert match.length == max(known, default=0)


@given(EDITS, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_cut_leaves_nothing_behind(edits: list[tuple[float, list[int]]], counted: int) -> None:
    automaton, fresh = SuffixAutomaton(counted), SuffixAutomaton(counted)
    fresh.extend(edited(automaton, edits))
    assert vars(automaton) == vars(fresh)


def estimate(table: Estimates, length: int, count: int, total: int, is_newest: bool) -> float:
    """As the formula says that stands at the tables."""
    a, b, c, d = table.rows[sum(least <= length for least in table.lengths) - 1]
    score = a + b * math.log(count) + c * math.log(total - count + 1) + d * is_newest
    return 1 / (1 + math.exp(-score))


@given(EDITS)
@settings(max_examples=150, deadline=None)
def test_two_matches_share_the_probability(edits: list[tuple[float, list[int]]]) -> None:
    """The longest match has the first table; a shorter one the other, for tokens that followed no
    longer one, of what is left."""
    index = TextIndex()
    text: list[int] = []
    for kept, tokens in edits:
        text = text[: round(kept * len(text))]
        index.truncate(len(text))
        index.extend(tokens)
        text += tokens
    expected: dict[int, float] = {}
    left, places, table = 1.0, 1, LONGEST
    for length in range(len(text) - 1, 0, -1):
        part = text[len(text) - length :]
        if len(ends(text, part)) == places or left < 0.25:
            continue
        places = len(ends(text, part))
        found = [each for each in followers(text, part) if each[2] not in expected]
        total, newest = sum(each[0] for each in found), max((each[1] for each in found), default=0)
        of_match = {
            token: estimate(table, length, count, total, last == newest)
            for count, last, token in found
        }
        expected |= {token: left * probability for token, probability in of_match.items()}
        left *= max(0.0, 1 - sum(of_match.values()))
        if table is SHORTER:
            break
        table = SHORTER
    assert dict(index.continuations(index.end())) == pytest.approx(expected)


def test_a_token_is_counted_in_dozens_of_substrings() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([5] * 60)
    assert automaton.followers(automaton.advance(NO_MATCH, 5)) == [(59, 60, 5)]


def test_an_endless_repetition_is_counted_up_to_the_limit() -> None:
    automaton = SuffixAutomaton(max_counted=8)
    automaton.extend([5] * 300)
    assert automaton.suffix().length == 299
    match = automaton.suffix()
    assert automaton.followers(match) == [(1, 300, 5)]
    assert len(automaton._changes[-1].lasts) == 8
    automaton.truncate(0)
    assert automaton.suffix() == NO_MATCH == Match(0, 0)
