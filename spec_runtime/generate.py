"""The loop: draft -> verify -> accept -> commit. Plain decoding is the one-node tree.

A Python generator of committed tokens. It knows no text (a hook says which token ends a stop
string) and no kind of drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from spec_runtime.accept import by_target_sampling
from spec_runtime.proposers import Proposer
from spec_runtime.sampling import Sampler, SamplingParams
from spec_runtime.stats import Clock, Stats
from spec_runtime.target import Target, Verified
from spec_runtime.tree import Budget, TokenTree


@dataclass(frozen=True)
class Step:
    """What one verify pass committed: as many tokens as rows.

    tokens: the accepted draft, then the bonus (unless truncated before it). path: the committed
    rows as node ids, root first. features f32[P, F]: of these rows, if the proposer wants them.
    The step of the prompt has the first token and no rows.
    """

    tokens: list[int]
    num_accepted: int  # of `tokens`, how many were drafted
    path: list[int] = field(default_factory=list)
    features: np.ndarray | None = field(default=None, repr=False)
    verified: Verified | None = field(default=None, repr=False)  # until the target's next run


class Limits:
    """Where generation ends: EOS and stop ids, a hook for stop strings, the number of tokens."""

    def __init__(
        self,
        max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
        ends_stop_string: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.remaining = max_tokens
        self.finish_reason: str | None = None if max_tokens > 0 else "length"
        self._stop_ids = stop_ids
        self._ends_stop_string = ends_stop_string

    def cut(self, tokens: list[int]) -> list[int]:
        """The tokens up to and including the one that ends generation, if one of them does."""
        for num_kept, token in enumerate(tokens, 1):
            self.remaining -= 1
            # the hook is asked first: it has to see every committed token
            if self._ends_stop_string(token) or token in self._stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return tokens[:num_kept]
        return tokens


def generate(
    target: Target,
    proposer: Proposer,
    prompt: list[int],
    reused: int,
    params: SamplingParams,
    limits: Limits,
    budget: Budget,
    stats: Stats,
) -> Iterator[Step]:
    """Yields the prompt's step, then one step per verify pass, until `limits` says stop.

    The first `reused` tokens of the prompt are in the target's and the proposer's state already.
    Whenever a step is out, target.length = prompt + tokens - 1: the last token has no row yet.
    """
    sample = Sampler(params, target.vocab_size)
    clock = Clock(stats.timings)
    verified, features = target.prefill(prompt[reused:], proposer.wants_features)
    token = sample(verified.row(0), target.length)
    proposer.start(prompt, features, reused)
    step = Step(limits.cut([token]), num_accepted=0)
    clock.lap("prefill")
    yield step

    while limits.finish_reason is None:
        clock.start()
        engine_seconds = target.run_seconds + proposer.run_seconds

        tree = proposer.propose(token, budget.within(limits.remaining - 1))
        clock.lap("draft")
        verified = target.verify(tree, proposer.wants_features)
        clock.lap("verify")
        path, token = by_target_sampling(tree, _draw(sample, tree, verified, target.length))
        clock.lap("accept")
        step = _kept(tree, path, token, verified, limits, proposer.wants_features)
        clock.lap("other")
        target.commit(step.path)
        proposer.commit(step)
        clock.lap("commit")

        stats.engine_seconds += target.run_seconds + proposer.run_seconds - engine_seconds
        _count(stats, tree, step)
        clock.lap("other")
        yield step


def _draw(
    sample: Sampler, tree: TokenTree, verified: Verified, length: int
) -> Callable[[int], int]:
    """The target's own token after a node of the tree, whose root is at position `length`."""
    return lambda node: sample(verified.row(node), length + int(tree.depth_N[node]) + 1)


def _kept(
    tree: TokenTree,
    path: list[int],
    bonus: int,
    verified: Verified,
    limits: Limits,
    wants_features: bool,
) -> Step:
    """The step after truncation: if the last token kept was drafted, its row is not kept."""
    tokens = limits.cut([*tree.token_N[path[1:]].tolist(), bonus])
    rows = path[: len(tokens)]
    features = verified.features(rows) if wants_features else None
    return Step(tokens, min(len(tokens), len(path) - 1), rows, features, verified)


def _count(stats: Stats, tree: TokenTree, step: Step) -> None:
    has_bonus = step.num_accepted < len(step.tokens)
    missed = has_bonus and bool(tree.children(step.path[-1]))
    stats.count(len(step.tokens), step.num_accepted, tree.num_nodes - 1, missed)
