"""Which budget is fastest on this machine: measures, predicts, lets the best few race.

The speed-up of trees of n nodes over plain decoding is Medusa's acceleration rate over its overhead
(figure 4b there),

    speedup(n) = L(n) / (t(n) / t_plain),    t(n) = draft + verify(n) + host

with the accepted length L of the bundle's calibration, or of a short run where it has none. Where
the formula is inexact (merged prompt lookup, drafting level by level), the race decides. Knows
nothing of terminals or of where the profile is kept (profile.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from spec_runtime.profile import PLAIN, Candidate, Costs, Key, Profile
from spec_runtime.proposers.adaptive import scale_probabilities
from spec_runtime.proposers.base import PlainProposer, Proposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.stats import Stats
from spec_runtime.target import LOGITS, Target, Wants
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.templates import path_probabilities, searched
from spec_runtime.trees.tree import TokenTree, chain_parents

if TYPE_CHECKING:
    from spec_runtime.engine import Engine
    from spec_runtime.step import Step

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXT_ROWS = 200  # committed while verify is measured
MIN_ROUNDS, MAX_ROUNDS, VERIFY_SECONDS = 3, 15, 10.0
RECORD_NODES, DRAFT_NODES, DRAFT_TOKENS = 48, 16, 32
CLEARLY_FASTER = 1.02  # than plain decoding; what is closer may be chance
MIN_VISITS = 8  # of a depth, for its accuracies to count
RACE_ROUNDS, RACE_SECONDS = 2, 60.0  # a new round only within this time
# a path probability falls into one of these; the ratio of neighbours is about 1.4
EDGES = (*(0.7**k for k in range(20)), 0.0)

# Few and short, but of several kinds: explaining, listing, reckoning, repeating, code, a story.
PROMPTS = (
    "Why does ice float on water? Answer in a short paragraph.",
    "List six things to check before a long bicycle tour, one per line.",
    "A shop sells pens at 3 for 2 euros. What do 21 pens cost? Show the steps.",
    "Correct the spelling and repeat the text: 'The libary opens at nine oclock on weekdays and at "
    "ten oclock on saturdays. The libary is closed on sundays.'",
    "Write a Python function that returns the second largest number of a list.",
    "Begin a story about a lighthouse keeper who finds a letter in a bottle.",
)


@dataclass(frozen=True)
class Curve:
    """What the nodes of a drafter's trees are worth.

    accuracy [k][r]: see templates. reliability: rows (predicted path probability, observed
    acceptance, such nodes per position). A proposer without probabilities has `by_node` instead:
    of the n-th drafted node, the share of trees that have it and of those in which it is accepted.
    """

    source: str
    accuracy: tuple[tuple[float, ...], ...] = ()
    reliability: tuple[tuple[float, float, float], ...] = ()
    by_node: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_calibration(cls, calibration: dict[str, Any]) -> Curve:
        positions = calibration["positions"]
        return cls(
            "calibration",
            tuple(tuple(row) for row in calibration["accuracy"]),
            tuple((p, seen, n / positions) for p, seen, n in calibration["reliability"]),
        )


@dataclass(frozen=True)
class Point:
    """Of one size of tree: its nodes (on average, root included), the accepted length to be
    expected and the speed-up that follows."""

    budget: Budget
    nodes: float
    accepted_length: float
    speedup: float


@dataclass(frozen=True)
class TuneReport:
    """The profile, and for the figure rows {nodes, predicted, measured} of speed-ups."""

    profile: Profile
    sweep: list[dict[str, float]]


class Recorder(ProposerWrapper):
    """A proposer that notes each tree of `proposer`, the time it took and the path in it that came
    true; not where only the root was asked for."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.seen: list[tuple[TokenTree, list[int]]] = []
        self.seconds: list[float] = []
        self._tree: TokenTree | None = None

    def propose(self, token: int, budget: Budget) -> TokenTree:
        begin = time.perf_counter()
        tree = super().propose(token, budget)
        self._tree = None if budget.is_root_only else tree
        if self._tree is not None:
            self.seconds.append(time.perf_counter() - begin)
        return tree

    def commit(self, step: Step) -> None:
        if self._tree is not None:
            self.seen.append((self._tree, [0, *self._tree.follow(step.tokens)]))
        super().commit(step)


def observed_curve(seen: Sequence[tuple[TokenTree, list[int]]]) -> Curve:
    """Of trees and the paths in them that came true."""
    trees = [tree for tree, _ in seen]
    num_nodes = max((tree.num_nodes for tree in trees), default=1)
    if num_nodes == 1 or any(t.log_prob_N is None and t.num_nodes > 1 for t in trees):
        has_N, hit_N = np.zeros(num_nodes), np.zeros(num_nodes)
        for tree, path in seen:
            has_N[: tree.num_nodes] += 1
            hit_N[path] += 1
        shares = np.stack([has_N, hit_N], axis=1)[1:] / max(1, len(seen))
        return Curve("run", by_node=tuple((a, b) for a, b in shares.tolist()))
    depth = max(int(tree.depth_N.max()) for tree in trees)
    width = max(len(tree.children(node)) for tree in trees for node in range(tree.num_nodes))
    visits_K, hits_KC = np.zeros(depth), np.zeros((depth, width))
    count_B, predicted_B, hit_B = np.zeros((3, len(EDGES)))
    for tree, path in seen:
        # siblings come best first; one that was not drafted counts as never right
        for k, node in enumerate(path[:depth]):
            visits_K[k] += 1
            if k + 1 < len(path):
                hits_KC[k, tree.children(node).index(path[k + 1])] += 1
        if tree.log_prob_N is not None:
            p_N = np.exp(tree.log_prob_N[1:])
            bin_N = np.searchsorted(-np.array(EDGES), -p_N)
            np.add.at(count_B, bin_N, 1)
            np.add.at(predicted_B, bin_N, p_N)
            np.add.at(hit_B, bin_N, np.isin(np.arange(1, tree.num_nodes), path))
    enough = int(np.argmin(np.append((visits_K >= MIN_VISITS) & (hits_KC.sum(axis=1) > 0), False)))
    accuracy_KC = hits_KC[:enough] / visits_K[:enough, None]
    used = count_B > 0
    rows = np.stack([predicted_B, hit_B, count_B * count_B / len(seen)], axis=1)[used]
    return Curve(
        "run",
        tuple(tuple(row) for row in accuracy_KC.tolist()),
        tuple((p, h, n) for p, h, n in (rows / count_B[used, None]).tolist()),
    )


def monotone(rows: Iterable[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """Rows (predicted, observed, weight) as points (predicted, observed) ascending in both:
    neighbours in the wrong order get their common mean.

    Example: (.1, .3, 1), (.2, .1, 3) -> (.1, .15), (.2, .15).
    """
    blocks: list[tuple[float, float, list[float]]] = []
    by_predicted = {min(row[0], 1.0): row for row in rows if row[0] > 0 and row[2] > 0}
    for predicted, (_, observed, weight) in sorted(by_predicted.items()):
        block = (observed, weight, [predicted])
        while blocks and blocks[-1][0] >= block[0]:
            seen, w, members = blocks.pop()
            total = w + block[1]
            block = ((seen * w + block[0] * block[1]) / total, total, members + block[2])
        blocks.append(block)
    return tuple((p, seen) for seen, _, members in blocks for p in members)


def static_points(curve: Curve, costs: Costs, max_nodes: int) -> list[Point]:
    """The best static tree of each size from 2 nodes on, by the accuracies."""
    if not curve.accuracy:
        return []
    paths = searched(curve.accuracy, max_nodes)
    worth = path_probabilities(paths, curve.accuracy)
    points, length = [], 1.0
    for n, path in enumerate(paths, 2):
        length += worth[path]
        kept = paths[: n - 1]
        budget = Budget(n, paths=kept)
        ms = costs.of(n, max(map(len, kept)))
        points.append(Point(budget, n, length, length * costs.plain / ms))
    return points


def grown_points(curve: Curve, costs: Costs, max_nodes: int) -> list[Point]:
    """Trees grown down to each least probability of the reliability's rows, or of each size."""
    points, nodes, length = [], 1.0, 1.0

    def add(budget: Budget, more_nodes: float, more_tokens: float, num_levels: int) -> None:
        nonlocal nodes, length
        nodes, length = nodes + more_nodes, length + more_tokens
        ms = costs.of(nodes, num_levels)
        points.append(Point(budget, nodes, length, length * costs.plain / ms))

    for n, (has, hit) in enumerate(curve.by_node[: max_nodes - 1], 2):
        add(Budget(n), has, hit, 1)
    rows = sorted(curve.reliability, reverse=True)
    lower = [*(row[0] for row in rows[1:]), 0.0]
    for (predicted, seen, count), below in zip(rows, lower, strict=False):
        if predicted > 0 and nodes + count <= max_nodes:
            least = (predicted * below) ** 0.5 or predicted / 2
            budget = Budget(max_nodes, min_probability=round(least, 5))
            add(budget, count, seen * count, max(1, len(curve.accuracy)))
    return points


def paying_budget(curve: Curve, costs: Costs, max_nodes: int, lookup_nodes: int = 0) -> Budget:
    """Trees cut at each step where more nodes do not pay.

    Its least probability leaves out only what never could: a node pays by more than the rate of the
    root alone times the least slope of t.
    """
    reliability = monotone(curve.reliability)
    step_ms = costs.step_ms(max_nodes)
    t_N = np.array(step_ms)
    later, sooner = np.tril_indices(len(t_N), -1)
    slope = ((t_N[later] - t_N[sooner]) / (later - sooner)).min(initial=np.inf)
    longest = t_N[: lookup_nodes + 1].max() + costs.level * max(0, len(curve.accuracy) - 1)
    least = min(1.0, max(0.0, slope / longest))
    if reliability:
        predicted, seen = np.array([(0.0, 0.0), *reliability]).T
        least = float(np.interp(least, seen, predicted))
    return Budget(
        max_nodes,
        min_probability=0.999 * least,  # for the rounding
        step_ms=step_ms,
        level_ms=costs.level,
        reliability=reliability,
    )


def measure_verify(
    target: Target, tokens: Sequence[int], sizes: Sequence[int], wants: Wants
) -> tuple[float, dict[int, float]]:
    """Milliseconds of a pass: of plain decoding's, and by tree size with the features the drafter
    wants. Medians of interleaved rounds behind some 200 committed rows of `tokens`, repeated."""
    target.forget()
    num_rows = max(1, min(CONTEXT_ROWS, target.max_length // 2))
    target.prefill((list(tokens) * num_rows)[:num_rows])
    settings = [(1, LOGITS), *((n, wants) for n in sizes)]
    seconds: dict[tuple[int, Wants], list[float]] = {setting: [] for setting in settings}
    start = time.perf_counter()
    for turn in range(1 + MAX_ROUNDS):
        for n, each in settings[:: -1 if turn % 2 else 1]:
            tree = TokenTree(np.resize(np.array(tokens, np.int64), n), chain_parents(n) // 2)
            begin = time.perf_counter()
            verified = target.verify(tree, each)
            if each.features:
                verified.features([0])
            if turn:  # the first round warms up
                seconds[n, each].append(time.perf_counter() - begin)
        if turn >= MIN_ROUNDS and time.perf_counter() - start > VERIFY_SECONDS:
            break
    target.truncate(0)
    ms = {setting: 1000 * statistics.median(values) for setting, values in seconds.items()}
    return ms[1, LOGITS], {n: ms[n, wants] for n in sizes}


def _decoding(engine: Engine, budget: Budget | None) -> Engine:
    """`engine` with this budget, as a profile's choice runs; None is plain decoding."""
    if budget is None:
        return engine.observed(lambda _: PlainProposer(), Budget(1))
    return engine.observed(scale_probabilities, budget)


def _recording(engine: Engine, budget: Budget) -> tuple[Engine, Recorder]:
    """The drafter alone, watched."""
    recorder = Recorder(_alone(engine.proposer))
    return engine.observed(lambda _: recorder, budget), recorder


def _alone(proposer: Proposer) -> Proposer:
    """The drafter without prompt lookup's candidates."""
    return proposer.drafter if isinstance(proposer, MergedProposer) else proposer


def _draft_ms(
    engine: Engine, prompt: list[int], num_levels: int, max_nodes: int
) -> tuple[float, float]:
    """The drafter's time with one level, and of each further one, by least squares over depths."""
    depths = np.unique(np.linspace(1, max(1, num_levels), 5).round().astype(int))
    ms_D = []
    for depth in depths.tolist():
        drafting, recorder = _recording(engine, Budget(max_nodes, max_depth=depth))
        drafting.generate(prompt, max_new_tokens=DRAFT_TOKENS, reuse=False)
        ms_D.append(1000 * statistics.median(recorder.seconds or [0.0]))
    slope = float(np.polyfit(depths, ms_D, 1)[0]) if len(depths) > 1 else 0.0
    level = max(0.0, slope)
    return max(0.0, float(np.mean(ms_D) - level * np.mean(depths - 1))), level


def race(
    engines: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    num_rounds: int = RACE_ROUNDS,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Stats]:
    """Each engine's total over the prompts, in turns whose order rotates."""
    parts: dict[str, list[Stats]] = {name: [] for name in engines}
    names, begin = list(engines), time.perf_counter()
    for turn in range(num_rounds):
        if turn and time.perf_counter() - begin > RACE_SECONDS:
            break
        for i, prompt in enumerate(prompts):
            first = (turn + i) % len(names)
            for name in names[first:] + names[:first]:
                result = engines[name].generate(prompt, max_new_tokens=max_new_tokens, reuse=False)
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
    sweep: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> TuneReport:
    """The profile of `engine`'s drafter (loaded without a profile), from `prompts`, token ids each.

    `calibration`: the bundle's, see DrafterInfo. `quick`: no race, the predictions decide.
    `sweep`: measure trees of many sizes as well. ValueError: an engine that only decodes plainly.
    """
    if engine.drafter == "none":
        raise ValueError("got drafter none, expected one whose trees can be tuned")
    target = engine.target
    if target.chains_only:
        raise ValueError(
            "got a bundle whose target takes chains only (--attention chain), expected one built "
            "with another --attention: there are no trees to tune"
        )
    proposer = engine.proposer
    lookup_nodes = proposer.lookup_nodes if isinstance(proposer, MergedProposer) else 0
    limit = min(SIZES[-1], target.max_nodes)
    sizes = sorted({n for n in (*SIZES, engine.budget.max_nodes) if n <= target.max_nodes})

    on_stage("verify")
    longest = max(prompts, key=len)
    plain_ms, verify = measure_verify(target, longest, sizes, engine.wants)

    on_stage("trees of the drafter")
    num_nodes = RECORD_NODES if calibration is None else DRAFT_NODES
    recording, recorder = _recording(engine, Budget(min(num_nodes, limit)))
    run = race({"run": recording}, prompts, max_new_tokens, num_rounds=1)["run"]
    if not run.steps:
        raise ValueError("got prompts that the target answers with nothing; give others")
    if calibration is None:
        curve = observed_curve(recorder.seen)
    else:
        curve = Curve.from_calibration(calibration)

    on_stage("drafting")
    draft, level = 1000 * statistics.median(recorder.seconds or [0.0]), 0.0
    if recorder.run_seconds > 0:
        depth = max((int(tree.depth_N.max()) for tree, _ in recorder.seen), default=1)
        draft, level = _draft_ms(engine, prompts[0], depth, min(DRAFT_NODES, limit))
    host = sum(run.timings[phase] for phase in ("accept", "commit", "other"))
    host = 1000 * host / run.steps
    costs = Costs(
        verify=tuple((n, round(ms, 4)) for n, ms in verify.items()),
        draft=round(draft, 4),
        level=round(level, 4),
        host=round(host, 4),
        plain=round(plain_ms + host, 4),
        prefill=round(1000 * run.prefill_seconds / max(1, run.prompt_tokens), 4),
    )

    candidates = [Candidate(PLAIN, None, 1.0, expected_speedup=1.0)]
    candidates += _candidates(curve, costs, limit, lookup_nodes)
    candidates.append(Candidate("bundle", engine.budget))

    if not quick:
        on_stage("race")
        engines = {c.name: _decoding(engine, c.budget) for c in candidates}
        stats = race(engines, prompts, max_new_tokens)
        candidates = [_measured(c, stats[c.name], stats[PLAIN]) for c in candidates]
    profile = Profile(key, costs, curve.source, tuple(candidates), _choose(candidates))
    if not sweep:
        return TuneReport(profile, [])
    on_stage("sizes of tree")
    points = static_points(curve, costs, limit) or grown_points(curve, costs, limit)
    return TuneReport(profile, _sweep(engine, points, prompts, max_new_tokens))


def _choose(candidates: Sequence[Candidate]) -> str:
    """The name of the fastest, as measured or else predicted; plain decoding if none clearly is."""
    fastest = max(candidates, key=lambda c: c.speedup or c.expected_speedup or 0.0)
    return fastest.name if fastest.pace[1] >= CLEARLY_FASTER else PLAIN


def _candidates(curve: Curve, costs: Costs, limit: int, lookup_nodes: int) -> list[Candidate]:
    """The best of each kind of budget, with room for lookup's nodes; predictions are of the drafter
    alone."""
    found = []
    own = max(2, limit - lookup_nodes)
    for name, points in (
        ("static", static_points(curve, costs, own)),
        ("dynamic", grown_points(curve, costs, own)),
    ):
        if points:
            best = max(points, key=lambda point: point.speedup)
            room = min(limit, best.budget.max_nodes + lookup_nodes)
            # of grown trees, for the ProbabilityScaler
            reliability = monotone(curve.reliability) if best.budget.is_grown else ()
            found.append(
                Candidate(
                    name,
                    replace(best.budget, max_nodes=room, reliability=reliability),
                    round(best.nodes, 2),
                    expected_speedup=round(best.speedup, 4),
                    accepted_length=round(best.accepted_length, 4),
                )
            )
    if curve.reliability and found:
        # what a fixed threshold reaches, choosing at each step reaches too
        budget = paying_budget(curve, costs, limit, lookup_nodes)
        found.append(replace(found[-1], name="paying", budget=budget, nodes=None))
    return found[::-1]  # the one to prefer at equal predictions first


def _measured(candidate: Candidate, stats: Stats, plain: Stats) -> Candidate:
    return replace(
        candidate,
        nodes=round(1 + stats.drafted_tokens / max(1, stats.steps), 2),
        tokens_per_second=round(stats.tokens_per_second, 2),
        speedup=round(stats.tokens_per_second / plain.tokens_per_second, 4),
        accepted_length=round(stats.accepted_length, 4),
    )


def _sweep(
    engine: Engine, points: Sequence[Point], prompts: Sequence[list[int]], max_new_tokens: int
) -> list[dict[str, float]]:
    """Predicted and measured speed-up of the drafter alone, by tree size."""
    shown = {f"{p.nodes:.1f}": p for p in points if p.budget.max_nodes in SIZES}
    engines = {name: engine.observed(_alone, point.budget) for name, point in shown.items()}
    engines[PLAIN] = _decoding(engine, None)
    stats = race(engines, prompts, max_new_tokens, num_rounds=1)
    plain = stats[PLAIN].tokens_per_second
    return [
        {
            "nodes": round(point.nodes, 2),
            "predicted": round(point.speedup, 4),
            "measured": round(stats[name].tokens_per_second / plain, 4),
        }
        for name, point in shown.items()
    ]
