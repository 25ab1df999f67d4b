"""A drafter's tree with lookup's candidates in it: shape, budget, and an unchanged output."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from spec_runtime.loop.proposer import PlainProposer, Proposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.proposers.merged import AGAINST_DRAFTER, AGAINST_LOOKUP, MergedProposer, combined
from spec_runtime.trees.budget import AlongTruth, Budget, Drawn, Grown
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import Draws, TokenTree
from spec_runtime.trees.worth import Terms

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
    assert tree.log_prob_N is not None
    return np.exp(tree.log_prob_N[1:]).tolist()


ONCE = [7, 2, 3, 4, 1, 2]  # 2 was there once, but not behind a 1: about .25 for the 3
LONG = [*range(10, 30), 3, 1, *range(10, 30)]  # 3 behind twenty tokens: about .94


def test_the_likelier_nodes_of_both_get_the_places() -> None:
    drafter = Guesser(t9=0.6, t8=0.1)
    assert merged(drafter, ONCE, Budget(2)).token_N.tolist() == [2, 9]
    assert merged(drafter, ONCE, Budget(3)).token_N.tolist() == [2, 9, 3]
    assert merged(drafter, LONG, Budget(2)).token_N.tolist() == [29, 3]
    assert paths(merged(drafter, ONCE, Budget(8))) >= {(2, 9), (2, 8), (2, 3), (2, 3, 4)}
    tree = merged(drafter, ONCE, Budget(8))
    assert tree.log_prob_N is not None
    assert (np.diff(tree.log_prob_N) <= 0).all()


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
