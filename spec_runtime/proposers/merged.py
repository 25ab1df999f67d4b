"""Drafts by prompt lookup, what followed the end of the text earlier in this very text: without a
drafter, or merged into a drafter's trees.

The two fail differently: the drafter knows the language, lookup knows this text. Lookup needs no
model and no features, only an index of the text, which is extended token by token.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from spec_runtime.backends import beside
from spec_runtime.loop.proposer import Drafting, PlainProposer, Proposer
from spec_runtime.loop.step import Step
from spec_runtime.proposers.suffix_automaton import Match
from spec_runtime.proposers.text_index import TextIndex
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.best_first import grow_best_first
from spec_runtime.trees.budget import AlongTruth, Budget, Grown
from spec_runtime.trees.grow import merge
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import probabilities

# The last nodes of a static tree are about so likely; lookup takes their places, so that its own
# have to be likelier.
_LEAST_SHARED = 0.1
# How much what one source gives to other tokens speaks against a guess of the other (`combined`).
# No other pair of a grid of tenths and fifths has less cross entropy on 7,746 places of the
# demo's greedy answers to 220 prompts that the drafter did not learn from and that belong to no
# evaluation: 0.855 a place, where the larger of both probabilities has 0.925.
AGAINST_DRAFTER, AGAINST_LOOKUP = 0.8, 1.4
# A node of the drafter's tree, None outside of it; its place in the text; its depth.
_Place = tuple[int | None, Match, int]


class MergedProposer(ProposerWrapper):
    """Lets the nodes of a drafter's tree and those of prompt lookup compete for the places of one
    tree, by the estimated probabilities of their paths.

    Over `PlainProposer` this is prompt lookup by itself. It drafts the likeliest continuations of
    the longest suffix that occurred before, and of its own suffixes. Example with the text
    "a b c d a b" and root "b": the 3-gram "d a b" is new, the 2-gram "a b" was followed by
    "c d a b", so the tree is the root with that chain. Of a growth that is not `Grown`, only the
    size counts: a rank says nothing about a match.

    Lookup also continues the paths of the drafter. Where the two disagree both are less often
    right, so that a token's probability follows from both (`combined`). A static tree has no
    probabilities: there lookup gets at most `lookup_nodes` nodes, before the drafter's. Drawn trees
    stay as they were drawn.
    """

    def __init__(self, drafter: Proposer, lookup_nodes: int = 0) -> None:
        super().__init__(drafter)
        self.has_drafter = not isinstance(drafter, PlainProposer)
        assert (lookup_nodes > 0) == self.has_drafter, (drafter, lookup_nodes)
        self.lookup_nodes = lookup_nodes
        self._index = TextIndex()
        self._unindexed: list[int] = []  # the newest tokens

    @property
    def drafter(self) -> Proposer:
        """The proposer without lookup."""
        return self._proposer

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        super().start(prompt, features_TF, reused)
        self._unindexed += prompt[reused:]

    def drafting(self, token: int, budget: Budget) -> Drafting:
        if not self.has_drafter:
            return self._found(token, budget)
        self._unindexed.append(token)
        drafted = yield from beside(super().drafting(token, budget), self._extend_index)
        if drafted.draws or isinstance(budget.growth, AlongTruth):
            return drafted
        if drafted.log_prob_N is None and drafted.num_nodes > 1:
            return self._shared(drafted, budget)
        growth = budget.growth if isinstance(budget.growth, Grown) else Grown()
        return self._competing(drafted, budget, growth)

    def looking_up(self, token: int, budget: Budget) -> Drafting:
        """Drafts as `drafting` does while the drafter pauses: by lookup alone."""
        yield from super().drafting(token, budget.within(0))
        return self._found(token, budget)

    def commit(self, step: Step) -> None:
        super().commit(step)
        # the root came with `drafting`, the last token will come with the next one
        self._unindexed += step.tokens[:-1]

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._extend_index()
        self._index.truncate(length)

    def _extend_index(self) -> None:
        self._index.extend(self._unindexed)
        self._unindexed.clear()

    def _found(self, token: int, budget: Budget) -> TokenTree:
        """Returns the likeliest continuations of the text after this token."""
        self._unindexed.append(token)
        self._extend_index()
        index = self._index
        return grow_best_first(token, index.end(), index.continuations, index.advance, budget)

    def _shared(self, drafted: TokenTree, budget: Budget) -> TokenTree:
        """Returns lookup's share of nodes and then as much of a static tree as fits."""
        index = self._index
        num_nodes = min(self.lookup_nodes + 1, budget.max_nodes)
        share = Budget(num_nodes, budget.max_depth, Grown(_LEAST_SHARED))
        root_token = int(drafted.token_N[0])
        found = grow_best_first(root_token, index.end(), index.continuations, index.advance, share)
        return merge(found, drafted, budget.max_nodes)

    def _competing(self, drafted: TokenTree, budget: Budget, growth: Grown) -> TokenTree:
        """Returns the likeliest nodes of both, as many as are worth their time.

        The drafter's probabilities count as much as its reliability says.
        """
        index = self._index
        log_prob_N = np.zeros(1) if drafted.log_prob_N is None else drafted.log_prob_N
        points = growth.reliability
        accepted = [1.0, *probabilities(log_prob_N[1:], points).tolist()]
        coupling = budget.coupling
        floor = float(probabilities([growth.log_floor], points)[0])

        def children(place: _Place, least: float) -> Iterable[tuple[int, float]]:
            node, here, depth = place
            if coupling is None:
                found = dict(index.continuations(here, least))
            else:
                found = dict(coupling.probabilities(depth + 1, index.continuations(here)))
            return combined(guessed_below(drafted, accepted, node), found).items()

        def enter(place: _Place, token: int) -> _Place:
            node, here, depth = place
            child = None if node is None else drafted.child(node, token)
            return child, index.advance(here, token), depth + 1

        root: _Place = (0, index.end(), 0)
        # the reliability is in the probabilities already, and they have been coupled
        budget = replace(budget, growth=Grown(floor, terms=growth.terms), coupling=None)
        num_levels = max(1, int(drafted.depth_N.max()))
        return grow_best_first(int(drafted.token_N[0]), root, children, enter, budget, num_levels)


def guessed_below(
    drafted: TokenTree, accepted: Sequence[float], node: int | None
) -> dict[int, float]:
    """Returns the probability of each token that a drafter's tree has after `node`; nothing where
    `node` is None, outside of the tree. `accepted` is the probability of each node's path."""
    if node is None or not accepted[node]:
        return {}
    return {int(drafted.token_N[c]): accepted[c] / accepted[node] for c in drafted.children(node)}


def combined(guessed: Mapping[int, float], found: Mapping[int, float]) -> Mapping[int, float]:
    """Returns the probability of each token that a drafter guessed or lookup found.

    With the drafter's probability d of a token and D of all its others, lookup's l and L, and the
    numbers a = AGAINST_DRAFTER and b = AGAINST_LOOKUP,

        d' = d max(0, 1 - a L)
        l' = l / (l + (1 - l) exp(b D))
        p  = 1 - (1 - d') (1 - l').

    What one source gives to other tokens speaks against a guess of the other, but little against a
    match that is nearly certain; the rest of both counts as independent evidence. Example: the
    drafter says "the" with .6, lookup "a" with .5: "the" has .6 · (1 - .8 · .5) = .36 and "a"
    .5 / (.5 + .5 · exp(1.4 · .6)) = .30.
    """
    if not guessed or not found:
        return guessed or found
    all_guessed, all_found = sum(guessed.values()), sum(found.values())
    probability = {}
    for token in {**found, **guessed}:
        d, of_lookup = guessed.get(token, 0.0), found.get(token, 0.0)
        own = d * max(0.0, 1.0 - AGAINST_DRAFTER * (all_found - of_lookup))
        odds = of_lookup * math.exp(-AGAINST_LOOKUP * (all_guessed - d))
        other = odds / (odds + 1.0 - of_lookup) if odds else 0.0
        probability[token] = 1.0 - (1.0 - own) * (1.0 - other)
    return probability
