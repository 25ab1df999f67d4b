"""Generates text with one drafter on one target, reusing the KV rows of a common prefix.

A thin layer over loop/generate.py (tokens) and text/ (text). An engine remembers which tokens the
target's cache holds, as long as no other engine has taken the target.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Self, Unpack

from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.tools import checked_tools
from spec_runtime.errors import ContextLengthError, UserError
from spec_runtime.files.machine import give_back_memory, return_big_blocks
from spec_runtime.loop.answering import Answering, Calls, Parts
from spec_runtime.loop.call import Call, make_call
from spec_runtime.loop.conversations import Conversations
from spec_runtime.loop.lanes import Lanes, Source
from spec_runtime.loop.options import CallOptions, read_options
from spec_runtime.loop.proposer import OpenedDrafter, Proposer
from spec_runtime.loop.reading import read_chunks, read_result, read_steps, read_texts
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import Target, Wants
from spec_runtime.proposers.constrained import ConstrainedProposer
from spec_runtime.text.prompt import Prompt, encode_prompt
from spec_runtime.text.tokenizer import Codec
from spec_runtime.trees.budget import Budget


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
        source: Source[Engine] | None = None,
        kept_bytes: int = 0,
        beside: Engine | None = None,
    ) -> None:
        if drafter.budget.max_nodes > target.max_nodes:
            raise UserError(
                f"got trees of {drafter.budget.max_nodes} nodes, expected at most the bundle's "
                f"scratch of {target.max_nodes}"
            )
        if kept_bytes and not target.keeps_rows:
            raise UserError(
                "got kept_mb with a target whose rows stay on a device, expected backend "
                "onnxruntime",
                param="kept_mb",
            )
        self.tokenizer = tokenizer
        feature_width = None
        if drafter.proposer.wants_features:
            feature_width = sum(target.feature_widths.get(name, 0) for name in drafter.features)
        others = None if beside is None else beside.conversations
        conversations = Conversations(target, feature_width, kept_bytes, others)
        self._calls = Calls(Parts(target, drafter, conversations), ConstrainedProposer)
        self.lanes: Lanes[Engine] = Lanes(source, self._calls.require_open)

    @property
    def last_result(self) -> GenerationResult | None:
        return self._calls.last_result

    @property
    def target(self) -> Target:
        """Returns the target; raises RuntimeError if the engine is closed."""
        return self._calls.parts.target

    @property
    def conversations(self) -> Conversations:
        """Returns what knows whose rows the target has."""
        return self._calls.parts.conversations

    @property
    def _opened(self) -> OpenedDrafter:
        return self._calls.parts.drafter

    @property
    def drafter(self) -> str:
        """Names the drafter, followed by "+prompt_lookup" where lookup's candidates are merged."""
        return self._opened.name

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names the drafters that `with_drafter` takes; its own, if it takes none."""
        own = (self.drafter,)
        return tuple(self.lanes.source.names) if self.lanes.has_source else own

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

    def with_drafter(self, name: str | None, lookup: bool | None = None) -> Engine:
        """Returns an engine on the same target with another drafter ("none" = plain decoding).

        `name` and `lookup` are those of `load`. Raises UserError for an unknown name or a wrong
        type, and if this engine was not loaded from a bundle.
        """
        return self._with(self.lanes.source.open(name, lookup))

    def with_budget(self, budget: Budget) -> Engine:
        """Returns an engine like this one whose trees may spend `budget`."""
        return self._with(self._opened._replace(budget=budget))

    def _with(self, drafter: OpenedDrafter) -> Engine:
        kept_bytes, lanes = self.conversations.max_bytes, self.lanes
        source = lanes.source if lanes.has_source else None
        return Engine(self.target, self.tokenizer, drafter, source, kept_bytes)

    def observed(
        self, wrap: Callable[[Proposer], Proposer], budget: Budget | None = None
    ) -> Engine:
        """Returns an engine on the same target whose proposer is this one's, wrapped by `wrap`.

        It has this engine's budget unless another is given.
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
        return read_result(self.answering(self.prepare(prompt, **options)))

    def stream(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[str, None, GenerationResult]:
        """Yields pieces of the text as they come; see `generate` for the arguments.

        Closing the generator early is fine. The result is in `last_result`, and is also what the
        generator returns (`result = yield from engine.stream(…)`): where threads share the engine,
        `last_result` may already be another call's.
        """
        return read_texts(self.answering(self.prepare(prompt, **options)))

    def steps(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[Step, None, GenerationResult]:
        """Yields what each step commits, and returns the result; the first step is the prompt's.
        See `generate` and `stream`."""
        return read_steps(self.answering(self.prepare(prompt, **options)))

    def chunks(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> Generator[Chunk, None, GenerationResult]:
        """Yields a chunk a step, with text, tokens and what was drafted; the last one, which has no
        tokens, has the result. See `generate` and `stream`."""
        return read_chunks(self.answering(self.prepare(prompt, **options)))

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
        with closing(self.lanes.source.open_batch(self, parallel).answer(calls)) as chunks:
            for number, chunk in chunks:
                if chunk.result is not None:
                    results[number] = chunk.result
        return [results[number] for number in range(len(calls))]

    def lane(self, number: int) -> Engine:
        """Returns the engine with which the lane of this number answers: this one, or another on a
        target of its own, which is opened when first asked for and closed with this one.

        Raises UserError if this engine was not loaded from a bundle, and has one lane only.
        """
        return self.lanes.get(self, number)

    @property
    def num_lanes(self) -> int:
        """Counts the lanes opened so far, besides this engine itself."""
        return len(self.lanes.others)

    @property
    def most_parallel(self) -> int:
        """Returns how many calls are best decoded together: as many as share a pass, if half of the
        memory that is free holds their caches."""
        return self.lanes.most_parallel(self.drafter)

    def share_rows(self) -> None:
        """Lets the lanes copy each other's rows. Raises UserError if there can be one only."""
        if self.lanes.source is not None:  # or it raises
            self.conversations.are_shared = True

    def prepare(self, prompt: Prompt, **options: Unpack[CallOptions]) -> Call:
        """Checks the arguments, encodes the prompt and compiles the grammar, for one
        `answering`; see `generate`.

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
                " logits_processor with strict, expected none: strict decides near ties of the raw "
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
        return make_call(self.tokenizer, ids, request, tools, self.target.vocab_size)

    def answering(
        self, call: Call, wrap: Callable[[Proposer], Proposer] = lambda proposer: proposer
    ) -> Answering:
        """Returns what answers a prepared call, once, with its proposer wrapped by `wrap`."""
        assert call.is_compiled, "a grammar would not hold"
        return Answering(self._calls, call, wrap)

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
        for engine in (self, *self.lanes.others):
            engine._calls.cancel()

    def close(self) -> None:
        """Ends the running generation as `cancel` does, refuses all others, and gives memory back.

        Calls that wait get a RuntimeError. Waits until other threads have left their calls; a
        stream that nobody reads keeps the memory until it is closed or dropped. Engines on the same
        target (`with_drafter`) go on, and keep it. On Linux this also bounds, for the whole
        process, the free memory that the C library keeps. Closing twice is fine.
        """
        return_big_blocks()
        self._calls.release()  # first, so that no lane is opened again
        self.lanes.close(for_good=True)
        self._calls.end()
        self.tokenizer.close()
        give_back_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
