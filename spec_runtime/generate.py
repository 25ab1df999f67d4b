"""Runs the loop: draft -> verify -> accept -> commit. Plain decoding is the one-node tree.

The loop is a Python generator of committed tokens. Text stays outside: a hook of `Ending` says
which token ends a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spec_runtime.accept import by_rejection, by_target_sampling, by_typical
from spec_runtime.bundle.manifest import FEATURES
from spec_runtime.constraints.path_masks import PathMasks
from spec_runtime.conversations.row_store import RestoredRows
from spec_runtime.proposers.base import Proposer
from spec_runtime.sampling import Sampler, SamplingParams, TokenLogprob, token_logprob
from spec_runtime.stats import Clock, Stats
from spec_runtime.step import Ending, Step, count_step, end_step
from spec_runtime.target import Target, Verified, Wants
from spec_runtime.trees.budget import Budget, Drawn
from spec_runtime.trees.coupling import Coupling
from spec_runtime.trees.tree import TokenTree

CHAIN_LENGTH = 4  # of the chains drawn for acceptance by rejection, unless widths are given


@dataclass
class Generation:
    """Holds one generation: what runs it, the prompt, how it samples, and the answer so far.

    The first `reused` tokens of the prompt are in the target's and the proposer's state already.
    `features` names the target's outputs that the proposer's features are made of.
    `restored` says that the target's rows were brought back from a copy, of which the proposer
    knows nothing. `masks` are those of the request's grammar, which no accepted token is outside
    of, whatever the proposer drafts.
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
    tokens: list[int] = field(default_factory=list)


def generate(run: Generation) -> Generator[Step, None, None]:
    """Yields the prompt's step, then one step per verify pass, until `run.ending` says stop.

    Whenever a step is out, target.length = prompt + tokens - 1: the last token has no row yet. The
    loop goes on from the last of `run.tokens`, also where somebody else committed further steps
    while it waited. Raises Interrupted if `run.ending` says stop within the prompt.
    """
    target, proposer, params, stats = run.target, run.proposer, run.params, run.stats
    sample = Sampler(params, target.vocab_size, run.prompt, run.masks)
    wants = Wants(run.features if proposer.wants_features else (), sample.reads_top)
    accept, budget = _acceptance(params, sample, run.budget)
    clock = Clock(stats.timings)
    step = _read_prompt(run, sample, accept, wants)
    clock.lap("prefill")
    yield step

    while run.ending.goes_on():
        clock.start()
        engine_seconds = target.run_seconds + proposer.run_seconds

        limited = budget.within(run.ending.remaining - 1).rooted_at(target.length)
        tree = proposer.propose(run.tokens[-1], limited)
        clock.lap("draft")
        verified = target.verify(tree, wants)
        clock.lap("verify")
        path, token = accept(tree, TargetView(sample, tree, verified, target.length))
        clock.lap("accept")
        step = end_step(path, [*tree.token_N[path[1:]].tolist(), token], run.ending)
        step = replace(
            step,
            features=verified.features(step.path) if wants.features else None,
            verified=verified,
            logprobs=_logprobs(params, verified, step.path, step.tokens),
            num_drafted=tree.num_nodes - 1,
            tree=tree,
            stats=stats,
        )
        clock.lap("other")
        target.commit(step.path)
        sample.commit(step.tokens)
        proposer.commit(step)
        run.tokens += step.tokens
        clock.lap("commit")

        stats.engine_seconds += target.run_seconds + proposer.run_seconds - engine_seconds
        count_step(stats, step, bool(tree.children(step.path[-1])))
        clock.lap("other")
        yield step


def _read_prompt(run: Generation, sample: Sampler, accept: Accept, wants: Wants) -> Step:
    """Runs the new part of the prompt, starts the proposer, and returns the first token's step."""
    target, prompt = run.target, run.prompt
    verified, features = target.prefill(prompt[run.reused :], wants, run.ending.goes_on)
    tree = TokenTree.root(prompt[-1])
    _, token = accept(tree, TargetView(sample, tree, verified, target.length - 1))
    if run.restored is None:
        run.proposer.start(prompt, features, run.reused)
    else:
        run.proposer.start(prompt, run.restored.features_before(features), 0)
    logprobs = _logprobs(run.params, verified, [0], [token])
    tokens = run.ending.cut([token])
    sample.commit(tokens)
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
