"""Prompt lookup: what it drafts, within its budget, and that its index follows the tokens."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import known

from spec_runtime.loop.proposer import PlainProposer, Proposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.proposers.merged import AGAINST_DRAFTER, AGAINST_LOOKUP, MergedProposer, combined
from spec_runtime.proposers.suffix_automaton import NO_MATCH, Match, SuffixAutomaton
from spec_runtime.proposers.text_index import LONGEST, SHORTER, Estimates, TextIndex
from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import Draws, TokenTree
from spec_runtime.trees.worth import Terms


def lookup() -> MergedProposer:
    return MergedProposer(PlainProposer())


def drafted(tree: TokenTree) -> list[str]:
    """The leaves, as text from below the root."""
    leaves = [i for i in range(tree.num_nodes) if not tree.children(i) and i]
    return ["".join(map(chr, tree.token_N[tree.path(i)[1:]])) for i in leaves]


def propose(text: str, budget: Budget) -> TokenTree:
    """The tree after this text, whose last character is the root."""
    proposer = lookup()
    proposer.start([ord(c) for c in text[:-1]], None, 0)
    return proposer.propose(ord(text[-1]), budget)


@pytest.mark.parametrize(
    ("text", "budget", "expected"),
    [
        ("abcx.cy.abc", Budget(3), ["x."]),  # the longest n-gram wins over the newer "cy"
        ("bcx.abc", Budget(4), ["x.a"]),  # a shorter one, where longer ones are new
        ("cx.abc", Budget(4), ["x.a"]),
        ("abcdefg", Budget(12), []),
        ("a", Budget(12), []),
        ("abababab", Budget(12), ["ab" * 5 + "a"]),  # a running repetition
        ("abcdefgh.abc", Budget(12, max_depth=2), ["de"]),
        ("abcdefgh.abc", Budget(12, max_depth=0), []),
    ],
)
def test_what_followed_the_end_of_the_text(text: str, budget: Budget, expected: list[str]) -> None:
    assert drafted(propose(text, budget)) == expected


def test_several_matches_share_the_tree_and_their_beginnings() -> None:
    # the most frequent first: "12", then "9"; behind "12" the newest first
    tree = propose(".ab9,;ab12x:!ab12y?-ab", Budget(20, max_depth=3))
    assert {"12x", "12y", "9,;"} <= set(drafted(tree))
    first, second = tree.children(0)[:2]
    assert [chr(tree.token_N[node]) for node in (first, second)] == ["1", "9"]
    behind = tree.children(tree.children(first)[0])
    assert [chr(tree.token_N[node]) for node in behind] == ["y", "x"]


def test_nodes_come_by_falling_probability_and_end_where_the_budget_says() -> None:
    text = ".ab9..ab12x..ab12y..ab"
    tree = propose(text, Budget(20))
    assert (np.diff(known(tree.log_prob_N)) <= 0).all()
    likely = propose(text, Budget(20, growth=Grown(0.1)))
    assert likely.num_nodes == (known(tree.log_prob_N) >= np.log(0.1)).sum() < tree.num_nodes
    assert (likely.token_N == tree.token_N[: likely.num_nodes]).all()
    dear = Grown(terms=Terms([10.0 * n for n in range(1, 21)]))
    assert propose(text, Budget(20, growth=dear)).num_nodes == 1


@pytest.mark.parametrize("max_nodes", range(1, 14))
def test_budget_counts_the_root(max_nodes: int) -> None:
    tree = propose(".ab9..ab12x..ab12y..ab", Budget(max_nodes))
    assert tree.num_nodes <= max_nodes
    if max_nodes >= 2:
        assert tree.num_nodes > 1


@pytest.mark.parametrize("seed", range(10))
def test_index_after_commits_and_truncation_is_that_of_the_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposer, text = lookup(), rng.integers(0, 3, 10).tolist()
    proposer.start(text, None, 0)
    for _ in range(60):
        root = int(rng.integers(0, 3))
        tree = proposer.propose(root, Budget(12))
        fresh = lookup()
        fresh.start(text, None, 0)
        again = fresh.propose(root, Budget(12))
        assert (tree.token_N == again.token_N).all()
        assert (tree.parent_N == again.parent_N).all()
        tokens = rng.integers(0, 3, int(rng.integers(1, 5))).tolist()
        proposer.commit(Step(tokens, num_accepted=len(tokens) - 1))
        text = [*text, root, *tokens[:-1]]
        if rng.random() < 0.2:
            length = int(rng.integers(0, len(text) + 1))
            proposer.truncate(length)
            text = text[:length] + rng.integers(0, 3, 4).tolist()
            proposer.start(text, None, length)


def test_two_tokens_left_over_from_an_interrupted_step_go_with_truncate_zero() -> None:
    proposer = lookup()
    proposer.start([1, 2, 3], None, 0)
    proposer.propose(4, Budget(5))  # never committed
    proposer.truncate(0)
    proposer.start([7, 8, 7], None, 0)
    assert proposer.propose(8, Budget(5)).token_N.tolist() == [8, 7, 8, 7, 8]


# ---- the suffix automaton, against a search through the text ----


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
def test_suffixes_and_followers_are_those_of_a_search(edits: list[tuple[float, list[int]]]) -> None:
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


# ---- a drafter's tree with lookup's candidates in it: shape, budget, and an unchanged output ----


DRAWS = Draws(np.array([9]), np.ones(1), (0,), with_replacement=True)


class Fixed(WithoutRuns):
    """A drafter that always guesses the same chain, and notes what it is told."""

    wants_features = True
    run_seconds = 2.5

    def __init__(self, *guesses: int) -> None:
        self.guesses, self.calls = guesses, list[str]()

    def start(self, prompt: object, features_TF: object, reused: int) -> None:
        self.calls.append("start")

    def propose(self, token: int, budget: Budget) -> TokenTree:
        return TokenTree.chain([token, *self.guesses][: budget.max_nodes])

    def commit(self, step: Step) -> None:
        self.calls.append("commit")

    def truncate(self, length: int) -> None:
        self.calls.append("truncate")


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_N[tree.path(node)].tolist()) for node in range(tree.num_nodes)}


@pytest.mark.parametrize(
    ("max_nodes", "expected"),
    [
        # after "1 2" came 3 4 1; the drafter says 3 9
        (8, {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 1), (2, 3, 9)}),
        (4, {(2,), (2, 3), (2, 3, 4), (2, 3, 4, 1)}),
        (2, {(2,), (2, 3)}),
        (1, {(2,)}),
    ],
)
def test_both_drafts_are_in_the_tree_once(max_nodes: int, expected: set[tuple[int, ...]]) -> None:
    proposer = MergedProposer(Fixed(3, 9), lookup_nodes=3)
    proposer.start([1, 2, 3, 4, 1], None, 0)
    assert paths(proposer.propose(2, Budget(max_nodes))) == expected
    assert proposer.run_seconds == 2.5
    assert proposer.wants_features


class Guesser(Fixed):
    """A drafter of one level, whose guesses have these probabilities."""

    def __init__(self, **probabilities: float) -> None:
        super().__init__()
        self.probabilities = {int(name[1:]): p for name, p in probabilities.items()}

    def propose(self, token: int, budget: Budget) -> TokenTree:
        best = sorted(self.probabilities.items(), key=lambda item: -item[1])
        best = best[: budget.max_nodes - 1]
        tokens = np.array([token, *(guess for guess, _ in best)])
        log_probs = np.log([1.0, *(p for _, p in best)])
        return TokenTree(tokens, np.zeros(len(tokens), np.int64), log_probs)


def merged(drafter: Proposer, text: list[int], budget: Budget) -> TokenTree:
    proposer = MergedProposer(drafter, lookup_nodes=1)
    proposer.start(text[:-1], None, 0)
    return proposer.propose(text[-1], budget)


def probabilities(tree: TokenTree) -> list[float]:
    """Returns the probability of the path to each node below the root."""
    return np.exp(known(tree.log_prob_N)[1:]).tolist()


ONCE = [7, 2, 3, 4, 1, 2]  # 2 was there once, but not behind a 1: about .25 for the 3
LONG = [*range(10, 30), 3, 1, *range(10, 30)]  # 3 behind twenty tokens: about .94


def test_the_likelier_nodes_of_both_get_the_places() -> None:
    drafter = Guesser(t9=0.6, t8=0.1)
    assert merged(drafter, ONCE, Budget(2)).token_N.tolist() == [2, 9]
    assert merged(drafter, ONCE, Budget(3)).token_N.tolist() == [2, 9, 3]
    assert merged(drafter, LONG, Budget(2)).token_N.tolist() == [29, 3]
    assert paths(merged(drafter, ONCE, Budget(8))) >= {(2, 9), (2, 8), (2, 3), (2, 3, 4)}
    tree = merged(drafter, ONCE, Budget(8))
    assert (np.diff(known(tree.log_prob_N)) <= 0).all()


def test_agreement_counts_for_a_token_and_what_the_other_says_against_it() -> None:
    alone = MergedProposer(PlainProposer())
    alone.start(ONCE[:-1], None, 0)
    (found,) = probabilities(alone.propose(2, Budget(2)))
    for own in (0.05, 0.9):
        tree = merged(Guesser(t3=own), ONCE, Budget(2))
        assert tree.token_N.tolist() == [2, 3]
        assert probabilities(tree) == pytest.approx([1 - (1 - own) * (1 - found)])
    tree = merged(Guesser(t9=0.5, t8=0.2), ONCE, Budget(4))
    assert tree.token_N.tolist() == [2, 9, 8, 3]
    kept = 1 - AGAINST_DRAFTER * found
    looked_up = found / (found + (1 - found) * math.exp(AGAINST_LOOKUP * 0.7))
    assert probabilities(tree) == pytest.approx([0.5 * kept, 0.2 * kept, looked_up])


class AskedDepths(Coupling):
    """Notes the depth at which each token was looked at, and changes nothing."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]]
        object.__setattr__(self, "seen", set())  # it is frozen

    def probabilities(
        self, depth: int, found: Iterable[tuple[int, float]]
    ) -> list[tuple[int, float]]:
        found = list(found)
        self.seen.update((depth, token) for token, _ in found)
        return found


def test_lookups_tokens_are_coupled_with_the_noise_of_their_depth() -> None:
    coupling = AskedDepths()
    merged(Guesser(t29=0.1), LONG, Budget(4, coupling=coupling))
    assert coupling.seen == {(1, 3), (2, 1), (3, 10)}


def test_nothing_speaks_against_the_only_source() -> None:
    only = {3: 0.6, 4: 0.3}
    assert combined(only, {}) == combined({}, only) == only


def test_more_than_all_on_other_tokens_leaves_a_guess_nothing() -> None:
    """Lookup's estimates of several tokens are made one by one, and may sum to more than 1."""
    found = combined({5: 0.9}, {6: 0.8, 7: 0.7, 8: 0.0})
    assert found[5] == found[8] == 0.0
    assert found[6] == pytest.approx(0.8 / (0.8 + 0.2 * math.exp(AGAINST_LOOKUP * 0.9)))
    assert combined({5: 0.9}, {6: 1.0})[6] == pytest.approx(1.0)


def test_lookup_goes_on_behind_the_drafters_nodes() -> None:
    text = [1, 5, 6, 4, 3]  # nothing followed 3 yet
    assert merged(Guesser(t5=0.9), text, Budget(3)).token_N.tolist() == [3, 5, 6]


def test_the_drafters_probabilities_count_as_its_reliability_says() -> None:
    overrated = Grown(reliability=((0.6, 0.1), (1.0, 0.2)))
    assert merged(Guesser(t9=0.6), ONCE, Budget(2)).token_N.tolist() == [2, 9]
    assert merged(Guesser(t9=0.6), ONCE, Budget(2, growth=overrated)).token_N.tolist() == [2, 3]


def test_the_merged_tree_is_cut_where_it_does_not_pay() -> None:
    # the second node costs as much as half a root: .6 pays, .25 more does not
    growth = Grown(terms=Terms((10.0, 12.0, 17.0, 22.0)))
    assert merged(Guesser(t9=0.6), ONCE, Budget(4, growth=growth)).token_N.tolist() == [2, 9]
    growth = Grown(min_probability=0.3)
    assert merged(Guesser(t9=0.6), ONCE, Budget(4, growth=growth)).token_N.tolist() == [2, 9]


def test_drawn_trees_and_known_continuations_stay_the_drafters() -> None:
    for growth in (AlongTruth((9,)), Drawn((1,), 1.0, True, np.random.default_rng(0))):
        draws = {} if isinstance(growth, AlongTruth) else {0: DRAWS}
        drawn = TokenTree(np.array([2, 9]), np.zeros(2, np.int64), draws=draws)
        drafter = Fixed()
        drafter.propose = lambda token, budget, drawn=drawn: drawn  # type: ignore[method-assign,misc]
        assert merged(drafter, ONCE, Budget(8, growth=growth)) is drawn


def test_both_are_told_of_every_step() -> None:
    drafter = Fixed(9)
    proposer = MergedProposer(drafter, lookup_nodes=4)
    proposer.start([1, 2, 3], None, 0)
    proposer.propose(1, Budget(8))
    proposer.commit(Step([2, 5], 1, [0, 1], np.zeros((2, 1), np.float32)))
    # the text is now 1 2 3 1 2, and 5 is the root
    assert drafter.calls == ["start", "commit"]
    proposer.truncate(4)
    assert paths(proposer.propose(2, Budget(8))) == {
        (2,),
        (2, 3),
        (2, 3, 1),
        (2, 3, 1, 2),
        (2, 3, 1, 2, 3),
        (2, 9),
    }
    proposer.truncate(0)
    assert drafter.calls == ["start", "commit", "truncate", "truncate"]
