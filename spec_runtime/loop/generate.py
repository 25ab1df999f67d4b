"""Runs the loop: draft -> verify -> accept -> commit. Plain decoding is the one-node tree.

The loop is a Python generator of committed tokens. Text stays outside: a hook of `Ending` says
which token ends a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spec_runtime.backends import GraphRun, run_at_once
from spec_runtime.bundle.manifest import FEATURES
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import Interrupted
from spec_runtime.loop.accept import by_rejection, by_target_sampling, by_typical
from spec_runtime.loop.proposer import Proposer
from spec_runtime.loop.row_store import RestoredRows
from spec_runtime.loop.stats import Clock, Stats
from spec_runtime.loop.step import Ending, Step, count_step, end_step
from spec_runtime.loop.target import PREFILL_ROWS, Asked, Target, Verified, Wants
from spec_runtime.sampling import Sampler, SamplingParams, TokenLogprob, token_logprob
from spec_runtime.trees.budget import Budget, Drawn
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import TokenTree

CHAIN_LENGTH = 4  # of the chains drawn for acceptance by rejection, unless widths are given


WAITS = Step([], num_accepted=0)  # stands for no step: the generation waits at its gate


@dataclass
class Gate:
    """Where a generation waits for runs that it shares with others.

    `drafting` is the run of its drafter that it waits for, or None. `asked` is what it wants of the
    target's pass while it waits for that: a tree of at most `max_rows` nodes, or `chunk_rows`
    tokens of its prompt. Whoever runs the pass may cut the tree, and sets `verified`.
    """

    max_rows: int = PREFILL_ROWS
    chunk_rows: int = PREFILL_ROWS
    drafting: GraphRun | None = None
    asked: Asked | None = None
    verified: Verified | None = None

    def verify(
        self, proposing: Generator[GraphRun, None, Asked]
    ) -> Generator[Step, None, Verified]:
        """Yields WAITS for each run of the drafter and for the pass; returns what the pass said."""
        try:
            while True:
                self.drafting = next(proposing)
                yield WAITS
        except StopIteration as end:
            self.asked = end.value
        finally:
            self.drafting = None
        yield WAITS
        verified, self.asked, self.verified = self.verified, None, None
        assert verified is not None, "no pass was run"
        return verified


@dataclass
class Generation:
    """Holds one generation: what runs it, the prompt, how it samples, and the answer so far.

    The first `reused` tokens of the prompt are in the target's and the proposer's state already.
    `features` names the target's outputs that the proposer's features are made of.
    `restored` says that the target's rows were brought back from a copy, of which the proposer
    knows nothing. `masks` are those of the request's grammar, which no accepted token is outside
    of, whatever the proposer drafts. With a `gate` it shares its passes with others.
    """

    target: Target
    proposer: Proposer
    budget: Budget
    prompt: list[int]
    params: SamplingParams
    ending: Ending
    stats: Stats
    reused: int = 0
    features: tuple[str, ...] = (FEATURES,)
    restored: RestoredRows | None = None
    masks: PathMasks | None = None
    gate: Gate | None = None
    tokens: list[int] = field(default_factory=list)


def generate(run: Generation) -> Generator[Step, None, None]:
    """Yields the prompt's step, then one step per verify pass, until `run.ending` says stop.

    Whenever a step is out, target.length = prompt + tokens - 1: the last token has no row yet. The
    loop goes on from the last of `run.tokens`, also where somebody else committed further steps
    while it waited. With a gate it yields WAITS before each pass and each run of the drafter, which
    somebody else runs. Raises Interrupted if `run.ending` says stop within the prompt.
    """
    decoding, gate = Decoding(run), run.gate
    while decoding.goes_on():
        if gate is None:
            verified = run.target.verify(*run_at_once(decoding.proposing()))
        else:
            proposing = decoding.proposing(gate.max_rows, gate.chunk_rows)
            verified = yield from gate.verify(proposing)
        step = decoding.accept(verified)
        if step is not None:
            yield step


class Decoding:
    """Takes a generation from one pass of the target to the next, whoever runs the pass.

    `proposing` says what the pass has to compute: a chunk of the prompt until all of it is read,
    and then a draft. `accept` takes in what the target says of it. Between the two nothing is
    committed.
    """

    def __init__(self, run: Generation) -> None:
        self._run = run
        self._sample = Sampler(run.params, run.target.vocab_size, run.prompt, run.masks)
        names = run.features if run.proposer.wants_features else ()
        self._wants = Wants(names, self._sample.reads_top)
        self._accept, self._budget = _acceptance(run.params, self._sample, run.budget)
        self._clock = Clock(run.stats.timings)
        self._num_read = run.reused  # tokens of the prompt that have rows
        self._chunks_TF: list[np.ndarray] = []  # features of the prompt's new rows
        self._engine_seconds = 0.0  # the graphs' before the pass

    @property
    def is_reading(self) -> bool:
        """Says whether a part of the prompt has no rows yet."""
        return self._num_read < len(self._run.prompt)

    def goes_on(self) -> bool:
        """Asks, before a pass, whether the generation goes on; raises Interrupted if it ends within
        the prompt."""
        goes_on = self._run.ending.goes_on()
        if self.is_reading and not goes_on:
            raise Interrupted
        return goes_on

    def proposing(
        self, max_rows: int = PREFILL_ROWS, chunk_rows: int = PREFILL_ROWS
    ) -> Generator[GraphRun, None, Asked]:
        """Yields the drafter's runs and returns the arguments of `Target.verify` for the next pass:
        a tree of at most `max_rows` nodes, or while the prompt is read, up to `chunk_rows` of its
        tokens."""
        run, target = self._run, self._run.target
        self._clock.start()
        if self.is_reading:
            unread = run.prompt[self._num_read :]
            if len(unread) == chunk_rows + 1 > 3:  # a row by itself is computed in another form
                chunk_rows -= 1
            chunk = TokenTree.chain(unread[:chunk_rows])
            return Asked(chunk, self._wants, last_only=True)
        self._engine_seconds = target.run_seconds + run.proposer.run_seconds
        limited = self._budget.within(run.ending.remaining - 1).rooted_at(target.length)
        tree = yield from run.proposer.drafting(run.tokens[-1], limited.at_most(max_rows))
        self._clock.lap("draft")
        return Asked(tree, self._wants)

    def accept(self, verified: Verified) -> Step | None:
        """Commits what the pass over the last proposal says; returns the step, or None while the
        prompt is not read to its end."""
        if self.is_reading:
            return self._accept_chunk(verified)
        run, target, tree, clock = self._run, self._run.target, verified.tree, self._clock
        params, stats = run.params, run.stats
        clock.lap("verify")
        path, token = self._accept(tree, TargetView(self._sample, tree, verified, target.length))
        clock.lap("accept")
        step = end_step(path, [*tree.token_N[path[1:]].tolist(), token], run.ending)
        step = replace(
            step,
            features=verified.features(step.path) if self._wants.features else None,
            verified=verified,
            logprobs=_logprobs(params, verified, step.path, step.tokens),
            num_drafted=tree.num_nodes - 1,
            tree=tree,
            stats=stats,
        )
        clock.lap("other")
        target.commit(step.path)
        self._sample.commit(step.tokens)
        run.proposer.commit(step)
        run.tokens += step.tokens
        clock.lap("commit")

        seconds = target.run_seconds + run.proposer.run_seconds - self._engine_seconds
        stats.engine_seconds += seconds
        count_step(stats, step, bool(tree.children(step.path[-1])))
        clock.lap("other")
        return step

    def _accept_chunk(self, verified: Verified) -> Step | None:
        """Commits a chunk of the prompt; after the last one, starts the proposer and returns the
        first token's step."""
        num_rows = verified.tree.num_nodes
        if self._wants.features:
            self._chunks_TF.append(verified.features(range(num_rows)))
        self._run.target.commit(range(num_rows))
        self._num_read += num_rows
        step = None if self.is_reading else self._begin(verified)
        self._clock.lap("prefill")
        return step

    def _begin(self, verified: Verified) -> Step:
        """Draws the first token from what the target says of the prompt's last row."""
        run, prompt = self._run, self._run.prompt
        features = np.concatenate(self._chunks_TF) if self._chunks_TF else None
        self._chunks_TF = []
        tree = TokenTree.root(prompt[-1])
        length = run.target.length - 1
        _, token = self._accept(tree, TargetView(self._sample, tree, verified, length))
        if run.restored is None:
            run.proposer.start(prompt, features, run.reused)
        else:
            run.proposer.start(prompt, run.restored.features_before(features), 0)
        logprobs = _logprobs(run.params, verified, [0], [token])
        tokens = run.ending.cut([token])
        self._sample.commit(tokens)
        run.tokens += tokens
        return Step(tokens, num_accepted=0, logprobs=logprobs, features=features, stats=run.stats)


class TargetView:
    """Shows acceptance what the target says after the nodes of one tree.

    The root is at position `length`. What is shown is a draw from p, or p itself, as the request's
    sampling makes it of the target's logits.
    """

    def __init__(self, sample: Sampler, tree: TokenTree, verified: Verified, length: int) -> None:
        self._sample = sample
        self._tree = tree
        self._verified = verified
        self._length = length
        self._is_argmax = sample.params.is_plainly_greedy

    def draw(self, node: int) -> int:
        """Returns the target's own token after `node`; greedy: the argmax."""
        token = None
        if self._is_argmax:
            token = self._verified.best(node)
        elif self._sample.reads_top and (top := self._verified.top(node)) is not None:
            token = self._sample.draw_from_top(top, self._place(node)[0])
        if token is not None:
            return token
        return self._sample(self._verified.row(node), *self._place(node))

    def p(self, node: int) -> np.ndarray:
        """Returns the target's processed distribution f64[V] after `node`."""
        return self._sample.probabilities(self._verified.row(node), *self._place(node))

    def _place(self, node: int) -> tuple[int, Sequence[int] | np.ndarray]:
        """Returns the position after `node` and the drafted tokens that lead there."""
        tree = self._tree
        path = tree.token_N[tree.path(node)[1:]] if self._sample.reads_path else ()
        return self._length + int(tree.depth_N[node]) + 1, path


Accept = Callable[[TokenTree, TargetView], tuple[list[int], int]]


def _acceptance(params: SamplingParams, sample: Sampler, budget: Budget) -> tuple[Accept, Budget]:
    """Returns the request's rule of acceptance, and the budget that goes with it.

    Acceptance by rejection needs children that are drawn from the drafter.
    """
    if params.rule == "rejection":
        rng = sample.stream()
        num_chains = -(-(budget.max_nodes - 1) // CHAIN_LENGTH)
        widths = params.draw_widths or (max(1, num_chains), *[1] * (CHAIN_LENGTH - 1))
        growth = Drawn(tuple(widths), params.temperature, params.draw_with_replacement, rng)
        drawing = replace(budget, growth=growth)
        return lambda tree, view: by_rejection(tree, view.p, rng.random), drawing
    if params.rule == "typical":
        epsilon, delta = params.typical_epsilon, params.typical_delta
        delta = epsilon**0.5 if delta is None else delta
        return lambda tree, view: by_typical(tree, view.p, epsilon, delta), budget
    budget = budget.at(params.temperature)
    if params.temperature:
        budget = replace(budget, coupling=Coupling(sample.noise, params.temperature))
    return lambda tree, view: by_target_sampling(tree, view.draw), budget


def _logprobs(
    params: SamplingParams, verified: Verified, nodes: list[int], tokens: list[int]
) -> list[TokenLogprob]:
    """Returns the log-probability of each token after its node, or an empty list if the request
    asks for none."""
    if params.logprobs is None:
        return []
    pairs = zip(nodes, tokens, strict=True)
    return [token_logprob(verified.row(node), token, params.logprobs) for node, token in pairs]
