"""Finds the trees that are fastest on this machine: measures the times, predicts the speed-ups from
recorded trees, and lets the best race plain decoding."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.loop.proposer import PlainProposer
from spec_runtime.loop.stats import Stats
from spec_runtime.pace.costs import CERTAIN, Costs, Gain, PassCosts
from spec_runtime.pace.measured import (
    Recorder,
    costs_of,
    draft_ms,
    measure_passes,
    record,
    without_lookup,
)
from spec_runtime.pace.pacer import LARGEST_TRUST, Pacer
from spec_runtime.pace.profile import PLAIN, Candidate, Key, Profile, Trees
from spec_runtime.pace.reliability import Points, monotone, observed, replayed
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.trees.budget import Budget, Grown
from spec_runtime.trees.worth import probabilities

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
VERIFY_SECONDS = 5.0  # for each of two contexts
RECORD_NODES, DRAFT_NODES, DRAFT_TOKENS, DRAFT_DEPTHS = 48, 16, 32, 5
CLEARLY_FASTER = 1.02  # than plain decoding; what is closer may be chance
RACE_ROUNDS, RACE_SECONDS = 2, 60.0  # a new round only within this time
STEP_TOKENS, STEP_OVERHEAD = 2.0, 1.3  # to forecast: tokens of a step, its time over its pass's

# Few and short prompts of several kinds: explaining, listing, reckoning, repeating, code, a story.
PROMPTS = (
    "Why does ice float on water? Answer in a short paragraph.",
    "List six things to check before a long bicycle tour, one per line.",
    "A shop sells pens at 3 for 2 euros. What do 21 pens cost? Show the steps.",
    "Correct the spelling and repeat the text: 'The libary opens at nine oclock on weekdays and at "
    "ten oclock on saturdays. The libary is closed on sundays.'",
    "Write a Python function that returns the second largest number of a list.",
    "Begin a story about a lighthouse keeper who finds a letter in a bottle.",
)


def decoding(engine: Engine, candidate: Candidate, costs: Costs) -> Engine:
    """Returns `engine` as a profile with this choice has it."""
    if candidate.trees is None:
        return engine.observed(lambda _: PlainProposer(), Budget(1))
    budget = candidate.trees.budget()
    return engine.observed(lambda proposer: Pacer(proposer, costs, candidate.known), budget)


def race(
    engines: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    num_rounds: int = RACE_ROUNDS,
    on_run: Callable[[], None] = lambda: None,
    temperature: float = 0.0,
) -> dict[str, Stats]:
    """Returns each engine's total over the prompts; they take turns whose order rotates.

    A further round begins only within RACE_SECONDS. `on_run` is called after each generation.
    Above temperature 0 each prompt has a seed of its own.
    """
    parts: dict[str, list[Stats]] = {name: [] for name in engines}
    names, begin = list(engines), time.perf_counter()
    for turn in range(num_rounds):
        if turn and time.perf_counter() - begin > RACE_SECONDS:
            break
        for i, prompt in enumerate(prompts):
            first = (turn + i) % len(names)
            for name in names[first:] + names[:first]:
                result = engines[name].generate(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    reuse=False,
                    temperature=temperature,
                    seed=i,
                )
                parts[name].append(result.stats)
                on_run()
    return {name: Stats.total(stats) for name, stats in parts.items()}


def tune(
    engine: Engine,
    prompts: Sequence[list[int]],
    key: Key,
    calibration: dict[str, Any] | None = None,
    *,
    max_new_tokens: int = 64,
    quick: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_forecast: Callable[[float], None] = lambda seconds: None,
) -> Profile:
    """Returns the profile of `engine`'s drafter (loaded without a profile), from `prompts`, each a
    list of token ids.

    `calibration`: the bundle's, see DrafterInfo. `quick`: no race, the predictions decide.
    `on_forecast` gets the seconds that all will still
    take, once the target's passes are measured. Raises UserError for an engine that has no trees to
    tune, and for prompts that the target answers with nothing.
    """
    require_trees(engine)
    target, proposer = engine.target, engine.proposer
    lookup_nodes = proposer.lookup_nodes if isinstance(proposer, MergedProposer) else 0
    limit = min(SIZES[-1], target.max_nodes)
    sizes = sorted({n for n in (*SIZES, engine.budget.max_nodes) if n <= target.max_nodes})

    on_stage("verify")
    longest = max(prompts, key=len)
    passes = measure_passes(target, longest, sizes, engine.wants, VERIFY_SECONDS)
    num_nodes = RECORD_NODES if calibration is None else DRAFT_NODES
    num_tokens = len(prompts) * max_new_tokens
    on_forecast(_forecast(passes[0], num_nodes, num_tokens, bool(lookup_nodes), quick))

    on_stage("trees of the drafter")
    unmerged = engine.observed(without_lookup)
    recorder, run = record(unmerged, Budget(min(num_nodes, limit)), prompts, max_new_tokens)
    if not run.steps:
        raise UserError("got prompts that the target answers with nothing; give others")
    points = observed(recorder.seen)
    if calibration is not None:
        points = monotone(tuple(row) for row in calibration["reliability"])
    trust, bundles_trust = 1.0, 1.0
    if points and target.strict_gap is None:
        on_stage("trees at temperature 1")
        budget = Budget(min(DRAFT_NODES, limit), growth=Grown(reliability=points))
        sampled, _ = record(unmerged, budget, prompts, max_new_tokens, temperature=1.0)
        trust, bundles_trust = _sampled_trust(sampled, points), _sampled_trust(sampled, CERTAIN)
    merging = recorder
    if lookup_nodes and points:
        on_stage("trees with prompt lookup")
        budget = Budget(min(RECORD_NODES, limit), growth=Grown(reliability=points))
        merging, _ = record(engine, budget, prompts, max_new_tokens)

    on_stage("drafting")
    num_nodes = min(DRAFT_NODES, limit)
    drafting = draft_ms(unmerged, recorder, prompts[0], num_nodes, DRAFT_DEPTHS, DRAFT_TOKENS)
    costs = costs_of(passes, *drafting, run)

    candidates = [Candidate(PLAIN, None, 1.0, expected_speedup=1.0)]
    if points:
        # the reliability is in the probabilities of merged trees
        growth = Grown(reliability=points if merging is recorder else CERTAIN)
        figures = _predicted(merging, Budget(limit, growth=growth), costs)
        trees = Trees(limit, reliability=points)
        candidates.append(Candidate("paying", trees, **figures, sampled_trust=trust))
    own = engine.budget.at_most(limit)
    predicted: dict[str, Any] = {}
    if isinstance(own.growth, Grown):
        predicted = _predicted(merging, replace(own, growth=Grown(reliability=CERTAIN)), costs)
    candidates.append(Candidate("bundle", Trees.of(own), **predicted, sampled_trust=bundles_trust))
    if not quick:
        candidates = _raced(engine, costs, candidates, prompts, max_new_tokens, on_stage)
    source = "run" if calibration is None else "calibration"
    return Profile(key, costs, source, tuple(candidates), choose(candidates))


def _forecast(
    passes: PassCosts, num_nodes: int, num_tokens: int, merges: bool, quick: bool
) -> float:
    """Returns the seconds that all runs after the measurement of the target's passes will take.

    The drafter's guesses are not known yet: a step is taken to write `STEP_TOKENS`.
    """

    def seconds(nodes: int, tokens: float) -> float:
        ms = float(np.interp(nodes, *np.array(passes.verify).T))
        return STEP_OVERHEAD * ms / 1000 * tokens / STEP_TOKENS

    plain = STEP_OVERHEAD * passes.plain / 1000 * num_tokens
    small = seconds(DRAFT_NODES, num_tokens)
    total = seconds(num_nodes, num_tokens) + small + seconds(DRAFT_NODES, 5 * DRAFT_TOKENS)
    if merges:
        total += seconds(RECORD_NODES, num_tokens)
    if not quick:
        for first_round in (plain + 2 * small, plain + small):  # greedy, and at temperature 1
            total += first_round * (RACE_ROUNDS if first_round < RACE_SECONDS else 1)
    return total


def _raced(
    engine: Engine,
    costs: Costs,
    candidates: Sequence[Candidate],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    on_stage: Callable[[str], None],
) -> list[Candidate]:
    """Returns the candidates with what a race measured; the winner has its gain at temperature 1
    too, except with strict decoding, which is greedy."""
    on_stage("race")
    engines = {c.name: decoding(engine, c, costs) for c in candidates}
    stats = race(engines, prompts, max_new_tokens)
    measured = [_measured(c, stats[c.name], stats[PLAIN]) for c in candidates]
    chosen = choose(measured)
    if chosen == PLAIN or engine.target.strict_gap is not None:
        return measured
    on_stage("race at temperature 1")
    engines = {name: engines[name] for name in (PLAIN, chosen)}
    stats = race(engines, prompts, max_new_tokens, temperature=1.0)
    gain = _sampled_gain(stats[chosen], stats[PLAIN])
    return [replace(c, sampled_gain=gain) if c.name == chosen else c for c in measured]


def _sampled_trust(recorder: Recorder, points: Points) -> float:
    """Returns the drafted tokens accepted over those that the reliability expects of the recorded
    trees, within the bounds of a Trust."""
    expected = accepted = 0.0
    for tree, path in recorder.seen:
        if tree.log_prob_N is not None:
            expected += float(probabilities(tree.log_prob_N[1:], points).sum())
            accepted += len(path) - 1
    trust = accepted / expected if expected else 1.0
    return round(min(LARGEST_TRUST, max(1 / LARGEST_TRUST, trust)), 4)


def require_trees(engine: Engine) -> None:
    """Raises UserError if the engine has no trees to tune."""
    if engine.drafter == "none":
        raise UserError("got drafter none, expected one whose trees can be tuned")


def choose(candidates: Sequence[Candidate]) -> str:
    """Returns the name of the fastest candidate, as measured or else predicted; plain decoding if
    none is clearly faster."""
    fastest = max(candidates, key=lambda c: c.speedup or c.expected_speedup or 0.0)
    return fastest.name if fastest.gain.speedup >= CLEARLY_FASTER else PLAIN


def _predicted(recorder: Recorder, budget: Budget, costs: Costs) -> dict[str, Any]:
    """Returns a candidate's figures, as the recorded trees would give them with this budget."""
    if not recorder.seen:
        return {}
    nodes, gain = replayed(recorder.seen, budget, costs)
    lengths = {"nodes": round(nodes, 2), "accepted_length": gain.accepted_length}
    return {**lengths, "expected_speedup": gain.speedup}


def _gain(stats: Stats, plain: Stats) -> Gain:
    speedup = stats.tokens_per_second / plain.tokens_per_second
    return Gain(round(stats.accepted_length, 4), round(speedup, 4))


def _sampled_gain(stats: Stats, plain: Stats) -> Gain | None:
    """Returns the gain of texts drawn at temperature 1, None if every draw ended its answer at
    once."""
    return _gain(stats, plain) if stats.steps and plain.steps else None


def _measured(candidate: Candidate, stats: Stats, plain: Stats) -> Candidate:
    """Returns the candidate with what the race measured."""
    gain = _gain(stats, plain)
    return replace(
        candidate,
        nodes=round(1 + stats.drafted_tokens / max(1, stats.steps), 2),
        tokens_per_second=round(stats.tokens_per_second, 2),
        speedup=gain.speedup,
        accepted_length=gain.accepted_length,
    )
