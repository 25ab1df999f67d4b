"""Measures what passes of the target and drafts cost on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_runtime.engine import Engine
from spec_runtime.profile import Costs, PassCosts
from spec_runtime.proposers.base import Drafting, Proposer
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.stats import Stats
from spec_runtime.step import Step
from spec_runtime.target import LOGITS, Target, Wants
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree, chain_parents

NEAR_ROWS, FAR_ROWS = 200, 1400  # committed while passes are measured
MIN_ROUNDS, MAX_ROUNDS = 3, 15


class Recorder(ProposerWrapper):
    """Notes each tree of `proposer`, the path in it that came true, and the seconds it took.

    Trees for which only the root was asked are not noted.
    """

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self.seen: list[tuple[TokenTree, list[int]]] = []
        self.seconds: list[float] = []
        self._tree: TokenTree | None = None

    def drafting(self, token: int, budget: Budget) -> Drafting:
        begin = time.perf_counter()
        tree = yield from super().drafting(token, budget)
        self._tree = None if budget.is_root_only else tree
        if self._tree is not None:
            self.seconds.append(time.perf_counter() - begin)
        return tree

    def commit(self, step: Step) -> None:
        if self._tree is not None:
            self.seen.append((self._tree, [0, *self._tree.follow(step.tokens)]))
        super().commit(step)


def measure_passes(
    target: Target,
    tokens: Sequence[int],
    sizes: Sequence[int],
    wants: Wants,
    seconds: float,
    least: int = MIN_ROUNDS,
) -> list[PassCosts]:
    """Returns what passes take after NEAR_ROWS committed rows and, if the context is long enough
    and rows can be written, after FAR_ROWS.

    Passes over trees return what `wants` says, those of plain decoding only logits. The times are
    lower quartiles of interleaved rounds, of which a further one begins within `seconds` for each
    context, but at least `least`.
    """
    found = []
    with target.alone():
        num_near = max(1, min(NEAR_ROWS, target.max_length // 2))
        target.prefill(np.resize(np.array(tokens, np.int64), num_near).tolist())
        found.append(_passes(target, tokens, sizes, wants, seconds, least))
        num_far = min(FAR_ROWS, target.max_length - max(sizes))
        if target.keeps_rows and num_far >= 2 * num_near:
            rows = target.copy_rows(num_near)
            times = -(-num_far // num_near)
            repeated = {name: np.tile(kept, (1, times, 1)) for name, kept in rows.items()}
            target.restore_rows(repeated, num_far)
            found.append(_passes(target, tokens, sizes, wants, seconds, least))
        target.truncate(0)
    return found


def _passes(
    target: Target,
    tokens: Sequence[int],
    sizes: Sequence[int],
    wants: Wants,
    seconds: float,
    least: int,
) -> PassCosts:
    """Returns what passes take after the rows that there are."""
    settings = [(1, LOGITS), *((n, wants) for n in sizes)]
    taken: dict[tuple[int, Wants], list[float]] = {setting: [] for setting in settings}
    start = time.perf_counter()
    for turn in range(1 + MAX_ROUNDS):
        for n, each in settings[:: -1 if turn % 2 else 1]:
            tree = TokenTree(np.resize(np.array(tokens, np.int64), n), chain_parents(n) // 2)
            begin = time.perf_counter()
            verified = target.verify(tree, each)
            if each.features:
                verified.features([0])
            if turn:  # the first round warms up
                taken[n, each].append(time.perf_counter() - begin)
        if turn >= least and time.perf_counter() - start > seconds:
            break
    # what else runs on the machine only adds to a time
    ms = {each: round(1000 * float(np.quantile(t, 0.25)), 4) for each, t in taken.items()}
    verify = tuple((n, ms[n, wants]) for n in sizes)
    return PassCosts(target.length, verify, ms[1, LOGITS])


def without_lookup(proposer: Proposer) -> Proposer:
    """Returns the drafter without prompt lookup's candidates."""
    if isinstance(proposer, MergedProposer) and proposer.has_drafter:
        return proposer.drafter
    return proposer


def draft_ms(
    engine: Engine,
    recorder: Recorder,
    prompt: list[int],
    max_nodes: int,
    num_depths: int,
    num_tokens: int,
) -> tuple[float, float]:
    """Returns the milliseconds of `engine`'s proposer with one level, and those of each further
    level.

    A drafter that runs a graph is timed on answers of `num_tokens` to `prompt`, with trees of so
    many depths, and both times follow by least squares. One that runs none takes the time that the
    recorder saw, at any depth.
    """
    if recorder.run_seconds <= 0:
        return 1000 * statistics.median(recorder.seconds or [0.0]), 0.0
    num_levels = max((int(tree.depth_N.max()) for tree, _ in recorder.seen), default=1)
    depths = np.unique(np.linspace(1, max(1, num_levels), num_depths).round().astype(int))
    ms_D = []
    for depth in depths.tolist():
        budget = Budget(max_nodes, max_depth=depth)
        timed, _ = record(engine, budget, [prompt], num_tokens, ignore_eos=True)
        ms_D.append(1000 * statistics.median(timed.seconds or [0.0]))
    slope = float(np.polyfit(depths, ms_D, 1)[0]) if len(depths) > 1 else 0.0
    level = max(0.0, slope)
    return max(0.0, float(np.mean(ms_D) - level * np.mean(depths - 1))), level


def record(
    engine: Engine,
    budget: Budget,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
) -> tuple[Recorder, Stats]:
    """Decodes the prompts once with this budget, above temperature 0 each with a seed of its own;
    returns its trees and the total."""
    recorder = Recorder(engine.proposer)
    watched, stats = engine.observed(lambda _: recorder, budget), []
    for seed, prompt in enumerate(prompts):
        result = watched.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            reuse=False,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
        )
        stats.append(result.stats)
    return recorder, Stats.total(stats)


def costs_of(passes: Sequence[PassCosts], draft: float, level: float, run: Stats) -> Costs:
    """Returns the measured times together, of one context or two; the host's share and prefill's
    come from `run`."""
    host = sum(run.timings[phase] for phase in ("accept", "commit", "other"))
    host_ms = round(1000 * host / run.steps, 4)
    near, *far = (replace(each, plain=round(each.plain + host_ms, 4)) for each in passes)
    return Costs(
        near.verify,
        round(draft, 4),
        round(level, 4),
        host_ms,
        near.plain,
        round(1000 * run.prefill_seconds / max(1, run.prompt_tokens), 4),
        near.context,
        next(iter(far), None),
    )
