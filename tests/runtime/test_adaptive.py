"""Drafting that adapts: when it pauses, and how it scales what the profile expects."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_engine import make_engine, random_prompt
from tuning import COSTS

from spec_runtime.loop.proposer import PlainProposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.pace.adaptive import (
    FIRST_REST,
    LARGEST_TRUST,
    LONGEST_REST,
    TRUST_WEIGHT,
    DraftPauser,
    ProbabilityScaler,
    scale_probabilities,
)
from spec_runtime.pace.profile import Gain
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree


class Script(WithoutRuns, ProposerWrapper):
    """A drafter of chains of three; notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(PlainProposer())
        self.sizes: list[int] = []

    def propose(self, token: int, budget: Budget) -> TokenTree:
        tree = TokenTree.chain([token] if budget.is_root_only else [token, 1, 2, 3])
        self.sizes.append(tree.num_nodes)
        return tree


def play(controller: DraftPauser, lengths: list[int], budget: Budget = Budget(8)) -> None:  # noqa: B008
    """Steps that commit so many tokens each, where something was drafted."""
    for length in lengths:
        tree = controller.propose(0, budget)
        controller.commit(Step([1] * (length if tree.num_nodes > 1 else 1), 0))


def runs_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(size, len(list(group))) for size, group in itertools.groupby(sizes)]


def test_collapse_rest_probe_and_recovery() -> None:
    script = Script()
    controller = DraftPauser(script, COSTS, Gain(2.25, 1.5))
    # a step takes 1.5 plain ones: the credit of 6 is overdrawn after 13 steps of a token each, the
    # 1 of a probe after 3
    rests = [FIRST_REST, 2 * FIRST_REST, LONGEST_REST, LONGEST_REST]
    play(controller, [1] * 13)
    assert controller.is_resting
    play(controller, [1] * (sum(rests) + 3 * len(rests)))
    expected = [(4, 13)]
    for rest in rests:
        expected += [(1, rest), (4, 3)]
    assert runs_of(script.sizes) == expected
    # the text gets easy during the last rest: it stays with the drafter, and forgets the rests
    play(controller, [1] * LONGEST_REST + [2] * 40)
    assert runs_of(script.sizes) == [*expected, (1, LONGEST_REST), (4, 40)]
    play(controller, [1] * (13 + FIRST_REST + 1))
    assert runs_of(script.sizes)[len(expected) + 1 :] == [(4, 53), (1, FIRST_REST), (4, 1)]
    controller.start([1], None, 0)
    script.sizes.clear()
    play(controller, [1] * 14)
    assert runs_of(script.sizes) == [(4, 13), (1, 1)], "a new generation begins anew"


def test_good_text_is_never_left_and_unlucky_steps_are_made_up_for() -> None:
    script = Script()
    play(DraftPauser(script, COSTS, Gain(2.25, 1.5)), [3, 1, 1, 4, 2, 1] * 50)
    assert set(script.sizes) == {4}
    script = Script()
    play(DraftPauser(script, COSTS), [1] * 4 + [2] * 4 + [1] * 4 + [2] * 40)
    assert set(script.sizes) == {4}, "what was won pays for what is lost"
    script = Script()
    play(DraftPauser(script, COSTS), [1] * 4 + [2] * 4 + [1] * 6)
    assert runs_of(script.sizes) == [(4, 13), (1, 1)]


def test_lookup_goes_on_while_the_drafter_rests() -> None:
    """Of a text of ones alone lookup knows the next tokens."""
    script = Script()
    controller = DraftPauser(MergedProposer(script, 4), COSTS)
    controller.start([1] * 20, None, 0)
    budget = Budget(8, growth=Grown(0.01))
    sizes = []
    while not controller.is_resting:
        controller.propose(1, budget)
        controller.commit(Step([1], 0))
    script.sizes.clear()
    for _ in range(FIRST_REST):
        assert controller.is_resting
        tree = controller.propose(1, budget)
        assert set(tree.token_N.tolist()) == {1}, "the drafter's tokens are others, too"
        sizes.append(tree.num_nodes)
        controller.commit(Step([1], 0))
    assert not controller.is_resting
    assert script.sizes == [1] * FIRST_REST
    assert min(sizes) > 1
    dear = replace(COSTS, verify=((1, 9.0), (2, 90.0), (8, 900.0)))
    controller = DraftPauser(MergedProposer(script, 4), dear)
    controller.start([1] * 20, None, 0)
    for _ in range(FIRST_REST // 2):
        tree = controller.propose(1, budget)
        controller.commit(Step([1], 0))
    assert controller.is_resting
    assert tree.num_nodes == 1, "nodes that do not pay are left out"
    static = Budget.static([(0,)])
    assert controller.propose(1, static).num_nodes == 1, "ranks say nothing of a match"


def test_root_only_budgets_are_not_judged() -> None:
    script = Script()
    controller = DraftPauser(script, COSTS, Gain(2.25, 1.5))
    play(controller, [1] * 100, Budget(8, max_depth=0))
    assert not controller.is_resting
    play(controller, [1] * 15)
    assert controller.is_resting


@pytest.mark.parametrize("drafter", ["parallelspec", "lookahead", "prompt_lookup"])
@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_a_collapse_on_the_toy_engine_changes_no_token(drafter: str, form: str) -> None:
    """The costs say that one accepted token never pays: rests and probes alternate."""
    plain = make_engine(max_length=300, form=form, num_successors=8)
    dear = replace(COSTS, verify=((1, 9.0), (2, 22.0), (4, 22.0)))
    engine = make_engine(drafter, max_length=300, form=form, num_successors=8)
    engine = engine.observed(lambda proposer: DraftPauser(proposer, dear, Gain(2.0, 1.01)))
    options: dict[str, Any] = {"max_new_tokens": 160, "temperature": 0.5, "seed": 1}
    for prompt in (random_prompt(1), random_prompt(2)):
        expected = plain.generate(prompt, ignore_eos=True, **options).token_ids
        sizes = [
            len(step.verified.argmax_N)
            for step in engine.steps(prompt, ignore_eos=True, **options)
            if step.verified is not None
        ]
        assert engine.last_result is not None
        assert engine.last_result.token_ids == expected
        runs = runs_of([min(size, 2) for size in sizes])
        rests = [i for i, (size, count) in enumerate(runs) if size == 1 and count >= FIRST_REST]
        assert rests, runs
        assert rests[0] < len(runs) - 1, "it tries again"


class Guesser(Script):
    """Grows trees from the same candidates at each step: chains of 7 at .5 a token, 8 at .25."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[Budget] = []

    def least_probability(self) -> float:
        growth = self.budgets[-1].growth
        assert isinstance(growth, Grown)
        return growth.min_probability

    def propose(self, token: int, budget: Budget) -> TokenTree:
        self.budgets.append(budget)
        guesses = Guesses(np.array([[7, 8]] * 4), np.log([[0.5, 0.25]] * 4))
        tree = grow(token, guesses, budget)
        self.sizes.append(tree.num_nodes)
        return tree


# a node more costs 1 ms on 10: of these candidates (.5, .25, .25, .125 …) three pay
MARGINAL = Budget(
    8,
    growth=Grown(
        0.02, step_ms=tuple(10.0 + n for n in range(8)), reliability=((0.5, 0.5), (1.0, 1.0))
    ),
)


def committed(proposer: ProbabilityScaler, budget: Budget, *tokens: int) -> TokenTree:
    tree = proposer.propose(0, budget)
    proposer.commit(Step([*tokens, 9], len(tokens)))
    return tree


def test_trees_shrink_where_less_is_accepted_than_expected_and_grow_where_more() -> None:
    script = Guesser()
    proposer = ProbabilityScaler(script)
    tree = committed(proposer, MARGINAL)
    assert tree.token_N.tolist() == [0, 7, 8, 7]
    assert script.budgets == [MARGINAL]
    # expected .5 + .25 + .25, accepted nothing
    assert proposer.trust == pytest.approx(1 - TRUST_WEIGHT)
    for _ in range(30):
        committed(proposer, MARGINAL)
    assert script.sizes[-1] == 2
    for _ in range(300):
        committed(proposer, MARGINAL)
    assert proposer.trust == 1 / LARGEST_TRUST, "so that it can come back"
    proposer.start([1], None, 0)
    assert committed(proposer, MARGINAL, 7).num_nodes == 4, "a new generation begins anew"
    assert proposer.trust == 1.0
    committed(proposer, MARGINAL, 7, 7)  # two accepted, one expected
    assert proposer.trust == pytest.approx(1 + TRUST_WEIGHT)
    for _ in range(100):
        committed(proposer, MARGINAL, 7, 7, 7, 7)
    assert script.sizes[-1] > 4
    assert script.least_probability() < 0.02, "what pays now may be less likely"
    assert 1 < proposer.trust <= LARGEST_TRUST


def test_a_least_probability_is_that_of_the_worth() -> None:
    """What the drafter says is worth half here, and `tune` found .1 to pay."""
    script = Guesser()
    proposer = ProbabilityScaler(script)
    budget = Budget(64, growth=Grown(0.1, reliability=((0.5, 0.25), (1.0, 0.5))))
    committed(proposer, budget, 7)
    # .5 .25 .25 .125 and so on: 6 nodes of at least .1, worth half of 1.375
    assert script.sizes == [7]
    expected = 1 + TRUST_WEIGHT * (1.375 / 2 - 1)
    assert proposer.trust == pytest.approx(1 / expected)
    for _ in range(20):
        committed(proposer, budget)
    assert 0.125 < script.least_probability() < 0.25
    assert script.sizes[-1] == 4
    for _ in range(100):
        committed(proposer, budget, 7, 7, 7, 7)
    assert script.least_probability() < 0.05
    assert script.sizes[-1] > 7
    for _ in range(300):
        committed(proposer, budget)
    assert script.least_probability() == 0.4


def test_budgets_are_trusted_less_at_a_higher_temperature() -> None:
    growth = replace(MARGINAL.growth, sampled_trust=0.25)  # type: ignore[arg-type]
    budget = replace(MARGINAL, growth=growth)
    assert budget.at(0.0) is budget
    assert MARGINAL.at(1.0) is MARGINAL
    seen = {t: budget.at(t).growth for t in (0.4, 1.0, 2.0)}
    points = {t: each.reliability for t, each in seen.items() if isinstance(each, Grown)}
    assert points[0.4] == ((0.5, pytest.approx(0.35)), (1.0, pytest.approx(0.7)))
    assert points[1.0] == points[2.0] == ((0.5, 0.125), (1.0, 0.25))
    # a quarter as likely: the best guess alone pays
    sizes = [Guesser().propose(0, each).num_nodes for each in (budget, budget.at(1.0))]
    assert sizes == [4, 2]
    # half as likely: a worth of .1 takes twice the probability
    least = Budget(8, growth=Grown(0.1, reliability=((1.0, 1.0),), sampled_trust=0.5)).at(1.0)
    assert least.growth == Grown(0.2, reliability=((1.0, 0.5),), sampled_trust=0.5)
    for budget in (STATIC, Budget(3), Budget(3, growth=Grown(sampled_trust=0.5))):
        assert budget.at(1.0) is budget


def sampled_at(temperature: float) -> Budget:
    coupling = Coupling(lambda position, ids: np.zeros(ids.shape), temperature)
    return Budget(8, coupling=coupling)


@pytest.mark.parametrize(
    ("sampled", "temperature", "steps"),
    [
        (Gain(2.0, 1.6), 0.0, 13),
        (Gain(2.0, 1.6), 1.0, 13),
        (Gain(2.0, 1.6), 2.0, 13),
        (Gain(1.2, 0.9), 1.0, 5),
        (Gain(1.2, 0.9), 0.95, 5),  # 1.29 tokens in 13.5 ms, and plain decoding takes 10
        (Gain(1.2, 0.9), 0.9, 13),  # 1.38 tokens in 13.6 ms
        (None, 0.5, 5),
    ],
)
def test_what_may_be_lost_at_first_is_what_tune_saw_at_the_temperature(
    sampled: Gain | None, temperature: float, steps: int
) -> None:
    """Steps with one token each lose half a plain step: 13 of them where drafting is known to pay,
    5 where it does not, or nothing is known."""
    script = Script()
    pauser = DraftPauser(script, COSTS, Gain(3.0, 1.9), sampled)
    budget = sampled_at(temperature) if temperature else Budget(8)
    for _ in range(steps + 5):
        pauser.propose(0, budget)
        pauser.commit(Step([1], num_accepted=0))
    assert runs_of(script.sizes) == [(4, steps), (1, 5)]


def test_the_accepted_path_is_that_of_the_drafters_own_tree() -> None:
    """Prompt lookup's tokens say nothing about the drafter, whoever was asked first."""
    proposer = ProbabilityScaler(Guesser())
    committed(proposer, MARGINAL, 3, 7, 7)  # lookup's path
    assert proposer.trust == pytest.approx(1 - TRUST_WEIGHT)
    proposer.start([1], None, 0)
    committed(proposer, MARGINAL, 8, 8)  # the drafter's 8, then lookup's
    assert proposer.trust == 1.0


@pytest.mark.parametrize(
    "budget",
    [
        Budget(8, growth=Grown(0.02)),
        Budget(4, growth=Static(((0,), (1,)))),
        replace(MARGINAL, max_depth=0),
    ],
)
def test_budgets_without_reliability_pass_as_they_are(budget: Budget) -> None:
    script = Guesser()
    proposer = ProbabilityScaler(script)
    for _ in range(3):
        committed(proposer, budget)
    assert all(seen is budget for seen in script.budgets)
    assert proposer.trust == 1.0


def test_the_drafter_is_corrected_inside_merged_trees() -> None:
    drafter = Guesser()
    merged = scale_probabilities(MergedProposer(drafter, 3))
    assert isinstance(merged, MergedProposer)
    assert merged.lookup_nodes == 3
    assert isinstance(merged.drafter, ProbabilityScaler)
    assert isinstance(scale_probabilities(drafter), ProbabilityScaler)


STATIC = Budget(5, max_depth=3, growth=Static(((0,), (0, 0))))
