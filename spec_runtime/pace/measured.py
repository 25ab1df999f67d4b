"""Measures what passes of the target and drafts cost on this machine."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spec_runtime.engine import Engine
from spec_runtime.loop.proposer import Drafting, Proposer
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import LOGITS, Target, Wants
from spec_runtime.pace.costs import Costs, PassCosts
from spec_runtime.proposers.merged import MergedProposer
from spec_runtime.proposers.wrapper import ProposerWrapper
from spec_runtime.trees.budget import Budget
from spec_runtime.trees.tree import TokenTree, chain_parents

NEAR_ROWS, FAR_ROWS = 200, 1400  # committed while passes are measured
READ_ROWS = 32  # of them are read, and the others copies
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
    lower quartiles of interleaved rounds. For each context there are at least `least`, and more as
    long as they fit into `seconds`. With `least` 0 sizes are left out, the last ones first, where
    not even one round fits; the first two are always measured.
    """
    found = []
    with target.alone():
        num_near = max(1, min(NEAR_ROWS, target.max_length // 2))
        num_read = min(num_near, READ_ROWS) if target.keeps_rows else num_near
        target.prefill(np.resize(np.array(tokens, np.int64), num_read).tolist())
        _repeat_rows(target, num_near)
        target.verify(TokenTree.root(tokens[0]), LOGITS)  # warms up
        found.append(_passes(target, tokens, sizes, wants, seconds, least))
        num_far = min(FAR_ROWS, target.max_length - max(sizes))
        if target.keeps_rows and num_far >= 2 * num_near:
            _repeat_rows(target, num_far)
            sizes = [n for n in sizes if n in dict(found[0].verify)]
            found.append(_passes(target, tokens, sizes, wants, seconds, max(1, least)))
        target.truncate(0)
    return found


def _repeat_rows(target: Target, num_rows: int) -> None:
    """Repeats the committed rows until there are `num_rows`."""
    if target.length < num_rows:
        rows, times = target.copy_rows(target.length), -(-num_rows // target.length)
        repeated = {name: np.tile(kept, (1, times, 1)) for name, kept in rows.items()}
        target.restore_rows(repeated, num_rows)


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
    taken: dict[tuple[int, Wants], list[float]] = {}
    start = end = time.perf_counter()
    for turn in range(MAX_ROUNDS):
        begin_of_round = end
        for n, each in settings[:: -1 if turn % 2 else 1]:
            if not least and n not in sizes[:2] and end - start > seconds / 2:
                continue
            tree = TokenTree(np.resize(np.array(tokens, np.int64), n), chain_parents(n) // 2)
            begin = time.perf_counter()
            verified = target.verify(tree, each)
            if each.features:
                verified.features([0])
            end = time.perf_counter()
            taken.setdefault((n, each), []).append(end - begin)
        settings = [*taken]
        seconds_of_round = end - begin_of_round
        if turn + 1 >= least and end - start + seconds_of_round > seconds:
            break
    # what else runs on the machine only adds to a time
    ms = {each: round(1000 * float(np.quantile(t, 0.25)), 4) for each, t in taken.items()}
    verify = tuple((n, ms[n, wants]) for n in sorted(sizes) if (n, wants) in ms)
    spread = statistics.median(statistics.median(t) / max(1e-9, min(t)) for t in taken.values())
    return PassCosts(target.length, verify, ms[1, LOGITS], round(max(1.0, spread), 2))


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
    recorder saw, at any depth. The prompt is read once.
    """
    if recorder.run_seconds <= 0:
        return 1000 * statistics.median(recorder.seconds or [0.0]), 0.0
    num_levels = max((int(tree.depth_N.max()) for tree, _ in recorder.seen), default=1)
    depths = np.unique(np.linspace(1, max(1, num_levels), num_depths).round().astype(int))
    ms_D = []
    for depth in depths.tolist():
        budget = Budget(max_nodes, max_depth=depth)
        timed, _ = record(engine, budget, [prompt], num_tokens, ignore_eos=True, reuse=True)
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
    reuse: bool = False,
) -> tuple[Recorder, Stats]:
    """Decodes the prompts once with this budget, above temperature 0 each with a seed of its own;
    returns its trees and the total."""
    recorder = Recorder(engine.proposer)
    watched, stats = engine.observed(lambda _: recorder, budget), []
    for seed, prompt in enumerate(prompts):
        result = watched.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            reuse=reuse,
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
    near, *far = (
        replace(each, plain=round(each.plain + host_ms, 4), spread=1.0) for each in passes
    )
    return Costs(
        near.verify,
        round(draft, 4),
        round(level, 4),
        host_ms,
        near.plain,
        round(1000 * run.prefill_seconds / max(1, run.prompt_tokens), 4),
        near.context,
        next(iter(far), None),
        max(each.spread for each in passes),
    )
