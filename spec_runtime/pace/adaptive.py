"""Adapts drafting to this machine, and to what came true in this generation.

`DraftPauser` has trees sized by what passes take at the context where they are, falls back to plain
decoding while drafting does not pay, and tries again now and then. It keeps a credit, in plain
steps, of what drafted ones have won by the costs of the machine profile,

    credit  +=  tokens - ms / plain ms,

up to MOST_CREDIT, and pauses once that is overdrawn: drafting may lose what it has won, and little
more. So a text on which it pays by a little is not left for a few unlucky steps. Prompt lookup that
is merged into a drafter's trees goes on during a pause: it costs no draft, and finds what the text
repeats.

`ProbabilityScaler` scales what the profile's reliability says of path probabilities by

    tokens accepted / tokens expected,

averaged in the same way: on texts harder than those of `tune` trees get smaller, on easier ones
larger. Above temperature 0 both begin with what `tune` saw at temperature 1.

Both follow from the committed tokens and the measured costs, never from a clock, so that the same
prompt gets the same trees again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.loop.step import Step
from spec_runtime.pace.profile import Costs, Gain
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees import payoff
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.tree import TokenTree

WEIGHT = 1 / 16  # of the newest step in a DraftPauser's averages
# Plain steps that drafting may lose: at most, at first where it is not known to pay, after a rest.
MOST_CREDIT, FIRST_CREDIT, PROBE_CREDIT = 6.0, 2.0, 1.0
FIRST_REST, LONGEST_REST = 64, 256  # plain steps; a rest after another is twice as long
FREE = 0.02  # of a plain step: a draft that takes less need not rest where trees are sized by cost
CONTEXT_ROWS = 128  # for which costs are taken to be the same
TRUST_WEIGHT = 1 / 32  # of the newest step in a ProbabilityScaler's averages
LARGEST_TRUST = 4.0  # the smallest is its inverse


class DraftPauser(ProposerWrapper):
    """Passes on the trees of `proposer` while drafting pays, and proposes only roots while it does
    not. If prompt lookup is merged into the drafter, lookup goes on during a pause: its nodes cost
    no draft, and as many are proposed as pay.

    `gain` is what drafting is known to be worth at temperature 0 and `sampled_gain` at temperature
    1. If the gain at a generation's temperature is known to pay, the generation begins with all
    credit, otherwise with FIRST_CREDIT. The budget of a grown tree gets two figures: the times of a
    step at the present length of the context, and the rate in tokens per millisecond. The rate is
    an exponential average that begins at the known gain, or at the break-even point.
    """

    def __init__(
        self,
        proposer: Proposer,
        costs: Costs,
        gain: Gain | None = None,
        sampled_gain: Gain | None = None,
    ) -> None:
        super().__init__(proposer)
        self._merged: MergedProposer | None = None  # a drafter with lookup, which never rests
        if isinstance(proposer, MergedProposer) and proposer.has_drafter:
            self._merged = proposer
        self._all_costs = self._costs = costs
        self._gain, self._sampled_gain = gain, sampled_gain
        self._costs_of: dict[int, Costs] = {}  # by the context's number of CONTEXT_ROWS
        self._step_ms_of: dict[tuple[int, int], tuple[float, ...]] = {}  # and by most nodes
        self._length = 0
        self._is_judged = self._is_free = False
        self._is_first = True  # the next tree is the generation's first
        self._rest = 0  # plain steps still to come
        self._credit = 0.0  # plain steps that drafting may still lose
        self._reset()

    @property
    def is_resting(self) -> bool:
        """True while the drafter guesses nothing."""
        return self._rest > 0

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        super().start(prompt, features_TF, reused)
        self._length = len(prompt)
        self._reset()

    def drafting(self, token: int, budget: Budget) -> Drafting:
        self._is_judged = not (self.is_resting or budget.is_root_only)
        budget = self._at_context(budget)
        if self._is_first:
            self._is_first = False
            self._begin_at(0.0 if budget.coupling is None else budget.coupling.temperature)
        if not self.is_resting:
            tree = yield from super().drafting(token, budget)
        elif self._merged is not None and isinstance(budget.growth, Grown):
            priced = Grown(step_ms=self._step_times(budget), rate=1 / self._costs.plain)
            tree = yield from self._merged.looking_up(token, replace(budget, growth=priced))
        else:
            tree = yield from super().drafting(token, budget.within(0))
        if self._is_judged:
            # where nothing was found, or nothing paid, one level has been drafted all the same
            num_levels = max(1, int(tree.depth_N.max()))
            self._step_ms = self._costs.of(tree.num_nodes, num_levels)
        return tree

    def commit(self, step: Step) -> None:
        super().commit(step)
        self._length += len(step.tokens)
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._begin_at_break_even(PROBE_CREDIT)
        elif self._is_judged:
            self._tokens += WEIGHT * (len(step.tokens) - self._tokens)
            self._ms += WEIGHT * (self._step_ms - self._ms)
            won = len(step.tokens) - self._step_ms / self._costs.plain
            self._credit = min(MOST_CREDIT, self._credit + won)
            self._judge()

    def _at_context(self, budget: Budget) -> Budget:
        """Takes the costs of the context, and returns the budget with its step times and the rate
        so far."""
        number, growth = self._length // CONTEXT_ROWS, budget.growth
        if number not in self._costs_of:
            self._costs_of[number] = self._all_costs.at(number * CONTEXT_ROWS)
        self._costs = self._costs_of[number]
        self._is_free = False
        if not isinstance(growth, Grown) or not growth.step_ms:
            return budget
        self._is_free = self._all_costs.draft <= FREE * self._all_costs.plain
        rate = 1 / self._costs.plain
        if not self._is_first:
            rate = max(rate, self._tokens / self._ms)
        return replace(budget, growth=replace(growth, step_ms=self._step_times(budget), rate=rate))

    def _step_times(self, budget: Budget) -> tuple[float, ...]:
        """Returns the times of steps at the context, for as many nodes as the budget has."""
        key = self._length // CONTEXT_ROWS, budget.max_nodes
        if key not in self._step_ms_of:
            self._step_ms_of[key] = self._costs.step_ms(budget.max_nodes)
        return self._step_ms_of[key]

    def _judge(self) -> None:
        """Begins a rest if the credit is overdrawn, a longer one if by more than a plain step."""
        if self._credit >= MOST_CREDIT:
            self._next_rest = FIRST_REST
        elif self._credit < 0 and not self._is_free:
            self._rest = round(self._next_rest * max(1.0, -self._credit))
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)

    def _begin_at(self, temperature: float) -> None:
        """Sets averages and credit to what is known of drafting at this temperature."""
        sampled = self._sampled_gain if temperature else self._gain
        self._begin_at_break_even(FIRST_CREDIT)
        if self._gain is None or sampled is None:
            return
        share, tokens, ms = min(1.0, temperature), 0.0, 0.0
        for gain, weight in ((self._gain, 1 - share), (sampled, share)):
            tokens += weight * gain.accepted_length
            ms += weight * gain.accepted_length * self._costs.plain / gain.speedup
        if tokens * self._costs.plain >= ms:
            self._tokens, self._ms, self._credit = tokens, ms, MOST_CREDIT

    def _begin_at_break_even(self, credit: float) -> None:
        self._tokens, self._ms, self._credit = 1.0, self._costs.plain, credit

    def _reset(self) -> None:
        self._rest, self._next_rest = 0, FIRST_REST
        self._is_judged = self._is_free = False
        self._step_ms = 0.0  # of the tree last proposed
        self._tokens = self._ms = self._credit = 0.0  # the first tree's temperature says
        self._is_first = True


class ProbabilityScaler(ProposerWrapper):
    """Asks `proposer` for trees whose nodes' worth is scaled by `trust`: accepted tokens over
    expected ones.

    Only budgets of grown trees that have a reliability are changed.
    """

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self._tree: TokenTree | None = None  # last proposed, if it is judged
        self._worth = 0.0  # accepted tokens that the profile expects of it
        self._reset()

    @property
    def trust(self) -> float:
        """Accepted over expected tokens, within bounds; 1 at first."""
        return min(LARGEST_TRUST, max(1 / LARGEST_TRUST, self._accepted / self._expected))

    def start(self, prompt: Sequence[int], features_TF: np.ndarray | None, reused: int) -> None:
        super().start(prompt, features_TF, reused)
        self._reset()

    def drafting(self, token: int, budget: Budget) -> Drafting:
        growth = budget.growth
        if not isinstance(growth, Grown) or not growth.reliability or budget.is_root_only:
            self._tree = None
            return (yield from super().drafting(token, budget))
        scaled = replace(budget, growth=growth.trusting(self.trust))
        tree = self._tree = yield from super().drafting(token, scaled)
        assert tree.num_nodes == 1 or tree.log_prob_N is not None, "a tree without probabilities"
        self._worth = 0.0
        if tree.log_prob_N is not None:
            worth_N = payoff.probabilities(tree.log_prob_N[1:], growth.reliability)
            self._worth = float(worth_N.sum())
        return tree

    def commit(self, step: Step) -> None:
        super().commit(step)
        if self._tree is None or not self._worth:
            return
        num_accepted = len(self._tree.follow(step.tokens))
        self._expected += TRUST_WEIGHT * (self._worth - self._expected)
        self._accepted += TRUST_WEIGHT * (num_accepted - self._accepted)

    def _reset(self) -> None:
        self._tree = None
        self._expected = self._accepted = 1.0


def scale_probabilities(proposer: Proposer) -> Proposer:
    """Wraps the drafter in a `ProbabilityScaler`, below prompt lookup where that is merged."""
    if isinstance(proposer, MergedProposer) and proposer.has_drafter:
        return proposer.with_drafter(ProbabilityScaler(proposer.drafter))
    return ProbabilityScaler(proposer)
