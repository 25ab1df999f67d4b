"""Generates text with one drafter on one target, reusing the KV rows of a common prefix.

A thin layer over loop/generate.py (tokens) and text/ (text). An engine remembers which tokens the
target's cache holds, as long as no other engine has taken the target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, Self, Unpack

from spec_runtime.bundle.manifest import FEATURES
from spec_runtime.bundle.memory import available_bytes
from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.stream import TextStream
from spec_runtime.dialogue.tools import checked_tools
from spec_runtime.errors import ContextLengthError, UserError
from spec_runtime.files.machine import give_back_memory, return_big_blocks
from spec_runtime.grammar.path_masks import PathMasks
from spec_runtime.interruption import CANCELLED, Interrupted, Interruption
from spec_runtime.loop.answer import form_of
from spec_runtime.loop.call import Call, Steps, read_chunks, read_result, read_texts
from spec_runtime.loop.conversations import Conversations
from spec_runtime.loop.generate import WAITS, Gate, Generation, generate
from spec_runtime.loop.options import CallOptions, read_options
from spec_runtime.loop.proposer import Proposer
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.loop.stats import Stats
from spec_runtime.loop.step import Ending, Step
from spec_runtime.loop.target import SharedPasses, Target, Wants
from spec_runtime.proposers.constrained import ConstrainedProposer
from spec_runtime.sampling import TokenLogprob
from spec_runtime.text.prompt import Prompt, encode_prompt
from spec_runtime.text.tokenizer import Codec
from spec_runtime.trees.budget import Budget

JUDGED_STEPS = 64  # a shorter generation says little about its drafter
JUDGED_DRAFTS = 12  # and so do fewer drafts, where it paused
# Drafted tokens accepted a step: at a sixth of those expected weights are doubted. The shipped
# drafter has a quarter on the hardest of 60 texts, and a twentieth where it reads no features.
FEW = 6

log = logging.getLogger("spec_runtime")


class StepRunner(Protocol):
    """Takes steps over from the loop while it can: the fused step."""

    num_nodes: int  # of its trees, root included

    def around(
        self, steps: Generator[Step, None, None], run: Generation
    ) -> Generator[Step, None, None]:
        """Yields the prompt's step of `steps`, then steps of its own, and then the rest of `steps`,
        which go on where its own ended."""


class OpenedDrafter(NamedTuple):
    """A drafter ready to draft: its proposer and the trees that it may spend.

    `features` names the target's outputs that it reads. `expected_accepted_length` was measured
    when the bundle was built or checked, if it was. `fused` runs greedy requests, if the bundle has
    such a graph. `is_tuned` says that a profile of `spec-runtime tune` chose the budget.
    """

    name: str
    proposer: Proposer
    budget: Budget
    features: tuple[str, ...] = (FEATURES,)
    expected_accepted_length: float | None = None
    fused: StepRunner | None = None
    is_tuned: bool = False


class ManyAnswers(Protocol):
    """Answers several calls at a time, see batch.batch.Batch."""

    def answer(self, calls: Sequence[Call]) -> Generator[tuple[int, Chunk], None, None]: ...


class DrafterSource(Protocol):
    """Opens further drafters of the same bundle, see load.DrafterOpener; `names` are those of the
    drafters."""

    @property
    def names(self) -> Sequence[str]: ...

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter: ...

    def open_lane(self, engine: Engine) -> Engine: ...

    def lane_bytes(self, drafter: str) -> int: ...

    def open_passes(self) -> SharedPasses | None: ...

    def open_batch(self, engine: Engine, parallel: int) -> ManyAnswers: ...


class _Parts(NamedTuple):
    """Resources released on close; None afterwards."""

    target: Target
    drafter: OpenedDrafter
    opener: DrafterSource | None
    conversations: Conversations


class Engine:
    """One drafter on one target, which several engines may share, each with a drafter of its own.

    Threads may share an engine or a target: its generations run one after the other, in the order
    of their calls, and each gives what it would give by itself. `generate` waits for those
    before it. A stream waits at its first piece, and from then on the others wait until it is
    exhausted, closed or dropped. A thread that would wait for the stream that it read last itself
    gets a RuntimeError. With asyncio, use AsyncEngine.

    `close` gives the memory back, and so does `with load(…) as engine:`. A closed engine raises
    RuntimeError.

    Raises UserError if the drafter's trees are larger than what the target has room for.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Codec,
        drafter: OpenedDrafter,
        opener: DrafterSource | None = None,
        kept_bytes: int = 0,
        beside: Engine | None = None,
    ) -> None:
        if drafter.budget.max_nodes > target.max_nodes:
            raise UserError(
                f"got trees of {drafter.budget.max_nodes} nodes, expected at most the bundle's "
                f"scratch of {target.max_nodes}"
            )
        if kept_bytes and not (target.keeps_rows and drafter.fused is None):
            raise UserError(
                "got kept_mb with a target or fused step whose rows stay on a device, expected "
                "backend onnxruntime without fused",
                param="kept_mb",
            )
        self.tokenizer = tokenizer
        self.last_result: GenerationResult | None = None
        feature_width = None
        if drafter.proposer.wants_features:
            feature_width = sum(target.feature_widths.get(name, 0) for name in drafter.features)
        others = None if beside is None else beside._open_parts().conversations
        conversations = Conversations(target, feature_width, kept_bytes, others)
        self._parts: _Parts | None = _Parts(target, drafter, opener, conversations)
        self._expected = drafter.expected_accepted_length  # None once a warning is out
        self._calls: set[Call] = set()  # that wait or run
        self._lanes: list[Engine] = []  # besides this one, once several calls ran together
        self._passes: SharedPasses | None = None

    @property
    def target(self) -> Target:
        """Returns the target; raises RuntimeError if the engine is closed."""
        return self._open_parts().target

    @property
    def _opener(self) -> DrafterSource:
        """Opens what comes from the bundle; raises UserError if there is none."""
        opener = self._open_parts().opener
        if opener is None:
            raise UserError("this engine was not loaded from a bundle: it has one drafter only")
        return opener

    @property
    def _opened(self) -> OpenedDrafter:
        return self._open_parts().drafter

    @property
    def drafter(self) -> str:
        """Names the drafter, followed by "+prompt_lookup" where lookup's candidates are merged."""
        return self._opened.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names the drafters that `with_drafter` takes; its own, if it takes none."""
        opener = self._open_parts().opener
        return (self.drafter,) if opener is None else tuple(opener.names)

    @property
    def proposer(self) -> Proposer:
        return self._opened.proposer

    @property
    def budget(self) -> Budget:
        return self._opened.budget

    @property
    def wants(self) -> Wants:
        """Says what the proposer reads of the target's runs."""
        return Wants(self._opened.features if self.proposer.wants_features else ())

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

        `name` and `lookup` are those of `load`. Raises UserError for an unknown name or a wrong
        type, and if this engine was not loaded from a bundle.
        """
        return self._with(self._opener.open(name, lookup))

    def with_budget(self, budget: Budget) -> Engine:
        """Returns an engine like this one whose trees may spend `budget`."""
        return self._with(self._opened._replace(budget=budget))

    def _with(self, drafter: OpenedDrafter) -> Engine:
        target, _, opener, conversations = self._open_parts()
        return Engine(target, self.tokenizer, drafter, opener, conversations.max_bytes)

    def observed(
        self, wrap: Callable[[Proposer], Proposer], budget: Budget | None = None
    ) -> Engine:
        """Returns an engine on the same target whose proposer is this one's, wrapped by `wrap`.

        It has this engine's budget unless another is given, and takes no fused step.
        """
        budget = self.budget if budget is None else budget
        opened = OpenedDrafter(self.drafter, wrap(self.proposer), budget, self._opened.features)
        return Engine(self.target, self.tokenizer, opened)

    def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> GenerationResult:
        """Returns the whole answer to a string, chat messages or token ids.

        `options` are those of CallOptions: the fields of SamplingParams, or `params` in their
        place, and more. Raises UserError for bad arguments, ContextLengthError for a prompt longer
        than the context, and RuntimeError if this thread has not finished a stream on the same
        target, or the engine is closed.
        """
        call = self.prepare(prompt, **options)
        call.is_stream = False
        return read_result(self.steps_of(call))

    def stream(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[str, None, GenerationResult]:
        """Yields pieces of the text as they come; see `generate` for the arguments.

        Closing the generator early is fine. The result is in `last_result`, and is also what the
        generator returns (`result = yield from engine.stream(…)`): where threads share the engine,
        `last_result` may already be another call's.
        """
        call = self.prepare(prompt, **options)
        return read_texts(self.steps_of(call), call.text)

    def steps(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[Step, None, GenerationResult]:
        """Yields what each step commits, and returns the result; the first step is the prompt's.
        See `generate` and `stream`."""
        return self.steps_of(self.prepare(prompt, **options))

    def chunks(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields a chunk a step, with text, tokens and what was drafted; the last one, which has no
        tokens, has the result. See `generate` and `stream`."""
        return self.answer(self.prepare(prompt, **options))

    def generate_many(
        self, prompts: Sequence[Prompt], parallel: int | None = None, **options: Unpack[CallOptions]
    ) -> list[GenerationResult]:
        """Returns the answer to each prompt, of which up to `parallel` are decoded together, None
        for `most_parallel`.

        The answers are those of `generate`, with the same options. Each lane has caches of its own,
        which are kept for later calls. Raises what `generate` raises, before anything is decoded.
        """
        calls = [self.prepare(prompt, **options) for prompt in prompts]
        results: dict[int, GenerationResult] = {}
        parallel = self.most_parallel if parallel is None else parallel
        with closing(self._opener.open_batch(self, parallel).answer(calls)) as chunks:
            for number, chunk in chunks:
                if chunk.result is not None:
                    results[number] = chunk.result
        return [results[number] for number in range(len(calls))]

    def lane(self, number: int) -> Engine:
        """Returns the engine with which the lane of this number answers: this one, or another on a
        target of its own, which is opened when first asked for and closed with this one.

        Raises UserError if this engine was not loaded from a bundle, and has one lane only.
        """
        while number > len(self._lanes):
            self._lanes.append(self._opener.open_lane(self))
        return self if number == 0 else self._lanes[number - 1]

    @property
    def num_lanes(self) -> int:
        """Counts the lanes opened so far, besides this engine itself."""
        return len(self._lanes)

    @property
    def lane_bytes(self) -> int:
        """Returns the bytes of memory that the caches of one more lane take."""
        return self._opener.lane_bytes(self.drafter)

    @property
    def most_parallel(self) -> int:
        """Returns how many calls are best decoded together: as many as share a pass, if half of the
        memory that is free holds their caches; 1 where a fused step answers."""
        if self.passes is None or self.fused is not None:
            return 1
        room = available_bytes() // 2 // max(1, self.lane_bytes)
        return max(1, min(self.passes.max_lanes, 1 + room))

    def share_rows(self) -> None:
        """Lets lanes of this engine copy each other's rows. Raises UserError if it was not loaded
        from a bundle: it has one lane only."""
        _, _, opener, conversations = self._open_parts()
        if opener is None:
            raise UserError("this engine was not loaded from a bundle: it has one lane only")
        conversations.are_shared = True

    def may_reuse(self, call: Call) -> bool:
        """Says whether a call may begin with rows of earlier ones, see Conversations.begin."""
        return self._open_parts().conversations.may_reuse(call)

    def num_common(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens at the beginning of the prompt have rows in the target."""
        return self._open_parts().conversations.num_common(prompt)

    @property
    def passes(self) -> SharedPasses | None:
        """Returns what runs a pass for several lanes; None if each lane runs by itself."""
        if self._passes is None and (opener := self._open_parts().opener) is not None:
            self._passes = opener.open_passes()
        return self._passes

    def prepare(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Call:
        """Checks the arguments, encodes the prompt and compiles the grammar, for one `answer` or
        `steps_of`; see `generate`.

        No other call is waited for, so that a server can refuse a bad request at once.
        """
        call = self.make_call(prompt, **options)
        call.compile()
        return call

    def make_call(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Call:
        """Does what `prepare` does, but leaves the grammar, which may take long, to
        `Call.compile`."""
        request = read_options(options)
        params = request.sampling
        is_processed = params.temperature > 0 or params.has_processors
        if self.target.strict_gap is not None and is_processed:
            raise UserError(
                f"got temperature {params.temperature}, penalties, a logit bias, response_format or"
                " logits_processor with strict, expected none: its near ties are those of the raw "
                "logits",
                param="strict",
            )
        params.require_tokens_below(self.target.vocab_size)
        tools = checked_tools(request.tools) if request.tools else None
        ids = self.encode(
            prompt,
            request.raw,
            request.system,
            tools=tools,
            continue_final=request.continue_final,
            control_tokens=request.control_tokens,
            template_kwargs=request.template_kwargs,
        )
        text = TextStream(self.tokenizer.decode, params.stop, ids)
        form = form_of(self.tokenizer, ids, tools)
        if params.grammar is None:
            return Call(ids, request, text, form)
        grammar, tokenizer, num_logits = params.grammar, self.tokenizer, self.target.vocab_size

        def compile_grammar(interruption: Interruption) -> PathMasks:
            matcher = tokenizer.matcher(grammar, num_logits, interruption)
            thinking = form.after_thinking(matcher, tokenizer.eos, num_logits)
            return PathMasks(thinking, tokenizer.eos)

        return Call(ids, request, text, form, compile_grammar)

    def answer(
        self, call: Call, gate: Gate | None = None
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields the chunks of a prepared call, see `chunks`; with a gate, see `steps_of`, empty
        ones before each pass."""
        return read_chunks(self.steps_of(call, gate), call)

    def steps_of(self, call: Call, gate: Gate | None = None) -> Steps:
        """Yields the steps of a prepared call, see `steps`; their text comes from `call.text`.

        With a gate, through which the passes go, it yields WAITS before each of them.
        """
        assert call.is_compiled, "a grammar would not hold"
        self._calls.add(call)
        call.enter()
        try:
            with self.target.lock.hold(call.holder, call.interruption):
                return (yield from self._run(self._open_parts(), call, gate))
        except Interrupted:  # while it waited
            self._open_parts()
            reason = call.interruption.reason or CANCELLED
            stats = Stats(prompt_tokens=len(call.prompt))
            return self._finish(call, [], [], stats, reason)
        finally:
            self._calls.discard(call)
            call.leave()
            if self._parts is None:
                give_back_memory()

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        system: str | None = None,
        tools: Tools | None = None,
        continue_final: bool = False,
        control_tokens: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the prompt's token ids, checked against vocabulary and context.

        `control_tokens` lets the names of control tokens in the prompt, such as "<|im_end|>",
        become these tokens. None allows it only in raw prompts: what a user types is text.
        `template_kwargs` are further variables of the chat template.
        """
        ids = encode_prompt(
            self.tokenizer,
            prompt,
            raw,
            system,
            tools,
            continue_final,
            control_tokens,
            template_kwargs,
        )
        if len(ids) > self.target.max_length:
            raise ContextLengthError(len(ids), self.target.max_length)
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            raise UserError(
                f"got token ids from {min(ids)} to {max(ids)}, expected 0 to "
                f"{self.target.vocab_size - 1}",
                param="prompt",
            )
        return ids

    def cancel(self) -> None:
        """Ends the generation that is running on this engine, if one is, from any thread.

        It ends at its next step, or within a long prompt after at most 256 tokens more, with
        finish reason "cancelled". Calls that wait go on waiting.
        """
        for engine in (self, *self._lanes):
            for call in engine._calls.copy():
                if not call.holder.is_waiting:
                    call.end()

    def close(self) -> None:
        """Ends the running generation as `cancel` does, refuses all others, and gives memory back.

        Calls that wait get a RuntimeError. Waits until other threads have left their calls; a
        stream that nobody reads keeps the memory until it is closed or dropped. Engines on the same
        target (`with_drafter`) go on, and keep it. On Linux this also bounds, for the whole
        process, the free memory that the C library keeps. Closing twice is fine.
        """
        return_big_blocks()
        self._parts = None  # first, so that no lane is opened again
        self.close_lanes()
        calls = self._calls.copy()
        for call in calls:
            call.end()
        for call in calls:
            call.wait_until_left()
        self.tokenizer.close()
        give_back_memory()

    def close_lanes(self) -> None:
        """Closes the lanes besides this engine, and gives their memory back."""
        lanes, self._lanes, self._passes = self._lanes, [], None
        for lane in lanes:
            lane.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_parts(self) -> _Parts:
        if self._parts is None:
            raise RuntimeError("this engine is closed; load the bundle again")
        return self._parts

    def _run(self, parts: _Parts, call: Call, gate: Gate | None) -> Steps:
        target, drafter, _, conversations = parts
        proposer, prompt, params, masks = drafter.proposer, call.prompt, call.params, call.masks
        # plain decoding stays plain: it drafts no forced tokens
        if masks is not None and drafter.name != "none":
            proposer = ConstrainedProposer(proposer, masks, target.max_nodes)
        reused, restored = conversations.begin(call)
        fused = drafter.fused if gate is None else None
        eos = () if params.ignore_eos else self.tokenizer.eos
        ending = Ending(
            min(params.max_new_tokens, target.max_length - len(prompt)),
            frozenset([*params.stop_token_ids, *eos]),
            call.text.push,
            lambda: call.interruption.reason,
        )
        stats = Stats(prompt_tokens=len(prompt), reused_tokens=reused)
        run = Generation(
            target,
            proposer,
            drafter.budget,
            prompt,
            params,
            ending,
            stats,
            reused,
            drafter.features,
            restored,
            masks,
            gate,
        )
        logprobs: list[TokenLogprob] = []
        is_consistent = False
        try:
            target.truncate(reused)
            proposer.truncate(reused if restored is None else 0)
            if ending.finish_reason is None:
                steps = generate(run)
                if fused is not None:
                    steps = fused.around(steps, run)
                with closing(steps):  # a fused step hands its rows over while the lock is held
                    for step in steps:
                        if step is WAITS:
                            yield step
                            continue
                        logprobs += step.logprobs
                        conversations.add(step)
                        is_consistent = True
                        if call.is_stream:
                            call.leave()
                        yield step
                        call.enter()
                        is_consistent = ending.finish_reason is not None
            elif restored is not None:  # rows of which the proposer knows nothing
                target.truncate(0)
            is_consistent = True
        except Interrupted:  # within the prompt, of whose rows it knows nothing, or within a step
            target.truncate(reused if restored is None else 0)
            is_consistent = True
        finally:
            if is_consistent:  # not interrupted inside a step
                conversations.end(call.holder, prompt + run.tokens)
            else:
                conversations.fail()
            reason = ending.finish_reason or call.interruption.reason or CANCELLED
            result = self._finish(call, run.tokens, logprobs, stats, reason)
            # what a threshold or a grammar makes of the lengths says little about the drafter
            if params.rule != "typical" and not params.reads_text:
                self._warn_of_doubts(drafter.name, stats, is_greedy=params.temperature == 0)
        return result

    def _finish(
        self,
        call: Call,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        stats: Stats,
        reason: str,
    ) -> GenerationResult:
        """Returns the call's result, which is also the engine's last one."""
        text, params = call.text, call.params
        text.finish()
        stop: str | int | None = text.stop
        if stop is None and reason == "stop":
            stop = tokens[-1]
        asked = None if params.logprobs is None else logprobs
        result = GenerationResult(
            text.text, tokens, reason, stats, params.rule, asked, stop, text.ends, call.form
        )
        self.last_result = result
        return result

    def _warn_of_doubts(self, drafter: str, stats: Stats, is_greedy: bool) -> None:
        """Warns, once, of the two signatures of wrong weights.

        Few accepted guesses are also what weights give that have learnt too little. A wrong drafter
        changes no token, only the speed, so that nothing else would show it.
        """
        expected, got = self._expected, stats.drafted_length
        if expected is None or stats.steps < JUDGED_STEPS or stats.drafted_steps < JUDGED_DRAFTS:
            return
        doubt = None
        if sum(stats.depth_trials) == sum(stats.depth_accepts) > 0:
            doubt = f"all drafted tokens were accepted in {stats.drafted_steps} steps"
        elif is_greedy and got - 1 < (expected - 1) / FEW:  # sampled texts are harder to guess
            doubt = f"accepted length {got:.2f} in {stats.drafted_steps} steps, expected about "
            doubt += f"{expected:.2f}"
        if doubt is not None:
            self._expected = None
            log.warning(
                "drafter %s: %s; unless the text is unusual, its weights are wrong or have learnt "
                "too little: run spec-export check, build the bundle again or train longer",
                drafter,
                doubt,
            )
