"""The budget for a machine: what pays, what is predicted, what the race finds, when it falls back.

Time is simulated: each run of a toy graph moves a clock by what a table says.
"""

from __future__ import annotations

import errno
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import Table, paths
from toy_backend import ToyTarget
from toy_bundle import patch_graphs, write_bundle
from toy_engine import make_engine, make_proposer, random_prompt

import spec_runtime
from spec_runtime import cli, machine, profile
from spec_runtime.bundle import manifest as bundle
from spec_runtime.engine import Engine
from spec_runtime.measure import tune
from spec_runtime.measure.curve import (
    Curve,
    grown_points,
    monotone,
    paying_budget,
    static_points,
)
from spec_runtime.profile import PLAIN, Candidate, Costs, Gain, Key, Profile
from spec_runtime.proposers.adaptive import (
    FIRST_REST,
    LARGEST_TRUST,
    LONGEST_REST,
    PROBE_STEPS,
    TRUST_WEIGHT,
    DraftPauser,
    ProbabilityScaler,
    scale_probabilities,
)
from spec_runtime.proposers.base import PlainProposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.stats import Stats
from spec_runtime.step import Step
from spec_runtime.trees import payoff
from spec_runtime.trees.best_first import grow_best_first
from spec_runtime.trees.budget import Budget, Grown, Static
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.grow import cut_to_paying, grow, grow_by_levels
from spec_runtime.trees.guesses import Guesses
from spec_runtime.trees.tree import TokenTree

KEY = Key("0" * 64, "some cpu", 2, "int8", "parallelspec")


@pytest.fixture(autouse=True)
def toy_graphs(monkeypatch: pytest.MonkeyPatch) -> list[ToyTarget]:
    """Returns the targets opened so far; every graph opened is a toy."""
    return patch_graphs(monkeypatch)


def convex(n: int) -> float:
    return 10 + 0.3 * n + 0.02 * n * n


def stepped(n: int) -> float:
    return 10.0 + 4 * (-(-n // 8) - 1)


def random_times(rng: np.random.Generator, size: int) -> tuple[float, ...]:
    """Of any shape, also falling in places."""
    return tuple((rng.uniform(2, 12) + rng.normal(0.4, 0.8, size).cumsum().clip(-1)).tolist())


# ---------------------------------------------------------------------------------- what pays


@pytest.mark.parametrize("seed", range(20))
def test_a_grown_tree_is_the_best_of_all_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probability = np.sort(rng.dirichlet(np.ones(3), 2)[:, :2])[:, ::-1]
    tokens = np.array([[7, 8], [4, 5]])
    step_ms = random_times(rng, 7)
    tree = grow(1, Guesses(tokens, np.log(probability)), Budget(7, growth=Grown(step_ms=step_ms)))
    ranks = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    worth = {
        path: float(np.prod([probability[d, r] for d, r in enumerate(path)])) for path in ranks
    }
    rates = [
        (1 + sum(worth[path] for path in chosen)) / step_ms[len(chosen)]
        for k in range(7)
        for chosen in itertools.combinations(ranks, k)
        if all(len(path) == 1 or path[:1] in chosen for path in chosen)
    ]
    assert len(rates) == 25, "of 64 subsets those with all parents"
    assert tree.log_prob_N is not None
    rate = np.exp(tree.log_prob_N).sum() / step_ms[tree.num_nodes - 1]
    assert rate == pytest.approx(max(rates), rel=1e-9)


def test_times_decide_how_many_nodes() -> None:
    guesses = Guesses(np.array([[7, 8, 9]]), np.log(np.array([[0.5, 0.2, 0.1]])))

    def size(*step_ms: float) -> int:
        return grow(1, guesses, Budget(4, growth=Grown(step_ms=step_ms))).num_nodes

    assert size(10, 10, 10, 10) == 4
    assert size(10, 16, 17, 18) == 1, "half a token for six tenths of a step"
    assert size(10, 12, 15, 15.5) == 2
    assert size(10, 16, 16, 16) == 4, "a step that its first node alone does not pay"
    doubted = Grown(step_ms=(10, 12, 13, 14), reliability=((0.2, 0.02), (0.5, 0.3)))
    assert grow(1, guesses, Budget(4, growth=doubted)).num_nodes == 2
    trusted = replace(doubted, reliability=())
    assert grow(1, guesses, Budget(4, growth=trusted)).num_nodes == 3
    static = Budget(4, growth=Static(((0,), (1,), (2,))))
    assert grow(1, guesses, static).num_nodes == 4, "a static tree stays as it is"


@pytest.mark.parametrize("seed", range(20))
def test_growing_node_by_node_stops_where_no_further_node_can_pay(seed: int) -> None:
    """Against the tree of all nodes, cut afterwards: what stops early has lost nothing by it."""
    rng = np.random.default_rng(seed)
    size = 40
    curve = np.sort(rng.uniform(0, 1, (2, 4))).T.tolist() if seed % 2 else []
    grown = Grown(0.001, random_times(rng, size), 0.3, tuple(tuple(point) for point in curve))
    behind: dict[tuple[int, ...], np.ndarray] = {}
    num_asked = 0

    def children(path: tuple[int, ...], least: float) -> list[tuple[int, float]]:
        nonlocal num_asked
        num_asked += 1
        if path not in behind:
            behind[path] = rng.dirichlet([0.5] * 4)[:3]
        return list(enumerate(behind[path].tolist()))

    def grow_it(growth: Grown) -> TokenTree:
        budget = Budget(size, max_depth=6, growth=growth)
        root: tuple[int, ...] = ()
        return grow_best_first(9, root, children, lambda path, token: (*path, token), budget, 2)

    everything = grow_it(replace(grown, step_ms=()))
    num_all, num_asked = num_asked, 0
    tree, expected = grow_it(grown), cut_to_paying(everything, grown, num_levels=2)
    assert paths(tree) == paths(expected)
    assert num_asked <= num_all
    if seed == 0:
        assert (num_asked, num_all, tree.num_nodes) == (16, 37, 16)


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_run_as_long_as_they_can_pay(seed: int) -> None:
    """Against all numbers of levels: one that stops early has lost nothing by it."""
    rng = np.random.default_rng(seed)
    depth, size, level_ms = 4, 30, float(rng.uniform(0, 2))
    grown = Grown(step_ms=random_times(rng, size), level_ms=level_ms)
    budget = Budget(size, growth=grown)

    def best_rate(num_levels: int) -> tuple[float, TokenTree, int]:
        table = Table(seed)
        tree = grow_by_levels(1, table.expand, budget.within(num_levels), depth, max_width=9)
        everything = table.everything(depth)
        tokens = 1 + sum(np.exp(everything[tuple(path)]) for path in paths(tree))
        run = len(table.levels)
        ms = grown.step_ms[tree.num_nodes - 1] + (run - 1) * level_ms
        return float(tokens / ms), tree, run

    rate, _, num_run = best_rate(depth)
    for num_levels in range(num_run, depth + 1):
        table = Table(seed)
        full = grow_by_levels(1, table.expand, Budget(size, max_depth=num_levels), depth, 9)
        assert full.log_prob_N is not None
        _, hindsight = payoff.best_size(
            np.exp(full.log_prob_N[1:]), grown.step_ms, (num_levels - 1) * level_ms
        )
        assert hindsight <= rate * (1 + 1e-9), (num_levels, num_run)
    free = Budget(size, growth=replace(grown, level_ms=0.0))
    everything = sorted(np.exp(list(Table(seed).everything(2).values())), reverse=True)
    tree = grow_by_levels(1, Table(seed).expand, free, 2, max_width=9)
    _, best = payoff.best_size(np.array(everything), grown.step_ms)
    assert tree.log_prob_N is not None
    got = np.exp(tree.log_prob_N).sum() / grown.step_ms[tree.num_nodes - 1]
    assert got == pytest.approx(best)


def test_dear_levels_are_not_run() -> None:
    step_ms = tuple(10 + 0.1 * n for n in range(1, 31))
    runs = []
    for level_ms in (0.0, 3.0, 50.0):
        table = Table(3)
        budget = Budget(30, growth=Grown(step_ms=step_ms, level_ms=level_ms))
        grow_by_levels(1, table.expand, budget, 4, 9)
        runs.append(len(table.levels))
    assert runs[0] == 4
    assert runs[2] == 1
    assert runs[1] < 4


@pytest.mark.parametrize("seed", range(20))
def test_the_least_probability_leaves_out_only_what_never_pays(seed: int) -> None:
    rng = np.random.default_rng(seed)
    verify = tuple((n, 10 + float(s)) for n, s in enumerate(rng.uniform(0.4, 0.5, 24).cumsum(), 1))
    rows = tuple((p, p * float(rng.uniform(0.3, 1)), 1.0) for p in (0.05, 0.2, 0.5, 0.9))
    curve = Curve("run", ((0.5,),), rows)
    budget = paying_budget(curve, Costs(verify, 1.0, 0.0, 0.5, 11.0, 1.0), 24)
    assert isinstance(budget.growth, Grown)
    assert budget.growth.min_probability > 0
    log_prob_KC = np.log(np.sort(rng.dirichlet(np.ones(9), 3), axis=1)[:, ::-1])
    guesses = Guesses(np.tile(np.arange(9), (3, 1)), log_prob_KC)
    kept = grow(0, guesses, budget)
    unbounded = replace(budget, growth=replace(budget.growth, min_probability=0))
    assert paths(kept) == paths(grow(0, guesses, unbounded))


def test_step_times_are_validated() -> None:
    for bad in (
        {"step_ms": (1.0, 2.0)},
        {"step_ms": (1.0, 0.0, 1.0)},
        {"step_ms": (1.0, 1.0, 1.0), "level_ms": -1.0},
        {"step_ms": (1.0, 1.0, 1.0), "reliability": ((0.5, 0.4), (0.4, 0.5))},
        {"step_ms": (1.0, 1.0, 1.0), "reliability": ((0.4, 0.5), (0.5, 0.4))},
        {"reliability": ((0.4, 0.5), (0.5, 1.4))},
    ):
        with pytest.raises(ValueError, match="expected"):
            Budget(3, growth=Grown(**bad))  # type: ignore[arg-type]


# --------------------------------------------------------------------------- what is predicted


def costs_of(verify: Callable[[int], float], **others: float) -> Costs:
    values = {"draft": 1.0, "level": 0.0, "host": 0.5, "plain": verify(1) + 0.5, "prefill": 1.0}
    return Costs(tuple((n, verify(n)) for n in tune.SIZES), **values | others)


ACCURACY = ((0.6, 0.15, 0.05), (0.5, 0.1, 0.05), (0.4, 0.1, 0.0))


@pytest.mark.parametrize("verify", [convex, stepped])
def test_static_predictions(verify: Callable[[int], float]) -> None:
    curve = Curve("run", ACCURACY)
    points = static_points(curve, costs_of(verify, level=0.25), 12)
    assert [point.nodes for point in points] == list(range(2, 13))
    first, second, third = points[:3]
    assert first.budget == Budget(2, growth=Static(((0,),)))
    assert second.budget.growth == Static(((0,), (0, 0)))
    assert third.accepted_length == pytest.approx(1 + 0.6 + 0.3 + 0.15)
    step_ms = verify(3) + 1.0 + 0.25 + 0.5
    assert second.speedup == pytest.approx(1.9 * (verify(1) + 0.5) / step_ms)
    best = max(points, key=lambda point: point.speedup)
    # beyond a step of verify nothing is won before the next one
    assert (best.nodes == 8) if verify is stepped else (2 < best.nodes < 12)


def test_grown_predictions() -> None:
    rows = ((0.1, 0.05, 2.0), (0.4, 0.3, 1.0), (0.9, 0.8, 0.5))
    points = grown_points(Curve("run", ACCURACY, rows), costs_of(convex, level=0.5), 16)
    assert [point.nodes for point in points] == [1.5, 2.5, 4.5]
    lengths = [point.accepted_length for point in points]
    assert lengths == pytest.approx([1.4, 1.7, 1.8])
    assert [point.budget.max_nodes for point in points] == [16, 16, 16]
    assert [point.budget.growth for point in points] == [Grown(0.6), Grown(0.2), Grown(0.05)]
    ms = np.interp(1.5, tune.SIZES, [convex(n) for n in tune.SIZES]) + 1.0 + 2 * 0.5 + 0.5
    assert points[0].speedup == pytest.approx(1.4 * (convex(1) + 0.5) / ms)
    lookup = Curve("run", by_node=((0.5, 0.2), (0.4, 0.1)))
    points = grown_points(lookup, costs_of(convex), 16)
    assert [point.budget for point in points] == [Budget(2), Budget(3)]
    assert [(p.nodes, p.accepted_length) for p in points] == [(1.5, 1.2), (1.9, pytest.approx(1.3))]


def test_observed_in_a_run() -> None:
    def tree(probabilities: list[float]) -> TokenTree:
        parents = np.array([0, 0, 0, 1])  # 5 has 7 and 8; 7 has 9
        return TokenTree(np.array([5, 7, 8, 9]), parents, np.log(np.array([1.0, *probabilities])))

    sure, unsure = tree([0.9, 0.06, 0.5]), tree([0.5, 0.3, 0.1])
    seen = [(sure, [0, 1, 3])] * 8 + [(unsure, [0, 1])] * 4 + [(unsure, [0, 2])] * 4
    curve = Curve.observed(seen)
    # after 7, which came true twelve times of sixteen, 9 did eight times
    assert np.array(curve.accuracy) == pytest.approx(np.array([[12 / 16, 4 / 16], [8 / 16, 0]]))
    found = {round(p, 3): (hit, count) for p, hit, count in curve.reliability}
    expected = {
        0.9: (1.0, 0.5),
        0.5: (12 / 16, 1.0),  # `sure`'s 9 and `unsure`'s 7
        0.3: (0.5, 0.5),
        0.1: (0.0, 0.5),
        0.06: (0.0, 0.5),
    }
    assert found == expected
    no_match = TokenTree.root(5)
    lookups = [(replace(sure, log_prob_N=None), [0, 1, 3])] * 3 + [(no_match, [0])]
    by_node = Curve.observed(lookups).by_node
    assert by_node == ((0.75, 0.75), (0.75, 0.0), (0.75, 0.75))


def test_monotone_pools_what_is_out_of_order() -> None:
    assert monotone([(0.2, 0.1, 3), (0.1, 0.3, 1)]) == (
        (0.1, pytest.approx(0.15)),
        (0.2, pytest.approx(0.15)),
    )
    rng = np.random.default_rng(0)
    rows = [(p, float(rng.uniform()), float(rng.uniform(0, 5))) for p in rng.uniform(size=30)]
    Grown(step_ms=(1.0,), reliability=monotone([*rows, (0.0, 0.5, 1), (0.5, 0.5, 0)]))


# ----------------------------------------------------------------------------------- the race


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


@dataclass
class Clock:
    """Seconds that pass in graph runs alone."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, backend: Any, ms: Callable[[int], float]) -> None:
        run = backend.run

        def timed(feeds: dict[str, np.ndarray], outputs: list[str]) -> dict[str, np.ndarray]:
            self.now += ms(feeds["input_ids"].shape[1]) / 1000
            return run(feeds, outputs)

        backend.run = timed


def timed_engine(
    clock: Clock, verify: Callable[[int], float], drafter: str = "parallelspec", **toy: Any
) -> Engine:
    engine = make_engine(drafter, scratch=40, **{"peak": 4.0, **toy})
    clock.charge(engine.target._backend, verify)
    if drafter == "parallelspec":
        clock.charge(engine.proposer._rows._backend, lambda n: 1.5)  # type: ignore[attr-defined]
    return engine


PROMPTS = [random_prompt(seed) for seed in range(2)]


@pytest.mark.parametrize("drafter", ["parallelspec", "parallelspec+prompt_lookup", "prompt_lookup"])
@pytest.mark.parametrize("verify", [convex, stepped])
def test_the_choice_is_near_the_best_of_an_exhaustive_sweep(
    clock: Clock, verify: Callable[[int], float], drafter: str
) -> None:
    name, _, lookup = drafter.partition("+")
    # few successors make loops, for lookup to find
    engine = timed_engine(clock, verify, name, num_successors=4, noise=1.0)
    if lookup:
        engine = engine.observed(lambda proposer: MergedProposer(proposer, 4), Budget(8))
    prompts = [random_prompt(seed) for seed in range(4)]  # with two, one step more is 11 per cent
    report = tune.tune(engine, prompts, KEY, max_new_tokens=40)
    costs, choice = report.profile.costs, report.profile.choice
    assert costs.verify == tuple((n, pytest.approx(verify(n))) for n in tune.SIZES if n <= 40)
    assert costs.plain == pytest.approx(verify(1))
    assert costs.draft == pytest.approx(0 if drafter == "prompt_lookup" else 1.5, abs=0.1)
    sizes = (2, 3, 4, 5, 6, 8, 9, 12, 16, 24)
    budgets: dict[str, Budget | None] = {f"grown {n}": Budget(n) for n in sizes}
    if name == "parallelspec":
        for least in (0.02, 0.05, 0.1, 0.2, 0.4):
            budgets[f"least {least}"] = Budget(40, growth=Grown(least))
    budgets[PLAIN] = None
    engines = {name: tune.decoding(engine, budget) for name, budget in budgets.items()}
    stats = tune.race(engines, prompts, 40, num_rounds=1)
    speed = {name: each.tokens_per_second for name, each in stats.items()}
    assert choice.tokens_per_second is not None
    assert choice.sampled_gain is not None
    assert 1 <= choice.sampled_gain.accepted_length < choice.gain.accepted_length
    assert profile.from_json(profile.to_json(report.profile)) == report.profile
    assert choice.tokens_per_second >= 0.95 * max(speed.values()), speed
    assert max(speed.values()) > 1.1 * speed[PLAIN], "otherwise there is nothing to choose"


def test_draws_that_all_end_at_once_have_no_pace(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = tune.race

    def without_steps(*given: Any, **options: Any) -> dict[str, Stats]:
        stats = race(*given, **options)
        return dict.fromkeys(stats, Stats()) if options.get("temperature") else stats

    monkeypatch.setattr(tune, "race", without_steps)
    choice = tune.tune(timed_engine(clock, convex), PROMPTS, KEY, max_new_tokens=20).profile.choice
    assert choice.speedup is not None
    assert choice.sampled_gain is None


def test_grown_trees_are_predicted_with_what_lookup_adds(clock: Clock) -> None:
    """The prediction is within 25 % of what decoding gives, whose last step is cut short, and above
    that of the drafter alone; lookup's nodes take places of the tree, and get none besides."""
    toy: dict[str, Any] = {"num_successors": 4, "noise": 1.0}
    alone = timed_engine(clock, convex, **toy)
    merged = timed_engine(clock, convex, **toy)
    merged = merged.observed(lambda proposer: MergedProposer(proposer, 4), Budget(8))
    dynamic = {}
    for name, engine in (("alone", alone), ("merged", merged)):
        profile = tune.tune(engine, PROMPTS, KEY, max_new_tokens=40, quick=True).profile
        dynamic[name] = next(c for c in profile.candidates if c.name == "dynamic")
        limit = min(engine.target.max_nodes, tune.SIZES[-1])
        assert dynamic[name].budget is not None
        assert dynamic[name].budget.max_nodes == limit  # type: ignore[union-attr]
    budget, predicted = dynamic["merged"].budget, dynamic["merged"].accepted_length
    assert predicted is not None
    stats = tune.race({"run": merged.observed(lambda p: p, budget)}, PROMPTS, 40, num_rounds=1)
    assert predicted == pytest.approx(stats["run"].accepted_length, rel=0.25)
    assert predicted > 1.05 * (dynamic["alone"].accepted_length or 0)


def test_what_sampled_texts_are_worth_is_measured_and_kept(clock: Clock, cache: Path) -> None:
    """Draws at temperature 1 leave the drafter's first guess more often than greedy decoding."""
    engine = timed_engine(clock, convex)
    found = tune.tune(engine, PROMPTS, KEY, max_new_tokens=32, quick=True).profile
    trusts = {
        candidate.budget.growth.sampled_trust
        for candidate in found.candidates
        if candidate.budget is not None and isinstance(candidate.budget.growth, Grown)
        if candidate.budget.growth.reliability
    }
    assert len(trusts) == 1
    assert 1 / LARGEST_TRUST <= trusts.pop() < 0.9
    profile.write(found)
    assert profile.find(KEY) == found


def test_plain_decoding_is_kept_unless_another_is_clearly_faster() -> None:
    plain = Candidate(PLAIN, None, 1.0, 1.0, 50.0, 1.0, 1.0)
    close, clear = Candidate("a", Budget(2), speedup=1.01), Candidate("b", Budget(3), speedup=1.05)
    predicted = Candidate("c", Budget(4), expected_speedup=1.2)
    assert tune.choose([plain, close]) == PLAIN
    assert tune.choose([plain, clear, close]) == "b"
    assert tune.choose([plain, predicted]) == "c"
    # what was measured counts, not what was expected
    assert tune.choose([plain, replace(predicted, speedup=0.9)]) == PLAIN


def test_plain_decoding_wins_where_rows_are_dear(clock: Clock) -> None:
    engine = timed_engine(clock, lambda n: 10.0 * n)
    assert tune.tune(engine, PROMPTS, KEY, quick=True).profile.plain_wins
    report = tune.tune(engine, PROMPTS, KEY, max_new_tokens=32)
    assert report.profile.plain_wins
    assert report.profile.choice == Candidate(PLAIN, None, 1.0, 1.0, 100.0, 1.0, 1.0)


def test_the_bundles_calibration_comes_first(clock: Clock) -> None:
    engine = timed_engine(clock, stepped)
    calibration = {
        "accuracy": [list(row) for row in ACCURACY],
        "reliability": [[0.1, 0.05, 200], [0.4, 0.3, 100], [0.9, 0.8, 50]],
        "positions": 100,
    }
    quick = tune.tune(engine, PROMPTS[:1], KEY, calibration, quick=True).profile
    assert quick.curve == "calibration"
    by_name = {candidate.name: candidate for candidate in quick.candidates}
    static = by_name["static"]
    assert static.budget is not None
    assert static.budget.max_nodes == 8, "up to where verify steps"
    for name in ("paying", "dynamic"):
        budget = by_name[name].budget
        assert budget is not None
        assert isinstance(budget.growth, Grown)
        assert budget.growth.reliability == ((0.1, 0.05), (0.4, 0.3), (0.9, 0.8))
    assert tune.tune(engine, PROMPTS[:1], KEY, None, quick=True).profile.curve == "run"


def test_the_sweep_is_predicted_and_measured(clock: Clock) -> None:
    report = tune.tune(timed_engine(clock, convex), PROMPTS, KEY, quick=True, sweep=True)
    # four guesses, of which the first ones alone are ever right; 5 is not among the sizes
    assert [row["nodes"] for row in report.sweep] == [2, 3, 4]
    for row in report.sweep:
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.2)
    with pytest.raises(ValueError, match="got drafter none"):
        tune.tune(make_engine(), PROMPTS, KEY)


# --------------------------------------------------------------------------------- falling back


class Script:
    """A drafter of chains of three; notes what it is asked for."""

    wants_features = False
    run_seconds = 0.0

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def start(self, prompt: object, features_TF: object, reused: int) -> None:
        pass

    def propose(self, token: int, budget: Budget) -> TokenTree:
        tree = TokenTree.chain([token] if budget.is_root_only else [token, 1, 2, 3])
        self.sizes.append(tree.num_nodes)
        return tree

    def commit(self, step: Step) -> None:
        pass

    def truncate(self, length: int) -> None:
        pass


def play(controller: DraftPauser, lengths: list[int], budget: Budget = Budget(8)) -> None:  # noqa: B008
    """Steps that commit so many tokens each, where something was drafted."""
    for length in lengths:
        tree = controller.propose(0, budget)
        controller.commit(Step([1] * (length if tree.num_nodes > 1 else 1), 0))


# a step with a tree costs 15 ms, a plain one 10: one and a half tokens break even
COSTS = Costs(((1, 9.0), (4, 13.0)), draft=1.0, level=0.0, host=1.0, plain=10.0, prefill=1.0)


def runs_of(sizes: list[int]) -> list[tuple[int, int]]:
    return [(size, len(list(group))) for size, group in itertools.groupby(sizes)]


def test_collapse_rest_probe_and_recovery() -> None:
    script = Script()
    controller = DraftPauser(script, COSTS, Gain(2.25, 1.5))
    # averages begin at 2.25 tokens and 15 ms; w = 15 / 16: 1 + 1.25 w^n < 1.5 from n = 15 on
    play(controller, [1] * 15)
    assert runs_of(script.sizes) == [(4, 15)]
    assert controller.is_resting
    rests = [FIRST_REST * factor for factor in (1, 2, 4, 8, 16, 16)]
    assert rests[-1] == LONGEST_REST
    play(controller, [1] * (sum(rests) + PROBE_STEPS * len(rests)))
    expected = [(4, 15)]
    for rest in rests:
        expected += [(1, rest), (4, PROBE_STEPS)]
    assert runs_of(script.sizes) == expected
    # the text gets easy during the last rest: it stays with the drafter, and forgets the rests
    play(controller, [1] * LONGEST_REST + [2] * 40)
    assert runs_of(script.sizes) == [*expected, (1, LONGEST_REST), (4, 40)]
    play(controller, [1] * 60)
    assert (1, FIRST_REST) in runs_of(script.sizes)[len(expected) + 1 :]
    controller.start([1], None, 0)
    script.sizes.clear()
    play(controller, [1] * 16)
    assert runs_of(script.sizes) == [(4, 15), (1, 1)], "a new generation begins anew"


def test_good_text_is_never_left_and_break_even_counts_as_paying() -> None:
    script = Script()
    play(DraftPauser(script, COSTS, Gain(2.25, 1.5)), [3, 1, 1, 4, 2, 1] * 50)
    assert set(script.sizes) == {4}
    script = Script()
    play(DraftPauser(script, COSTS, Gain(1.5, 1.0)), [1, 2, 2, 1] * 2)
    assert script.sizes[0] == 4
    assert runs_of(script.sizes) == [(4, 1), (1, 7)], "below break-even after the first step"


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
    dear = replace(COSTS, verify=((1, 9.0), (2, 200.0), (4, 200.0)))
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


def test_wrong_guesses_are_given_up_in_exactly_these_steps() -> None:
    """A drafter of another model: nothing is accepted, so that every step is known."""
    engine = make_engine("none", max_length=300, noise=0.0)
    other = ToyTarget(vocab_size=258, capacity=332, seed=5)
    script = make_proposer("parallelspec", other)
    engine = engine.observed(lambda _: DraftPauser(script, COSTS, Gain(2.25, 1.5)), Budget(4))
    sizes = [
        len(step.verified.argmax_N)
        for step in engine.steps(random_prompt(3), max_new_tokens=140, ignore_eos=True)
        if step.verified is not None
    ]
    assert engine.last_result is not None
    assert engine.last_result.stats.accepted_length == 1.0
    assert runs_of(sizes) == [(4, 15), (1, 16), (4, 8), (1, 32), (4, 8), (1, 60)]


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
        (Gain(2.0, 1.6), 0.0, 21),
        (Gain(2.0, 1.6), 1.0, 15),
        (Gain(2.0, 1.6), 2.0, 15),
        (Gain(2.0, 1.6), 0.5, 18),
        (Gain(1.2, 0.9), 1.0, PROBE_STEPS),
        (Gain(1.2, 0.9), 0.01, 21),
        (None, 0.5, PROBE_STEPS),
    ],
)
def test_averages_begin_with_what_tune_saw_at_the_temperature(
    sampled: Gain | None, temperature: float, steps: int
) -> None:
    """After n steps with one token each, of 15 ms, with w = 15 / 16 and plain decoding at 10 ms:
    from 3 tokens in 15.8 ms 1 + 2 w^n < (15 + 0.8 w^n) / 10; from 2 in 12.5 ms, and from the
    averages of both. What did not pay, and what is not known, is tried for as long as a probe."""
    script = Script()
    pauser = DraftPauser(script, COSTS, Gain(3.0, 1.9), sampled)
    budget = sampled_at(temperature) if temperature else Budget(8)
    for _ in range(steps + 5):
        pauser.propose(0, budget)
        pauser.commit(Step([1], num_accepted=0))
    assert runs_of(script.sizes) == [(4, steps), (1, 5)]


def test_a_pace_that_paid_at_no_temperature_is_tried_and_kept_where_it_pays() -> None:
    script = Script()
    pauser = DraftPauser(script, COSTS, Gain(3.0, 1.9), Gain(1.2, 0.9))
    play(pauser, [1, 1, 2, 2, 2, 2, 2, 2] * 5, sampled_at(1.0))
    assert runs_of(script.sizes) == [(4, 40)]


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


# --------------------------------------------------------------------------------- the profile


def some_profile(budget: Budget | None, key: Key = KEY) -> Profile:
    candidates = (
        Candidate(PLAIN, None, 1.0, 1.0, 50.0, 1.0, 1.0),
        Candidate("paying", budget, 5.0, 1.4, 70.0, 1.4, 2.1, Gain(1.6, 1.2)),
    )
    chosen = "paying" if budget is not None else PLAIN
    return Profile(key, COSTS, "run", candidates if budget else candidates[:1], chosen)


PAYING = Budget(4, growth=Grown(0.01, (1.0, 2.0, 3.0, 4.0), 0.5, ((0.5, 0.4),)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specsplit" / "profiles"


def test_a_profile_is_found_by_its_key_alone(cache: Path) -> None:
    stored = some_profile(PAYING)
    path = profile.write(stored)
    assert list(cache.iterdir()) == [path]
    assert profile.find(KEY) == stored
    assert profile.write(some_profile(None)) == path
    assert profile.find(KEY) == some_profile(None)
    others = {"manifest": "1", "cpu": "", "threads": 1, "precision": "fp32", "drafter": "eagle"}
    for name, value in others.items():
        assert profile.find(replace(KEY, **{name: value})) is None, name  # type: ignore[arg-type]


STATIC = Budget(5, max_depth=3, growth=Static(((0,), (0, 0))))


def test_a_static_tree_is_kept_and_an_older_file_is_read(cache: Path) -> None:
    """Files of older versions have two keys that no budget ever filled, and one by another name."""
    for budget in (STATIC, PAYING):
        path = profile.write(some_profile(budget))
        assert profile.find(KEY) == some_profile(budget)
        data = json.loads(path.read_text())
        for candidate in data["candidates"]:
            if candidate["budget"] is not None:
                candidate["sampled_pace"] = candidate.pop("sampled_gain")
                candidate["budget"] |= {"truth": None, "draw": None}
        path.write_text(json.dumps(data))
        assert profile.find(KEY) == some_profile(budget)
    assert data["candidates"][1]["budget"] == {
        "max_nodes": 4,
        "min_probability": 0.01,
        "max_depth": None,
        "paths": None,
        "step_ms": [1.0, 2.0, 3.0, 4.0],
        "level_ms": 0.5,
        "reliability": [[0.5, 0.4]],
        "truth": None,
        "draw": None,
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"chosen": "paying"', '"chosen": "fast"'),
        lambda text: text.replace('"threads": 2', '"threads": 3'),
        lambda text: text.replace('"host"', '"guest"'),
        lambda text: text.replace('"max_nodes": 4', '"max_nodes": 0'),
        lambda text: text.replace('"max_nodes": 4', '"most_nodes": 4'),
        lambda text: text.replace('"budget": null', '"budgets": null'),
        lambda text: text.replace('"budget": null', '"budget": 7'),
        lambda text: text.replace('"candidates": [', '"candidates": [3,'),
        lambda text: text.replace('"plain": 10.0', '"plain": -1.0'),
        lambda text: text.replace('"verify": [', '"verify": [[],', 1),
        lambda text: "\x00\xff",
    ],
)
def test_a_damaged_profile_is_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    path = profile.write(some_profile(PAYING))
    text = path.read_text()
    assert damage(text) != text
    path.write_bytes(damage(text).encode("latin-1"))
    assert profile.find(KEY) is None
    (message,) = caplog.messages
    assert str(path) in message
    assert message.endswith("run spec-runtime tune again")


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU\nstepping\t: 1\n\nmodel name\t: B\n"
    )
    assert machine.cpu_model(file) == "Some CPU 17 1"
    assert machine.cpu_model(tmp_path / "none")


def opened_anew(graphs: list[ToyTarget], folder: Path, **options: Any) -> Engine:
    graphs.clear()  # the next one is a target's
    return spec_runtime.load(folder, **options)


def test_an_engine_is_opened_as_the_profile_says(
    cache: Path,
    tmp_path: Path,
    toy_graphs: list[ToyTarget],
) -> None:
    folder = write_bundle(tmp_path, ("parallelspec",))
    opened = bundle.read(folder, verify=False)
    key = profile.key_of(opened, "parallelspec", 1)
    assert (key.precision, key.threads) == ("fp32", 1)
    untuned = opened_anew(toy_graphs, folder, threads=1)
    expected = untuned.generate("hello", max_new_tokens=30).token_ids
    profile.write(some_profile(PAYING, key))
    tuned = opened_anew(toy_graphs, folder, threads=1)
    assert tuned.budget == PAYING
    assert tuned.is_tuned
    assert isinstance(tuned.proposer, DraftPauser)
    assert tuned.generate("hello", max_new_tokens=30).token_ids == expected
    for other in (
        tuned.with_drafter("prompt_lookup"),
        tuned.with_drafter(None, lookup=True),
        opened_anew(toy_graphs, folder, threads=1, profile=False),
        opened_anew(toy_graphs, folder, threads=2),
    ):
        assert other.budget != PAYING
        assert not other.is_tuned
        assert not isinstance(other.proposer, DraftPauser)
    profile.write(some_profile(None, key))
    plain = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(plain.proposer, PlainProposer)
    result = plain.generate("hello", max_new_tokens=30)
    assert (result.token_ids, result.stats.accepted_length) == (expected, 1.0)
    assert plain.drafter == "parallelspec"
    # whatever the folder's manifest becomes, it is another bundle
    bundle.write_manifest(folder, replace(opened.manifest, name="other"))
    other = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(other.proposer, type(untuned.proposer))


# ---------------------------------------------------------------------------------- the command


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["tune", *map(str, arguments)])
    return int(end.value.code or 0)


def test_the_command_end_to_end(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    toy_graphs: list[ToyTarget],
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",), trees={"lookup_nodes": 3})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abab"}\n{"prompt": "hello"}\n{"prompt": "' + "x" * 99 + '"}\n')
    out, figure = tmp_path / "new" / "out.json", tmp_path / "new" / "figure.svg"
    arguments = ("--bundle", folder, "--prompts", prompts, "--max-new-tokens", 20, "--threads", 1)
    assert command(*arguments, "--json", out) == 0
    captured = capsys.readouterr()
    assert "prompt skipped: got a prompt of" in " ".join(captured.err.split())
    (path,) = cache.iterdir()
    assert str(path) in captured.out
    written = json.loads(out.read_text())["profile"]
    assert written == json.loads(path.read_text())
    names = [candidate["name"] for candidate in written["candidates"]]
    assert names == [PLAIN, "paying", "dynamic", "static", "bundle"]
    for candidate in written["candidates"]:
        assert candidate["tokens_per_second"] > 0
        assert candidate["name"] in captured.out
    chosen = written["chosen"] if written["chosen"] != PLAIN else "plain decoding"
    assert f"Chosen: {chosen}" in captured.out
    assert written["key"]["drafter"] == "parallelspec+prompt_lookup"
    tuned = opened_anew(toy_graphs, folder, threads=1)
    assert isinstance(tuned.proposer, PlainProposer if written["chosen"] == PLAIN else DraftPauser)
    pytest.importorskip("matplotlib")
    toy_graphs.clear()
    assert command(*arguments, "--quick", "--json", out, "--figure", figure) == 0
    assert figure.read_text().startswith("<?xml")
    figures = json.loads(out.read_text())
    assert {"nodes", "predicted", "measured"} == set(figures["sweep"][0])
    assert all(c["tokens_per_second"] is None for c in figures["profile"]["candidates"])
    assert sorted(file.name for file in out.parent.iterdir()) == ["figure.svg", "out.json"]


def test_what_cannot_be_tuned_is_one_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "' + "x" * 99 + '"}\n')
    for arguments, message in (
        (("--figure", "speed.jpeg"), "got figure speed.jpeg, expected a name that ends in .svg"),
        (("--prompts", prompts), "got no prompt that fits the context"),
        (("--drafter", "none", "--prompts", prompts), "got no prompt that fits"),
    ):
        assert command("--bundle", folder, *arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    prompts.write_text('{"prompt": "a"}\n')
    assert command("--bundle", folder, "--drafter", "none", "--prompts", prompts) == 2
    assert "got drafter none, expected one" in capsys.readouterr().err
    assert not cache.exists()


def test_a_full_cache_loses_no_result(
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(profile: Profile) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    monkeypatch.setattr(profile, "write", write)
    out = tmp_path / "out.json"
    arguments = ("--bundle", folder, "--max-new-tokens", 4, "--threads", 1, "--json", out)
    assert command(*arguments, "--quick") == 2
    assert "chosen" in json.loads(out.read_text())["profile"]
    captured = capsys.readouterr()
    assert "Chosen: " in captured.out
    assert "Kept in" not in captured.out
    assert captured.err.splitlines()[-1] == "error: [Errno 28] No space left on device"


def test_what_cannot_be_kept_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    folder = write_bundle(tmp_path / "b", ("parallelspec",))
    monkeypatch.setattr(tune, "tune", lambda *arguments, **options: 1 / 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert command("--bundle", folder) == 2
    assert "Not a directory" in capsys.readouterr().err
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert command("--bundle", folder) == 2
    assert "set XDG_CACHE_HOME to a folder" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    key = profile.key_of(bundle.read(folder, verify=False), "parallelspec", None)
    with profile.reserved(key):
        assert command("--bundle", folder) == 2
    assert "is being written by process" in capsys.readouterr().err.splitlines()[-1]
