"""The public face: load a bundle, generate text, reuse the KV of the common prefix.

A thin layer over generate.py and text.py. It knows what the target's cache holds, and whose it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Unpack

from spec_runtime.generate import CHAIN_LENGTH, generate
from spec_runtime.proposers.base import Proposer
from spec_runtime.sampling import SamplingOptions, SamplingParams, TokenLogprob
from spec_runtime.stats import Stats
from spec_runtime.step import Limits, Step
from spec_runtime.target import Target
from spec_runtime.text import Codec, Prompt, TextStream, encode_prompt
from spec_runtime.trees.budget import Budget, Static
from spec_runtime.trees.templates import chain

if TYPE_CHECKING:
    from spec_runtime.fused import FusedSteps

DEFAULT_BUDGET = Budget(max_nodes=12)
DEFAULT_LOOKUP_NODES = 6
JUDGED_STEPS = 64  # a shorter generation says little about its drafter

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class GenerationResult:
    """text without the stop string; token_ids with the EOS or the token that ended it.

    acceptance: greedy, target_sampling, rejection or typical. logprobs: of each of `token_ids`, if
    asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # stop | length | cancelled
    stats: Stats
    acceptance: str = "greedy"
    logprobs: list[TokenLogprob] | None = None

    @property
    def preserves_distribution(self) -> bool:
        """Whether the tokens follow the target's distribution: typical acceptance's do not."""
        return self.acceptance != "typical"


class OpenedDrafter(NamedTuple):
    """taps: those it reads, of the target's. expected_accepted_length: as measured when the bundle
    was built or checked, if it was."""

    name: str
    proposer: Proposer
    budget: Budget
    taps: tuple[int, ...] = ()
    expected_accepted_length: float | None = None
    fused: FusedSteps | None = None
    is_tuned: bool = False


class Engine:
    """One drafter on one target. Several engines may share a target, one generation at a time."""

    def __init__(
        self,
        target: Target,
        tokenizer: Codec,
        proposer: Proposer,
        *,
        drafter: str = "none",
        budget: Budget = DEFAULT_BUDGET,
        taps: tuple[int, ...] | None = None,
        expected_accepted_length: float | None = None,
        open_drafter: Callable[[str | None, bool | None], OpenedDrafter] | None = None,
        fused: FusedSteps | None = None,
        is_tuned: bool = False,
    ) -> None:
        if budget.max_nodes > target.max_nodes:
            raise ValueError(
                f"got trees of {budget.max_nodes} nodes, expected at most the bundle's scratch of "
                f"{target.max_nodes}"
            )
        self.target = target
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.budget = budget
        self.is_tuned = is_tuned  # by a profile of `spec-runtime tune`
        self.last_result: GenerationResult | None = None
        self._proposer = proposer
        self._taps = target.taps if taps is None else taps
        self._expected = expected_accepted_length  # None once a warning is out
        self._open_drafter = open_drafter
        self._fused = fused
        self._run_id = object()
        self._held: list[int] = []  # tokens whose KV the target has, if its holder is our run

    def with_drafter(self, name: str | None, lookup: bool | None = None) -> Engine:
        """An engine on the same target and tokenizer with another drafter ("none" = plain).

        `lookup`: see `load`.
        """
        if self._open_drafter is None:
            raise ValueError("this engine was not loaded from a bundle: it has one drafter only")
        from spec_runtime.load import _engine

        return _engine(self.target, self.tokenizer, self._open_drafter, name, lookup)

    @property
    def proposer(self) -> Proposer:
        return self._proposer

    @property
    def fused(self) -> FusedSteps | None:
        """The fused step, if greedy requests take it."""
        return self._fused

    def observed(
        self, wrap: Callable[[Proposer], Proposer], budget: Budget | None = None
    ) -> Engine:
        """An engine on the same target with this one's proposer inside `wrap`'s, and its budget or
        another."""
        return Engine(
            self.target,
            self.tokenizer,
            wrap(self._proposer),
            drafter=self.drafter,
            budget=self.budget if budget is None else budget,
            taps=self._taps,
        )

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """The whole answer to a string, messages or token ids.

        raw: a string past the chat template. reuse: keep the KV of the prefix shared with the
        previous call. sampling: the fields of SamplingParams. ValueError for bad arguments and
        for a prompt longer than the context.
        """
        for _ in self.steps(prompt, raw=raw, system=system, reuse=reuse, **sampling):
            pass
        assert self.last_result is not None
        return self.last_result

    def stream(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[str, None, None]:
        """Pieces of the text as they come; closing it early is fine. See also `last_result`."""
        params = SamplingParams(**sampling)
        text = TextStream(self.tokenizer.decode, params.stop)
        steps = self._run(self.encode(prompt, raw, system), params, reuse, text)
        return _pieces(steps, text)

    def steps(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system: str | None = None,
        reuse: bool = True,
        **sampling: Unpack[SamplingOptions],
    ) -> Generator[Step, None, None]:
        """The committed tokens, step by step: the first is the prompt's."""
        params = SamplingParams(**sampling)
        text = TextStream(self.tokenizer.decode, params.stop)
        return self._run(self.encode(prompt, raw, system), params, reuse, text)

    def encode(self, prompt: Prompt, raw: bool = False, system: str | None = None) -> list[int]:
        """The prompt's token ids, checked against vocabulary and context."""
        ids = encode_prompt(self.tokenizer, prompt, raw, system)
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

    def _run(
        self, prompt: list[int], params: SamplingParams, reuse: bool, text: TextStream
    ) -> Generator[Step, None, None]:
        target, proposer = self.target, self._proposer
        is_processed = params.temperature > 0 or params.has_penalties or params.logit_bias
        if target.strict_gap is not None and is_processed:
            raise ValueError(
                f"got temperature {params.temperature}, penalties or a logit bias with strict, "
                "expected none: its near ties are those of the raw logits"
            )
        budget = self.budget
        if target.chains_only:
            params, budget = _as_chains(params, budget)
        ours = target.holder is self._run_id
        # one token early: the boundary's feature and logits have to be computed anew
        reused = max(0, _common_length(self._held, prompt) - 1) if ours and reuse else 0
        run_id = self._run_id = target.holder = object()  # ends any run still open on this target
        target.taps = self._taps
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.tokenizer.eos)
        max_tokens = min(params.max_new_tokens, target.max_length - len(prompt))
        limits = Limits(max_tokens, stop_ids, text.push)
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=reused)
        out: list[int] = []
        logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        is_consistent = False
        try:
            target.truncate(reused)
            proposer.truncate(reused)
            self._held = prompt[:reused]
            if limits.finish_reason is None:
                fused = self._fused
                for step in generate(
                    target, proposer, prompt, reused, params, limits, budget, stats, fused
                ):
                    out += step.tokens
                    if logprobs is not None:
                        logprobs += step.logprobs
                    is_consistent = True
                    yield step
                    if target.holder is not run_id:
                        raise RuntimeError("another generation has taken this target meanwhile")
                    is_consistent = limits.finish_reason is not None
            is_consistent = True
        finally:
            if target.holder is run_id:
                if not is_consistent:  # interrupted inside a step
                    target.truncate(0)
                    proposer.truncate(0)
                self._held = (prompt + out)[: target.length]
            text.finish()
            if self._run_id is run_id:  # else a newer run has its own result
                reason = limits.finish_reason or "cancelled"
                self.last_result = GenerationResult(
                    text.text, out, reason, stats, params.rule, logprobs
                )
                if params.rule != "typical":  # its lengths are what its threshold makes them
                    self._judge(stats, is_greedy=params.temperature == 0)

    def _judge(self, stats: Stats, is_greedy: bool) -> None:
        """Warns, once, of the two signatures of a wrong tensor; a wrong drafter changes no token,
        only the speed, so that nothing else would show it."""
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


def _as_chains(params: SamplingParams, budget: Budget) -> tuple[SamplingParams, Budget]:
    """For a target that takes chains only: at each depth the best candidate, or one that is
    drawn."""
    if params.rule == "rejection":
        widths = tuple(params.draw_widths or (1,) * CHAIN_LENGTH)
        if max(widths) > 1:
            raise ValueError(
                f"got draw_widths {widths}, expected 1 at each depth: this bundle's target takes "
                "chains only (--attention chain)"
            )
        params = replace(params, draw_widths=widths)
    return params, replace(budget, growth=Static(chain(budget.max_nodes - 1)))


def _pieces(steps: Generator[Step, None, None], text: TextStream) -> Generator[str, None, None]:
    try:
        for _ in steps:
            if piece := text.take():
                yield piece
        if piece := text.take():
            yield piece
    finally:
        steps.close()


def _common_length(a: list[int], b: list[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
