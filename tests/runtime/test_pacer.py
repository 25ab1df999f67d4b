"""How much is drafted: when drafting pauses, and how far its guesses are trusted."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_trees import budget_of
from toy_engine import make_engine, random_prompt
from tuning import COSTS

from spec_runtime.loop.proposer import PlainProposer, WithoutRuns
from spec_runtime.loop.step import Step
from spec_runtime.pace.costs import Gain
from spec_runtime.pace.pacer import (
    FIRST_CREDIT,
    FIRST_PAUSE,
    LARGEST_TRUST,
    LONGEST_PAUSE,
    TRUST_WEIGHT,
    Known,
    Pacer,
    Pause,
    Trust,
)
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.grow import grow
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

PAYS = Known(Gain(2.25, 1.5))


class Script(WithoutRuns, ProposerWrapper):
    """A drafter of chains of three; notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(PlainProposer())
        self.sizes: list[int] = []

    def propose(self, token: int, budget: Budget) -> TokenTree:
        tree = TokenTree.chain([token] if budget.is_root_only else [token, 1, 2, 3])
        self.sizes.append(tree.num_nodes)
        return tree


def play(pacer: Pacer, lengths: list[int], budget: Budget = Budget(8)) -> None:  # noqa: B008
    """Steps that commit so many tokens each, where something was drafted."""
    for length in lengths:
        tree = pacer.propose(0, budget)
        pacer.commit(Step([1] * (length if tree.num_nodes > 1 else 1), 0))


def runs_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(size, len(list(group))) for size, group in itertools.groupby(sizes)]


def test_a_pause_and_what_comes_after_it() -> None:
    script = Script()
    pacer = Pacer(script, COSTS, PAYS)
    # a step takes 1.5 plain ones: the credit of 6 is overdrawn after 13 steps of a token each, the
    # 1 after a pause after 3
    pauses = [FIRST_PAUSE, 2 * FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    play(pacer, [1] * 13)
    assert pacer.is_paused
    play(pacer, [1] * (sum(pauses) + 3 * len(pauses)))
    expected = [(4, 13)]
    for pause in pauses:
        expected += [(1, pause), (4, 3)]
    assert runs_of(script.sizes) == expected
    # the text gets easy during the last pause: it stays with the drafter, and forgets the pauses
    play(pacer, [1] * LONGEST_PAUSE + [2] * 40)
    assert runs_of(script.sizes) == [*expected, (1, LONGEST_PAUSE), (4, 40)]
    play(pacer, [1] * (13 + FIRST_PAUSE + 1))
    assert runs_of(script.sizes)[len(expected) + 1 :] == [(4, 53), (1, FIRST_PAUSE), (4, 1)]
    pacer.start([1], None, 0)
    script.sizes.clear()
    play(pacer, [1] * 14)
    assert runs_of(script.sizes) == [(4, 13), (1, 1)], "a new generation begins anew"


def test_good_text_is_never_left_and_unlucky_steps_are_made_up_for() -> None:
    script = Script()
    play(Pacer(script, COSTS, PAYS), [3, 1, 1, 4, 2, 1] * 50)
    assert set(script.sizes) == {4}
    script = Script()
    play(Pacer(script, COSTS), [1] * 4 + [2] * 4 + [1] * 4 + [2] * 40)
    assert set(script.sizes) == {4}, "what was won pays for what is lost"
    script = Script()
    play(Pacer(script, COSTS), [1] * 4 + [2] * 4 + [1] * 6)
    assert runs_of(script.sizes) == [(4, 13), (1, 1)]


def test_lookup_goes_on_while_the_drafter_pauses() -> None:
    """Of a text of ones alone lookup knows the next tokens."""
    script = Script()
    pacer = Pacer(MergedProposer(script, 4), COSTS)
    pacer.start([1] * 20, None, 0)
    budget = Budget(8, growth=Grown(0.01))
    sizes = []
    while not pacer.is_paused:
        pacer.propose(1, budget)
        pacer.commit(Step([1], 0))
    script.sizes.clear()
    for _ in range(FIRST_PAUSE):
        assert pacer.is_paused
        tree = pacer.propose(1, budget)
        assert set(tree.token_N.tolist()) == {1}, "the drafter's tokens are others, too"
        sizes.append(tree.num_nodes)
        pacer.commit(Step([1], 0))
    assert not pacer.is_paused
    assert script.sizes == [1] * FIRST_PAUSE
    assert min(sizes) > 1
    dear = replace(COSTS, verify=((1, 9.0), (2, 90.0), (8, 900.0)))
    pacer = Pacer(MergedProposer(script, 4), dear)
    pacer.start([1] * 20, None, 0)
    for _ in range(FIRST_PAUSE // 2):
        tree = pacer.propose(1, budget)
        pacer.commit(Step([1], 0))
    assert pacer.is_paused
    assert tree.num_nodes == 1, "nodes that do not pay are left out"
    flat = budget_of([(0,)])
    assert pacer.propose(1, flat).num_nodes == 1, "ranks say nothing of a match"


def test_root_only_budgets_are_not_judged() -> None:
    script = Script()
    pacer = Pacer(script, COSTS, PAYS)
    play(pacer, [1] * 100, Budget(8, max_depth=0))
    assert not pacer.is_paused
    play(pacer, [1] * 15)
    assert pacer.is_paused


@pytest.mark.parametrize("drafter", ["parallelspec", "lookahead"])
@pytest.mark.parametrize("form", ["slots", "contiguous"])
def test_a_collapse_on_the_toy_engine_changes_no_token(drafter: str, form: str) -> None:
    """The costs say that one accepted token never pays: pauses and drafts alternate."""
    plain = make_engine(max_length=300, form=form, num_successors=8)
    dear = replace(COSTS, verify=((1, 9.0), (2, 22.0), (4, 22.0)))
    engine = make_engine(drafter, max_length=300, form=form, num_successors=8)
    engine = engine.observed(lambda proposer: Pacer(proposer, dear, Known(Gain(2.0, 1.01))))
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
        pauses = [i for i, (size, count) in enumerate(runs) if size == 1 and count >= FIRST_PAUSE]
        assert pauses, runs
        assert pauses[0] < len(runs) - 1, "it tries again"


class Guesser(Script):
    """Grows trees from the same candidates at each step: chains of 7 at .5 a token, 8 at .25."""

    def __init__(self) -> None:
        super().__init__()
        self.growths: list[Grown] = []

    def propose(self, token: int, budget: Budget) -> TokenTree:
        assert isinstance(budget.growth, Grown)
        self.growths.append(budget.growth)
        guesses = Guesses(np.array([[7, 8]] * 4), np.log([[0.5, 0.25]] * 4))
        tree = grow(token, guesses, budget)
        self.sizes.append(tree.num_nodes)
        return tree


# a node more costs 1 ms on 10, so that it has to be accepted in every tenth step at the least; the
# drafter runs for nothing, so that no pause comes in between
TEN = replace(COSTS, verify=((1, 9.0), (16, 24.0)), draft=0.0, host=1.0)


def committed(pacer: Pacer, *tokens: int, budget: Budget = Budget(8)) -> TokenTree:  # noqa: B008
    tree = pacer.propose(0, budget)
    pacer.commit(Step([*tokens, 9], len(tokens)))
    return tree


def test_trees_shrink_where_less_is_accepted_than_expected_and_grow_where_more() -> None:
    script = Guesser()
    pacer = Pacer(script, TEN)
    tree = committed(pacer)
    assert sorted(tree.token_N.tolist()) == [0, 7, 7, 7, 7, 8, 8]
    # expected .5 + .25 + .25 + .125 + .125 + .125, accepted nothing
    expected = 1 + TRUST_WEIGHT * (1.375 - 1)
    assert pacer.trust.value == pytest.approx((1 - TRUST_WEIGHT) / expected)
    for _ in range(30):
        committed(pacer)
    assert script.sizes[-1] < 5
    for _ in range(300):
        committed(pacer)
    assert pacer.trust.value == 1 / LARGEST_TRUST, "so that it can come back"
    pacer.start([1], None, 0)
    assert committed(pacer, 7).num_nodes == 7, "a new generation begins anew"
    for _ in range(100):
        committed(pacer, 7, 7, 7, 7, budget=Budget(16, growth=Grown(0.2)))
    assert script.growths[-1].min_probability < 0.2, "what pays now may be less likely"
    assert 1 < pacer.trust.value <= LARGEST_TRUST


def test_a_trust_is_bounded_and_averaged() -> None:
    trust = Trust()
    trust.add(2.0, 1)
    assert trust.value == pytest.approx(1 / (1 + TRUST_WEIGHT))
    for _ in range(500):
        trust.add(1.0, 9)
    assert trust.value == LARGEST_TRUST
    assert Known(sampled_trust=0.5).trust_at(0.5).value == 0.75
    assert Known(sampled_trust=0.5).trust_at(2.0).value == 0.5


def test_texts_at_a_higher_temperature_begin_with_their_own_trust() -> None:
    sizes = []
    for temperature in (0.0, 1.0):
        script = Guesser()
        pacer = Pacer(script, TEN, Known(sampled_trust=0.25))
        pacer.propose(0, sampled_at(temperature) if temperature else Budget(8))
        sizes.append(script.growths[-1].terms.trust)  # type: ignore[union-attr]
    assert sizes == [1.0, 0.25]


def test_guesses_are_trusted_as_far_as_their_reliability() -> None:
    script = Guesser()
    pacer = Pacer(script, TEN)
    budget = Budget(8, growth=Grown(reliability=((0.5, 0.15), (1.0, 0.5))))
    tree = committed(pacer, budget=budget)
    assert tree.token_N.tolist() == [0, 7], "at .5 a node is accepted in .15 of steps"
    assert pacer.trust.value == pytest.approx((1 - TRUST_WEIGHT) / (1 + TRUST_WEIGHT * (0.15 - 1)))
    assert pacer.worth_N(tree) == pytest.approx([pacer.trust.value * 0.15])


def test_a_losing_text_is_weighed_at_the_rate_of_plain_decoding() -> None:
    script = Guesser()
    pacer = Pacer(script, COSTS)
    committed(pacer)  # one token, in more time than a plain step's
    pacer.propose(0, Budget(8))
    assert script.growths[-1].terms is not None
    assert script.growths[-1].terms.rate == 1 / COSTS.plain


def test_a_drafter_that_finds_nothing_has_run_a_level() -> None:
    class Nothing(Script):
        def propose(self, token: int, budget: Budget) -> TokenTree:
            return TokenTree.root(token)

    pacer = Pacer(Nothing(), replace(COSTS, level=4.0))
    play(pacer, [1])
    assert pacer.pause.credit == pytest.approx(FIRST_CREDIT + 1 - 11 / 10)


def test_only_nodes_that_a_shared_pass_had_count_in_the_trust() -> None:
    pacer = Pacer(Guesser())
    pacer.is_shared = True
    assert pacer.propose(0, Budget(8)).num_nodes > 2
    pacer.commit(Step([9], 0, num_drafted=1))
    assert pacer.trust.value == pytest.approx((1 - TRUST_WEIGHT) / (1 + TRUST_WEIGHT * (0.5 - 1)))


def test_without_costs_nothing_is_changed() -> None:
    script = Guesser()
    pacer, budget = Pacer(script), Budget(8, growth=Grown(0.02))
    for _ in range(100):
        committed(pacer, budget=budget)
    assert all(growth is budget.growth for growth in script.growths)
    assert (pacer.trust.value, pacer.is_paused) == (1.0, False)


@pytest.mark.parametrize("growth", [Static(((0,), (1,))), Grown(0.02)])
def test_a_root_and_a_static_tree_are_asked_for_as_they_are(growth: Static | Grown) -> None:
    noted: list[Budget] = []

    class Noting(Script):
        def propose(self, token: int, budget: Budget) -> TokenTree:
            noted.append(budget)
            return super().propose(token, budget)

    budget = Budget(4, growth=growth, max_depth=None if isinstance(growth, Static) else 0)
    pacer = Pacer(Noting(), COSTS)
    pacer.propose(0, budget)
    assert noted == [budget]


def test_what_a_text_has_shown_is_forgotten_at_the_next_one() -> None:
    """Trust, credit, pause, rate and context."""
    script = Guesser()
    pacer, fresh = Pacer(script, COSTS, PAYS), Pacer(Guesser(), COSTS, PAYS)
    pacer.start([1] * 900, None, 0)
    for _ in range(60):
        committed(pacer)
    assert pacer.is_paused
    assert pacer.trust.value < 1
    for each in (pacer, fresh):
        each.start([1], None, 0)
        assert not each.is_paused
        each.propose(0, Budget(8))
    assert repr(pacer.trust.__dict__) == repr(fresh.trust.__dict__)
    assert pacer.pause.__dict__ == fresh.pause.__dict__
    terms, expected = (each._proposer.growths[-1].terms for each in (pacer, fresh))  # type: ignore[attr-defined]
    assert (terms.rate, terms.trust, [*terms.step_ms]) == (
        expected.rate,
        expected.trust,
        [*expected.step_ms],
    )


def test_the_drafter_is_told_of_every_step_also_during_a_pause() -> None:
    told: list[Step] = []

    class Told(Script):
        def commit(self, step: Step) -> None:
            told.append(step)

    script = Told()
    for proposer in (script, MergedProposer(script, 4)):
        told.clear()
        pacer = Pacer(proposer, COSTS)
        pacer.start([1, 2], None, 0)
        steps = [Step([1], 0) for _ in range(20)]
        for step in steps:
            pacer.propose(0, Budget(8))
            pacer.commit(step)
        assert pacer.is_paused
        assert told == steps


def test_a_pause_ends_only_after_its_steps() -> None:
    pause = Pause(0.0)
    pause.add(-2.5)
    assert pause.left == round(2.5 * FIRST_PAUSE), "longer where it lost more"
    while pause.is_on:
        pause.add(9.0)
    assert pause.credit == 1.0
    pause.add(-1.5)
    assert pause.left == 2 * FIRST_PAUSE, "and longer after another"


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
    pacer = Pacer(script, COSTS, Known(Gain(3.0, 1.9), sampled))
    budget = sampled_at(temperature) if temperature else Budget(8)
    for _ in range(steps + 5):
        pacer.propose(0, budget)
        pacer.commit(Step([1], num_accepted=0))
    assert runs_of(script.sizes) == [(4, steps), (1, 5)]
