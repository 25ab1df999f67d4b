"""Runs the loop: draft -> verify -> accept -> commit. Plain decoding is the one-node tree.

An answer on its way is data, a `Decoding`. `take_pass` takes any number of them from one pass of
the target to the next; one by itself is the same loop. Text stays outside: a hook of `Ending` says
which token ends a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spec_runtime.backends import GraphRun, run_each
from spec_runtime.bundle.manifest import FEATURES
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import Interrupted
from spec_runtime.loop.accept import by_rejection, by_target_sampling, by_typical
from spec_runtime.loop.proposer import Proposer
from spec_runtime.loop.row_store import RestoredRows
from spec_runtime.loop.stats import Clock, Stats
from spec_runtime.loop.step import Ending, Step, count_step, end_step
from spec_runtime.loop.target import PREFILL_ROWS, Asked, Target, Verified, Wants, idle
from spec_runtime.sampling import Sampler, SamplingParams, TokenLogprob, token_logprob
from spec_runtime.trees.budget import Budget, Drawn
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import TokenTree

CHAIN_LENGTH = 4  # of the chains drawn for acceptance by rejection, unless widths are given

# Runs what several want of the next pass; the answers are valid until the pass after it.
Verify = Callable[[Sequence["Decoding"], Sequence[Asked]], Sequence[Verified]]


def verify_alone(decodings: Sequence[Decoding], asked: Sequence[Asked]) -> list[Verified]:
    """Runs a pass of its own for each of these."""
    return [each.target.verify(*what) for each, what in zip(decodings, asked, strict=True)]


def take_pass(
    decodings: Sequence[Decoding],
    run_drafts: Callable[[Sequence[GraphRun]], None] = run_each,
    verify: Verify = verify_alone,
) -> dict[Decoding, Exception]:
    """Takes these from one pass of the target to the next: draft -> verify -> accept -> commit.

    Each has its `step` afterwards. `run_drafts` runs what their drafters wait for, and `verify`
    the pass. Returns errors: one ends its own decoding only, or all that share a run that fails.
    """
    asked, errors = draft(decodings, run_drafts)
    drafted = list(asked)
    if not drafted:
        return errors
    try:
        found = verify(drafted, list(asked.values()))
    except Exception as error:
        return errors | dict.fromkeys(drafted, error)
    for decoding, verified in zip(drafted, found, strict=True):
        begin = time.perf_counter()
        try:
            decoding.accept(verified)  # and commits
        except Interrupted:
            decoding.is_interrupted = True
        except Exception as error:
            errors[decoding] = error
        decoding.host_seconds += time.perf_counter() - begin
    return errors


def draft(
    decodings: Sequence[Decoding], run_drafts: Callable[[Sequence[GraphRun]], None]
) -> tuple[dict[Decoding, Asked], dict[Decoding, Exception]]:
    """Returns what each wants of the next pass, and errors; runs of their drafters that they come
    to at the same time are made together."""
    asked: dict[Decoding, Asked] = {}
    errors: dict[Decoding, Exception] = {}
    drafting = {decoding: decoding.proposing() for decoding in decodings}
    while True:
        runs: dict[Decoding, GraphRun] = {}
        for decoding, proposing in drafting.items():
            begin = time.perf_counter()
            try:
                run = next(proposing)
                run.start()  # beside the others'
                runs[decoding] = run
            except StopIteration as end:
                asked[decoding] = end.value
            except Interrupted:
                decoding.is_interrupted = True
            except Exception as error:
                errors[decoding] = error
            decoding.host_seconds += time.perf_counter() - begin
        if not runs:
            return asked, errors
        drafting = {decoding: drafting[decoding] for decoding in runs}
        begin = time.perf_counter()
        try:
            run_drafts(list(runs.values()))
        except Exception as error:
            return asked, errors | dict.fromkeys(runs, error)
        for decoding in runs:
            decoding.host_seconds += (time.perf_counter() - begin) / len(runs)


@dataclass(eq=False)
class Decoding:
    """Holds one answer on its way: what runs it, the prompt, how it samples, and the tokens so far.

    Whoever runs passes asks `goes_on`, then what the pass has to compute (`proposing`): a chunk of
    the prompt until all of it is read, and then a draft. `accept` takes in what the target says of
    it. Between the two nothing is committed. `step` is what the last pass committed, None while the
    prompt is read. Whenever there is a step, target.length = prompt + tokens - 1: the last token
    has no row yet.

    The first `reused` tokens of the prompt are in the target's and the proposer's state already.
    `features` names the target's outputs that the proposer's features are made of. `restored` says
    that the target's rows were brought back from a copy, of which the proposer knows nothing.
    `masks` are those of the request's grammar, which no accepted token is outside of, whatever the
    proposer drafts. `scores` takes the log-probabilities of the prompt's tokens, none of which may
    be reused. With `only_reads` nothing comes after the prompt.

    `max_rows` and `chunk_rows` bound what may be asked of the next pass: a tree's nodes, and tokens
    of the prompt. `meanwhile` is called while a device runs the pass, see Target.verify.
    `host_seconds` counts what the host and the drafter take.
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
    scores: PromptScores | None = None
    only_reads: bool = False
    tokens: list[int] = field(default_factory=list)
    step: Step | None = None
    meanwhile: Callable[[], None] = idle
    max_rows: int = PREFILL_ROWS
    chunk_rows: int = PREFILL_ROWS
    host_seconds: float = 0.0
    is_in_step: bool = True  # or within the prompt: the rows are no whole step's
    is_interrupted: bool = False  # within a step, as where a grammar's mask takes too long

    def __post_init__(self) -> None:
        self._sample = Sampler(self.params, self.target.vocab_size, self.prompt, self.masks)
        names = self.features if self.proposer.wants_features else ()
        self._wants = Wants(names, self._sample.reads_top)
        self._accept, self._budget = _acceptance(self.params, self._sample, self.budget)
        self._clock = Clock(self.stats.timings)
        self._num_read = self.reused  # tokens of the prompt that have rows
        self._chunks_TF: list[np.ndarray] = []  # features of the prompt's new rows
        self._engine_seconds = 0.0  # the graphs' before the pass

    @property
    def num_unread(self) -> int:
        """Counts the prompt's tokens that have no rows yet."""
        return len(self.prompt) - self._num_read

    @property
    def is_reading(self) -> bool:
        return self.num_unread > 0

    def goes_on(self) -> bool:
        """Asks, before a pass, whether there is one."""
        return not self.is_interrupted and self.ending.goes_on()

    def drop_rows(self) -> None:
        """Forgets the rows of a prompt or a step that is not ended, as if it had never begun."""
        # of rows that were brought back the proposer knows nothing
        self.target.truncate(self.reused if self.restored is None else 0)
        self.is_in_step = False

    def proposing(self) -> Generator[GraphRun, None, Asked]:
        """Yields the drafter's runs and returns the arguments of `Target.verify` for the next pass:
        a tree, or while the prompt is read, some of its tokens."""
        target, num_rows = self.target, self.chunk_rows
        self._clock.start()
        self.is_in_step, self.step = True, None
        if self.is_reading:
            if self.num_unread == num_rows + 1 > 3:  # a row by itself is computed in another form
                num_rows -= 1
            chunk = TokenTree.chain(self.prompt[self._num_read :][:num_rows])
            return Asked(chunk, self._wants, self.scores is None, self.meanwhile)
        self._engine_seconds = target.run_seconds + self.proposer.run_seconds
        limited = self._budget.within(self.ending.remaining - 1).rooted_at(target.length)
        tree = yield from self.proposer.drafting(self.tokens[-1], limited.at_most(self.max_rows))
        if not self.proposer.reads_answers:  # nothing is accepted after an end
            tree = tree.ending_at(self.ending.stop_ids)
        self._clock.lap("draft")
        return Asked(tree, self._wants, meanwhile=self.meanwhile)

    def accept(self, verified: Verified) -> None:
        """Commits what the pass over the last proposal says, which is the `step` from now on."""
        if self.is_reading:
            self.step = self._accept_chunk(verified)
        else:
            self.step = self._accept_draft(verified)
        self.is_in_step = self.is_reading

    def _accept_draft(self, verified: Verified) -> Step:
        target, tree, stats, clock = self.target, verified.tree, self.stats, self._clock
        clock.lap("verify")
        path, token = self._accept(tree, TargetView(self._sample, tree, verified, target.length))
        clock.lap("accept")
        step = end_step(path, [*tree.token_N[path[1:]].tolist(), token], self.ending)
        step = replace(
            step,
            features=verified.features(step.path) if self._wants.features else None,
            verified=verified,
            logprobs=_logprobs(self.params, verified, step.path, step.tokens),
            num_drafted=tree.num_nodes - 1,
            tree=tree,
            stats=stats,
        )
        clock.lap("other")
        target.commit(step.path)
        self._sample.commit(step.tokens)
        self.proposer.commit(step)
        self.tokens += step.tokens
        clock.lap("commit")

        seconds = target.run_seconds + self.proposer.run_seconds - self._engine_seconds
        stats.engine_seconds += seconds
        count_step(stats, step, bool(tree.children(step.path[-1])))
        clock.lap("other")
        return step

    def _accept_chunk(self, verified: Verified) -> Step | None:
        """Commits a chunk of the prompt; after the last one, starts the proposer and returns the
        first token's step."""
        num_rows = verified.tree.num_nodes
        if self.scores is not None:
            verified = self.scores.read(verified, self.prompt[self._num_read + 1 :])
        if self._wants.features:
            self._chunks_TF.append(verified.features(range(num_rows)))
        self.target.commit(range(num_rows))
        self._num_read += num_rows
        step = None if self.is_reading else self._begin(verified)
        self._clock.lap("prefill")
        return step

    def _begin(self, verified: Verified) -> Step | None:
        """Draws the first token from what the target says of the prompt's last row."""
        features = np.concatenate(self._chunks_TF) if self._chunks_TF else None
        self._chunks_TF = []
        if self.only_reads:
            token = None
            self.ending.finish_reason = "length"
        else:
            tree = TokenTree.root(self.prompt[-1])
            length = self.target.length - 1
            _, token = self._accept(tree, TargetView(self._sample, tree, verified, length))
        if self.restored is None:
            self.proposer.start(self.prompt, features, self.reused)
        else:
            self.proposer.start(self.prompt, self.restored.features_before(features), 0)
        if token is None:
            return None
        logprobs = _logprobs(self.params, verified, [0], [token])
        tokens = self.ending.cut([token])
        self._sample.commit(tokens)
        self.tokens += tokens
        return Step(tokens, 0, logprobs=logprobs, features=features, stats=self.stats)


class PromptScores:
    """Takes how likely the tokens of a prompt were: the log-probability of each but the first,
    under the target itself and after all tokens before it, and those of the `num_top` likeliest."""

    def __init__(self, num_top: int) -> None:
        self.entries: list[TokenLogprob] = []
        self._num_top = num_top

    def read(self, verified: Verified, following: Sequence[int]) -> Verified:
        """Takes in the rows of a chunk, which `following` come after; returns the last one, as a
        pass that is asked for no other has it."""
        for row, token in zip(range(verified.tree.num_nodes), following, strict=False):
            self.entries.append(token_logprob(verified.row(row), token, self._num_top))
        return verified.last()


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
