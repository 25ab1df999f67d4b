"""Generates text with one drafter on one target, reusing the KV rows of a common prefix.

A thin layer over generate.py (tokens) and text.py (text). An engine remembers which tokens the
target's cache holds, as long as no other engine has taken the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Unpack

from spec_runtime.backends.turns import Turn
from spec_runtime.generate import generate
from spec_runtime.proposers.base import Proposer
from spec_runtime.sampling import SamplingOptions, SamplingParams, TokenLogprob, checked_flag
from spec_runtime.stats import Stats
from spec_runtime.step import Limits, Step, StepRunner
from spec_runtime.target import Target, Wants
from spec_runtime.text import Codec, Prompt, TextStream, encode_prompt
from spec_runtime.trees.budget import Budget

JUDGED_STEPS = 64  # a shorter generation says little about its drafter

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class GenerationResult:
    """Holds one answer.

    `text` is without the stop string; `token_ids` include the EOS or the token that ended it.
    `acceptance` is greedy, target_sampling, rejection or typical. `logprobs` belong to `token_ids`,
    if the request asked for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled
    stats: Stats
    acceptance: str = "greedy"
    logprobs: list[TokenLogprob] | None = None

    @property
    def preserves_distribution(self) -> bool:
        """Says whether the tokens follow the target's distribution: typical acceptance's do not."""
        return self.acceptance != "typical"


class OpenedDrafter(NamedTuple):
    """A drafter ready to draft: its proposer and the trees that it may spend.

    `taps` are the target's layers that it reads. `expected_accepted_length` was measured when the
    bundle was built or checked, if it was. `fused` runs greedy requests, if the bundle has such a
    graph. `is_tuned` says that a profile of `spec-runtime tune` chose the budget.
    """

    name: str
    proposer: Proposer
    budget: Budget
    taps: tuple[int, ...] = ()
    expected_accepted_length: float | None = None
    fused: StepRunner | None = None
    is_tuned: bool = False


class Opener(Protocol):
    """Opens further drafters of the same bundle, see load.DrafterOpener."""

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter: ...


class Engine:
    """One drafter on one target, which several engines may share, each with a drafter of its own.

    Threads may share an engine or a target: its generations run one after the other, in the order
    of their calls, and each gives what it would give alone. `generate` waits for those before it. A
    stream waits at its first piece, and from then on the others wait until it is exhausted, closed
    or dropped. A thread that would wait for the stream that it read last itself gets a
    RuntimeError. With asyncio, run each call, and the whole loop over a stream, in one worker
    thread (`asyncio.to_thread`).

    Raises ValueError if the drafter's trees are larger than what the target has room for.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Codec,
        drafter: OpenedDrafter,
        opener: Opener | None = None,
    ) -> None:
        if drafter.budget.max_nodes > target.max_nodes:
            raise ValueError(
                f"got trees of {drafter.budget.max_nodes} nodes, expected at most the bundle's "
                f"scratch of {target.max_nodes}"
            )
        self.target = target
        self.tokenizer = tokenizer
        self.last_result: GenerationResult | None = None
        self._opened = drafter
        self._opener = opener
        self._expected = drafter.expected_accepted_length  # None once a warning is out
        self._turn: Turn | None = None  # of our last run
        self._held: list[int] = []  # tokens whose KV the target has while its rows are that turn's

    @property
    def drafter(self) -> str:
        """Names the drafter; "+prompt_lookup" follows where lookup's candidates are merged."""
        return self._opened.name

    @property
    def proposer(self) -> Proposer:
        return self._opened.proposer

    @property
    def budget(self) -> Budget:
        return self._opened.budget

    @property
    def wants(self) -> Wants:
        """Says what the proposer reads of the target's runs."""
        return Wants(self.proposer.wants_features, self._opened.taps)

    @property
    def is_tuned(self) -> bool:
        """Says whether a profile of `spec-runtime tune` chose the budget."""
        return self._opened.is_tuned

    @property
    def fused(self) -> StepRunner | None:
        """Returns the fused step if greedy requests take it."""
        return self._opened.fused

    def with_drafter(self, name: str | None, lookup: bool | None = None) -> Engine:
        """Returns an engine on the same target with another drafter ("none" = plain decoding).

        `name` and `lookup` are those of `load`. Raises ValueError for an unknown name or a wrong
        type, and if this engine was not loaded from a bundle.
        """
        if self._opener is None:
            raise ValueError("this engine was not loaded from a bundle: it has one drafter only")
        if lookup is not None:
            lookup = checked_flag("lookup", lookup)
        opened = self._opener.open(name, lookup)
        return Engine(self.target, self.tokenizer, opened, self._opener)

    def with_budget(self, budget: Budget) -> Engine:
        """Returns an engine like this one whose trees may spend `budget`."""
        opened = self._opened._replace(budget=budget)
        return Engine(self.target, self.tokenizer, opened, self._opener)

    def observed(
        self, wrap: Callable[[Proposer], Proposer], budget: Budget | None = None
    ) -> Engine:
        """Returns an engine on the same target whose proposer is this one's, wrapped by `wrap`.

        It has this engine's budget unless another is given, and takes no fused step.
        """
        opened = OpenedDrafter(
            self.drafter,
            wrap(self.proposer),
            self.budget if budget is None else budget,
            self._opened.taps,
        )
        return Engine(self.target, self.tokenizer, opened)

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """Returns the whole answer to a string, chat messages or token ids.

        `raw` takes a string past the chat template. `reuse` keeps the KV of the prefix shared with
        the previous call, unless there is a seed and the target is not fp32, whose rows would then
        depend on that call. `sampling` are the fields of SamplingParams. Raises ValueError for bad
        arguments and for a prompt longer than the context, and RuntimeError if this thread has not
        finished a stream on the same target.
        """
        with closing(self._begin(prompt, raw, system, reuse, sampling)[0]) as steps:
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    result: GenerationResult = end.value
                    return result

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[str, None, GenerationResult]:
        """Yields pieces of the text as they come; see `generate` for the arguments.

        Closing the generator early is fine. The result is in `last_result`, and is also what the
        generator returns (`result = yield from engine.stream(…)`): where threads share the engine,
        `last_result` may already be another call's.
        """
        steps, text = self._begin(prompt, raw, system, reuse, sampling)
        return _pieces(steps, text)

    def steps(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Step, None, GenerationResult]:
        """Yields what each step commits, and returns the result; the first step is the prompt's.
        See `generate` and `stream`."""
        return self._begin(prompt, raw, system, reuse, sampling)[0]

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        system: str | None = None,
        control_tokens: bool | None = None,
    ) -> list[int]:
        """Returns the prompt's token ids, checked against vocabulary and context.

        `control_tokens` lets the names of control tokens in the prompt, such as "<|im_end|>",
        become these tokens. None allows it in raw prompts alone: what a user types is text.
        """
        if system is not None and not isinstance(system, str):
            raise ValueError(f"got system {system!r:.60}, expected a string, or None for none")
        ids = encode_prompt(self.tokenizer, prompt, raw, system, control_tokens)
        if len(ids) > self.target.max_length:
            raise ValueError(
                f"got a prompt of {len(ids)} tokens, expected at most {self.target.max_length}, the"
                " bundle's context; shorten it or build with a larger --max-length"
            )
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            raise ValueError(
                f"got token ids from {min(ids)} to {max(ids)}, expected 0 to "
                f"{self.target.vocab_size - 1}"
            )
        return ids

    def _begin(
        self,
        prompt: Prompt,
        raw: bool,
        system: str | None,
        reuse: bool,
        sampling: SamplingOptions,
    ) -> tuple[Generator[Step, None, GenerationResult], TextStream]:
        """Checks the arguments; returns the steps, none of which has run yet, and their text."""
        params = SamplingParams(**sampling)
        raw, reuse = checked_flag("raw", raw), checked_flag("reuse", reuse)
        text = TextStream(self.tokenizer.decode, params.stop)
        return self._run(self.encode(prompt, raw, system), params, reuse, text), text

    def _run(
        self, prompt: list[int], params: SamplingParams, reuse: bool, text: TextStream
    ) -> Generator[Step, None, GenerationResult]:
        self._require_strictly_greedy(params)
        with self.target.turns.take() as turn:
            return (yield from self._run_in(turn, prompt, params, reuse, text))

    def _run_in(
        self,
        turn: Turn,
        prompt: list[int],
        params: SamplingParams,
        reuse: bool,
        text: TextStream,
    ) -> Generator[Step, None, GenerationResult]:
        target, proposer = self.target, self.proposer
        reused = self._num_reusable(prompt, params) if reuse else 0
        target.rows_of = None  # whatever interrupts this run, no later one relies on its rows
        limits = self._limits(params, len(prompt), text)
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=reused)
        out: list[int] = []
        logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        is_consistent = False
        try:
            target.truncate(reused)
            proposer.truncate(reused)
            if limits.finish_reason is None:
                steps = generate(
                    target,
                    proposer,
                    prompt,
                    reused,
                    params,
                    limits,
                    self.budget,
                    stats,
                    self._opened.taps,
                    self.fused,
                )
                with closing(steps):  # a fused step hands its rows over before the turn ends
                    for step in steps:
                        out += step.tokens
                        if logprobs is not None:
                            logprobs += step.logprobs
                        is_consistent = True
                        yield step
                        turn.resume()
                        is_consistent = limits.finish_reason is not None
            is_consistent = True
        finally:
            if is_consistent:  # not interrupted inside a step
                self._held = (prompt + out)[: target.length]
                target.rows_of = self._turn = turn
            text.finish()
            reason = limits.finish_reason or "cancelled"
            result = GenerationResult(text.text, out, reason, stats, params.rule, logprobs)
            self.last_result = result
            if params.rule != "typical":  # its lengths are what its threshold makes them
                self._warn_of_doubts(stats, is_greedy=params.temperature == 0)
        return result

    def _require_strictly_greedy(self, params: SamplingParams) -> None:
        is_processed = params.temperature > 0 or params.has_penalties or params.logit_bias
        if self.target.strict_gap is not None and is_processed:
            raise ValueError(
                f"got temperature {params.temperature}, penalties or a logit bias with strict, "
                "expected none: its near ties are those of the raw logits"
            )

    def _num_reusable(self, prompt: list[int], params: SamplingParams) -> int:
        """Returns how many of the prompt's rows the target still has from our last run.

        A row depends a little on which others were computed with it. In fp32 these are some last
        bits. Below, rounding enlarges them so far that a seed would not give the same tokens again.
        """
        if self._turn is None or self.target.rows_of is not self._turn:
            return 0
        if params.seed is not None and self.target.precision != "fp32":
            return 0
        # One token fewer is reused: the last row's feature and logits have to be computed anew.
        return max(0, _common_length(self._held, prompt) - 1)

    def _limits(self, params: SamplingParams, prompt_length: int, text: TextStream) -> Limits:
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.tokenizer.eos)
        max_tokens = min(params.max_new_tokens, self.target.max_length - prompt_length)
        return Limits(max_tokens, stop_ids, text.push)

    def _warn_of_doubts(self, stats: Stats, is_greedy: bool) -> None:
        """Warns, once, of the two signatures of wrong weights.

        A wrong drafter changes no token, only the speed, so that nothing else would show it.
        """
        expected, got = self._expected, stats.accepted_length
        if expected is None or stats.steps < JUDGED_STEPS:
            return
        doubt = None
        if sum(stats.depth_trials) == sum(stats.depth_accepts) > 0:
            doubt = f"all drafted tokens were accepted in {stats.steps} steps"
        elif is_greedy and got < expected / 2:  # sampled texts are harder to guess
            doubt = f"accepted length {got:.2f} in {stats.steps} steps, expected about "
            doubt += f"{expected:.2f}"
        if doubt is not None:
            self._expected = None
            log.warning(
                "drafter %s: %s; unless the text is unusual, its weights are not right: run "
                "spec-export check or build the bundle again",
                self.drafter,
                doubt,
            )


def _pieces(
    steps: Generator[Step, None, GenerationResult], text: TextStream
) -> Generator[str, None, GenerationResult]:
    with closing(steps):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: GenerationResult = end.value
                break
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
        return result


def _common_length(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
