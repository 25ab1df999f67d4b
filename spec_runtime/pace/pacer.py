"""Decides in each step of a request how much to draft; docs/architecture/pace.md has the equation.

All of it follows from the committed tokens and the costs, never from a clock, so that a request by
itself gets the same trees again. Requests that share passes have costs that are learnt, see
shared.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.loop.step import Step
from spec_runtime.pace.costs import CERTAIN, Costs, Gain
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree
from spec_runtime.trees.worth import Terms, probabilities

WEIGHT = 1 / 16  # of the newest step in a rate
TRUST_WEIGHT = 1 / 32  # of the newest step in a trust
LARGEST_TRUST = 4.0  # the smallest is its inverse
# Tokens that drafting may lose: at most, at first where it is not known to win any, after a pause.
MOST_CREDIT, FIRST_CREDIT, SMALL_CREDIT = 6.0, 2.0, 1.0
FIRST_PAUSE, LONGEST_PAUSE = 64, 256  # steps; a pause after another is twice as long
FREE = 0.02  # of a plain step: a draft that takes less needs no pause, since trees are cut
CONTEXT_ROWS = 128  # for which costs are taken to be the same


class Trust:
    """Says how many times as often as expected guesses come true: accepted over expected tokens,
    both averaged exponentially, within bounds. It begins at `prior`."""

    def __init__(self, prior: float = 1.0) -> None:
        self._accepted, self._expected = prior, 1.0

    @property
    def value(self) -> float:
        return min(LARGEST_TRUST, max(1 / LARGEST_TRUST, self._accepted / self._expected))

    def add(self, expected: float, num_accepted: int) -> None:
        """Takes in a draft, of which so many tokens were expected to be accepted."""
        self._expected += TRUST_WEIGHT * (expected - self._expected)
        self._accepted += TRUST_WEIGHT * (num_accepted - self._accepted)


class Pause:
    """Lets drafting lose what it has won, and little more: then it pauses, and is tried again.

    The credit is what it may still lose, in tokens. So a text on which drafting wins a little is
    not left for a few unlucky steps.
    """

    def __init__(self, credit: float = FIRST_CREDIT) -> None:
        self.credit = credit
        self.left = 0  # steps of the pause
        self._next = FIRST_PAUSE

    @property
    def is_on(self) -> bool:
        return self.left > 0

    def add(self, won: float) -> None:
        """Takes in a step: how many tokens its draft has won, negative if it has lost some."""
        if self.left:
            self.left -= 1
            self.credit = SMALL_CREDIT
            return
        self.credit = min(MOST_CREDIT, self.credit + won)
        if self.credit >= MOST_CREDIT:
            self._next = FIRST_PAUSE
        elif self.credit < 0:  # longer if it is overdrawn by more than a token
            self.left = round(self._next * max(1.0, -self.credit))
            self._next = min(2 * self._next, LONGEST_PAUSE)


@dataclass(frozen=True)
class Known:
    """Says what is known of drafting before a request: what it gains at temperature 0 and 1, None
    where that is not known, and the trust at temperature 1."""

    gain: Gain | None = None
    sampled_gain: Gain | None = None
    sampled_trust: float = 1.0

    def step_at(self, temperature: float) -> tuple[float, float] | None:
        """Returns the tokens and the plain steps that a step takes; None where it is not known to
        win tokens."""
        share = min(1.0, temperature)
        gains = (self.gain, 1 - share), (self.sampled_gain if share else self.gain, share)
        tokens = plain_steps = 0.0
        for gain, weight in gains:
            if gain is None:
                return None
            tokens += weight * gain.accepted_length
            plain_steps += weight * gain.accepted_length / gain.speedup
        return (tokens, plain_steps) if tokens >= plain_steps else None

    def trust_at(self, temperature: float) -> Trust:
        """Returns the trust to begin with, at temperature 1 and above `sampled_trust`."""
        return Trust(1 + min(1.0, temperature) * (self.sampled_trust - 1))


class Pacer(ProposerWrapper):
    """Has `proposer` draft trees that are cut by their worth, and pauses it where it does not pay.

    The terms of a grown tree are the times of a step at the present length of the context, the
    rate so far, at least that of plain decoding, and the trust. Where a step has lost tokens by the
    costs, it takes from the credit. Prompt lookup that is merged into a drafter's trees goes on
    during a pause: it costs no draft, and finds what the text repeats.

    Without `costs` it does nothing, until the request shares passes with others (`is_shared`):
    whoever runs them then says what a step has won.
    """

    def __init__(
        self, proposer: Proposer, costs: Costs | None = None, known: Known = Known()
    ) -> None:
        super().__init__(proposer)
        self._merged: MergedProposer | None = None  # a drafter with lookup, which never pauses
        if isinstance(proposer, MergedProposer) and proposer.has_drafter:
            self._merged = proposer
        self._costs, self._known = costs, known
        self._tree: TokenTree | None = None  # of the last step, if the drafter ran
        self._reliability: tuple[tuple[float, float], ...] = ()  # of its paths
        self._costs_of: dict[int, Costs] = {}  # by the context's number of CONTEXT_ROWS
        self._step_ms_of: dict[tuple[int, int], np.ndarray] = {}  # and by most nodes
        self.is_shared = False
        self.begins_with: Pause | None = None  # of the next request; None: by what is known
        self._reset(0)

    @property
    def is_paused(self) -> bool:
        """True while the drafter guesses nothing."""
        return self.pause.is_on

    @property
    def has_drafted(self) -> bool:
        """True if the drafter ran in the last step."""
        return self._tree is not None

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        super().start(prompt, features_TF, reused)
        self._reset(len(prompt))

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._tree = None
        if budget.is_root_only or (self._costs is None and not self.is_shared):
            return (yield from super().drafting(token, budget))
        if self._is_first:
            self._begin(0.0 if budget.coupling is None else budget.coupling.temperature)
        budget = self._at_terms(budget)
        if not self.is_paused:
            self._tree = yield from super().drafting(token, budget)
            return self._tree
        if self._merged is None or not isinstance(budget.growth, Grown):
            return (yield from super().drafting(token, budget.within(0)))
        return (yield from self._merged.looking_up(token, budget))

    def commit(self, step: Step) -> None:
        super().commit(step)
        tree = self._tree
        if tree is not None and tree.num_nodes > 1 and tree.log_prob_N is not None:
            if self.is_shared:  # which may have cut it
                tree = tree.first(1 + step.num_drafted)
            expected = float(self._accepted_N(tree).sum())
            self.trust.add(expected, len(tree.follow(step.tokens)))
        if self._costs is not None and not self.is_shared:
            self._judge(self._costs, step)
        self._length += len(step.tokens)

    def worth_N(self, tree: TokenTree) -> np.ndarray:
        """Returns f64[N - 1]: how likely the path to each drafted node is accepted, falling."""
        trusted_N = np.minimum(1.0, self.trust.value * self._accepted_N(tree))
        return np.minimum.accumulate(trusted_N)

    def _accepted_N(self, tree: TokenTree) -> np.ndarray:
        assert tree.log_prob_N is not None, "a tree without probabilities"
        return probabilities(tree.log_prob_N[1:], () if self._merged else self._reliability)

    def _judge(self, costs: Costs, step: Step) -> None:
        """Takes in what a step has won over plain decoding."""
        tree, at_context = self._tree, self._at_context(costs)
        if tree is None:
            self.pause.add(0.0)
            return
        # where nothing was found, or nothing paid, one level has been drafted all the same
        ms = at_context.of(tree.num_nodes, max(1, int(tree.depth_N.max())))
        self._tokens += WEIGHT * (len(step.tokens) - self._tokens)
        self._ms += WEIGHT * (ms - self._ms)
        if tree.log_prob_N is None or costs.draft > FREE * costs.plain:
            self.pause.add(len(step.tokens) - ms / at_context.plain)

    def _at_context(self, costs: Costs) -> Costs:
        number = self._length // CONTEXT_ROWS
        if number not in self._costs_of:
            self._costs_of[number] = costs.at(number * CONTEXT_ROWS)
        return self._costs_of[number]

    def _at_terms(self, budget: Budget) -> Budget:
        """Returns the budget of a grown tree with its terms here."""
        growth, trust = budget.growth, 1.0 if self.is_paused else self.trust.value
        if self._costs is None or not isinstance(growth, Grown):
            return budget
        costs = self._at_context(self._costs)
        key = self._length // CONTEXT_ROWS, budget.max_nodes
        if key not in self._step_ms_of:
            self._step_ms_of[key] = costs.step_ms(budget.max_nodes)
        rate = 1 / costs.plain if self.is_paused else max(1 / costs.plain, self._tokens / self._ms)
        self._reliability = growth.reliability or CERTAIN
        terms = Terms(self._step_ms_of[key], costs.level, rate, trust)
        least = terms.least_probability(self._reliability)
        least = max(growth.min_probability / max(1.0, trust), least)
        return replace(budget, growth=Grown(least, self._reliability, terms))

    def _begin(self, temperature: float) -> None:
        """Sets trust, rate and credit to what is known of drafting at this temperature."""
        self._is_first = False
        known = self._known.step_at(temperature)
        self._tokens, plain_steps = known or (1.0, 1.0)
        self._ms = plain_steps * (self._costs.plain if self._costs else 1.0)
        self.trust = self._known.trust_at(temperature)
        self.pause = self.begins_with or Pause(MOST_CREDIT if known else FIRST_CREDIT)

    def _reset(self, length: int) -> None:
        self._length, self._is_first = length, True
        self._tree, self._reliability = None, ()
        self.trust, self.pause = Trust(), Pause()
