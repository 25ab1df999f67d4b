"""The loop: draft -> verify -> accept -> commit. Plain decoding is the one-node tree.

A Python generator of committed tokens. It knows no text (a hook says which token ends a stop
string) and no kind of drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from spec_runtime.accept import by_rejection, by_target_sampling, by_typical
from spec_runtime.proposers.base import Proposer
from spec_runtime.sampling import Sampler, SamplingParams, TokenLogprob, token_logprob
from spec_runtime.stats import Clock, Stats
from spec_runtime.step import Limits, Step
from spec_runtime.target import Target, Verified
from spec_runtime.trees.budget import Budget, Drawn
from spec_runtime.trees.tree import TokenTree

if TYPE_CHECKING:
    from spec_runtime.fused import FusedSteps

CHAIN_LENGTH = 4  # of the chains drawn for acceptance by rejection, unless widths are given


def generate(
    target: Target,
    proposer: Proposer,
    prompt: list[int],
    reused: int,
    params: SamplingParams,
    limits: Limits,
    budget: Budget,
    stats: Stats,
    fused: FusedSteps | None = None,
) -> Iterator[Step]:
    """Yields the prompt's step, then one step per verify pass, until `limits` says stop.

    The first `reused` tokens of the prompt are in the target's and the proposer's state already.
    `fused` takes over, while it can, if the request is plainly greedy. Whenever a step is out,
    target.length = prompt + tokens - 1: the last token has no row yet.
    """
    sample = Sampler(params, target.vocab_size, prompt)
    target.wants_top = sample.reads_top
    accept, budget = _acceptance(params, sample, budget)
    clock = Clock(stats.timings)
    verified, features = target.prefill(prompt[reused:], proposer.wants_features)
    tree = TokenTree.root(prompt[-1])
    _, token = accept(tree, _Answers(sample, tree, verified, target.length - 1))
    proposer.start(prompt, features, reused)
    logprobs = _logprobs(params, verified, [0], [token])
    step = Step(limits.cut([token]), num_accepted=0, logprobs=logprobs)
    sample.commit(step.tokens)
    clock.lap("prefill")
    yield step
    if fused is not None and params.is_plainly_greedy and target.strict_gap is None:
        token = yield from fused.run(token, limits, stats, clock)

    while limits.finish_reason is None:
        clock.start()
        engine_seconds = target.run_seconds + proposer.run_seconds

        tree = proposer.propose(token, budget.within(limits.remaining - 1))
        clock.lap("draft")
        verified = target.verify(tree, proposer.wants_features)
        clock.lap("verify")
        path, token = accept(tree, _Answers(sample, tree, verified, target.length))
        clock.lap("accept")
        step = _kept(tree, path, token, verified, limits, params, proposer.wants_features)
        clock.lap("other")
        target.commit(step.path)
        sample.commit(step.tokens)
        proposer.commit(step)
        clock.lap("commit")

        stats.engine_seconds += target.run_seconds + proposer.run_seconds - engine_seconds
        _count(stats, tree, step)
        clock.lap("other")
        yield step


class _Answers:
    """What the target says after the nodes of one tree, whose root is at position `length`: draws
    from p, or p itself, as the request's sampling makes it."""

    def __init__(self, sample: Sampler, tree: TokenTree, verified: Verified, length: int) -> None:
        self._sample = sample
        self._tree = tree
        self._verified = verified
        self._length = length
        self._is_argmax = sample.params.is_plainly_greedy

    def draw(self, node: int) -> int:
        token = None
        if self._is_argmax:
            token = self._verified.best(node)
        elif self._sample.reads_top and (top := self._verified.top(node)) is not None:
            token = self._sample.draw_from_top(top, self._place(node)[0])
        if token is not None:
            return token
        return self._sample(self._verified.row(node), *self._place(node))

    def p(self, node: int) -> np.ndarray:
        return self._sample.probabilities(self._verified.row(node), *self._place(node))

    def _place(self, node: int) -> tuple[int, Sequence[int] | np.ndarray]:
        """The position asked for, and the tokens between the committed ones and it."""
        tree = self._tree
        path = tree.token_N[tree.path(node)[1:]] if self._sample.reads_path else ()
        return self._length + int(tree.depth_N[node]) + 1, path


Accept = Callable[[TokenTree, _Answers], tuple[list[int], int]]


def _acceptance(params: SamplingParams, sample: Sampler, budget: Budget) -> tuple[Accept, Budget]:
    """The request's rule, and the budget: for acceptance by rejection children are drawn."""
    if params.rule == "rejection":
        rng = sample.stream()
        num_chains = -(-(budget.max_nodes - 1) // CHAIN_LENGTH)
        widths = params.draw_widths or (max(1, num_chains), *[1] * (CHAIN_LENGTH - 1))
        growth = Drawn(tuple(widths), params.temperature, params.draw_with_replacement, rng)
        drawing = replace(budget, growth=growth)
        return lambda tree, answers: by_rejection(tree, answers.p, rng.random), drawing
    if params.rule == "typical":
        epsilon, delta = params.typical_epsilon, params.typical_delta
        delta = epsilon**0.5 if delta is None else delta
        return lambda tree, answers: by_typical(tree, answers.p, epsilon, delta), budget
    return lambda tree, answers: by_target_sampling(tree, answers.draw), budget


def _logprobs(
    params: SamplingParams, verified: Verified, nodes: list[int], tokens: list[int]
) -> list[TokenLogprob]:
    """Of each token behind its node, if the request wants them."""
    if params.logprobs is None:
        return []
    pairs = zip(nodes, tokens, strict=True)
    return [token_logprob(verified.row(node), token, params.logprobs) for node, token in pairs]


def _kept(
    tree: TokenTree,
    path: list[int],
    bonus: int,
    verified: Verified,
    limits: Limits,
    params: SamplingParams,
    wants_features: bool,
) -> Step:
    """The step after truncation: if the last token kept was drafted, its row is not kept."""
    tokens = limits.cut([*tree.token_N[path[1:]].tolist(), bonus])
    rows = path[: len(tokens)]
    features = verified.features(rows) if wants_features else None
    logprobs = _logprobs(params, verified, rows, tokens)
    return Step(tokens, min(len(tokens), len(path) - 1), rows, features, verified, logprobs)


def _count(stats: Stats, tree: TokenTree, step: Step) -> None:
    has_bonus = step.num_accepted < len(step.tokens)
    missed = has_bonus and bool(tree.children(step.path[-1]))
    stats.count(len(step.tokens), step.num_accepted, tree.num_nodes - 1, missed)
