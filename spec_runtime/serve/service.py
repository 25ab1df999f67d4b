"""Answers requests by one engine: puts them in its queue, and writes the replies."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from spec_runtime import Chunk, Engine, SamplingParams
from spec_runtime.batch.batch import Batch
from spec_runtime.batch.lane import Observe, undrafted
from spec_runtime.dialogue.messages import Tools
from spec_runtime.dialogue.tools import (
    answer_or_call,
    checked_tools,
    format_of_choice,
    strict_calls,
)
from spec_runtime.errors import UserError
from spec_runtime.loop.call import Call
from spec_runtime.loop.generate import PromptScores
from spec_runtime.queue.admission import Admission
from spec_runtime.queue.engine_queue import EngineQueue, Prepare
from spec_runtime.sampling import LogitsProcessor
from spec_runtime.serve.answers import Answers
from spec_runtime.serve.anthropic.replies import MessageReply
from spec_runtime.serve.anthropic.requests import CountRequest, MessagesRequest
from spec_runtime.serve.errors import ApiError, Json, as_api_error
from spec_runtime.serve.metrics import Metrics
from spec_runtime.serve.openai.replies import Echo, TokenTexts, is_small
from spec_runtime.serve.openai.schemas import ChatMessage, ChatRequest, CompletionRequest
from spec_runtime.serve.openai.writers import ChatWriter, ChoicesReply, CompletionWriter
from spec_runtime.serve.responses.replies import ResponseReply, Shape
from spec_runtime.serve.responses.requests import ENCRYPTED, ResponsesRequest, messages_of
from spec_runtime.serve.responses.store import ResponseStore
from spec_runtime.serve.settings import Settings
from spec_runtime.serve.streams import EventStream, unless_gone
from spec_runtime.serve.threads import Threads
from spec_runtime.text.prompt import encode_prompt

STUCK_SECONDS = 10.0  # a long prompt is prepared in a few tenths, and read in many steps
NUM_COUNTING, MOST_COUNTING = 2, 32  # threads, and requests for the tokens of texts
NUM_WRITING = 2

Reply = ChoicesReply | MessageReply | ResponseReply


def end_worker() -> None:
    """Ends this process, if it is a worker whose place another one takes."""
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGTERM)


class Service:
    """Answers requests of all kinds in the order of their coming, several together.

    At most parallel + max_waiting requests are in the queue. A stream whose client reads slowly
    leaves the engine to others and counts among the open streams only.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        metrics: Metrics | None = None,
        kept: ResponseStore | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.kept = ResponseStore() if kept is None else kept
        self._drafting: dict[tuple[Engine, str], Engine] = {}  # by lane and drafter, see _with
        parallel = settings.parallel or engine.most_parallel
        self.batch = Batch(engine, parallel, settings.max_gap)
        self.batch.on_pass = self.metrics.count_pass
        self.admission = Admission(
            settings.max_waiting, settings.max_streams, self._note_counts, self.batch.parallel
        )
        self.queue = EngineQueue(self.batch, self.admission)
        self.queue.on_lost = end_worker
        self.batch.open_passes_beside()
        self.counting = Threads(NUM_COUNTING, MOST_COUNTING)  # of texts for clients
        self.writing = Threads(NUM_WRITING)  # of answers, whose number admission limits

    @property
    def is_ready(self) -> bool:
        """Says whether a request would be taken now, and its turn come: there is a place, requests
        go on, none has kept the thread that prepares them for too long, and no GPU is lost."""
        seconds = max(self.queue.seconds_in_preparation, self.queue.seconds_unanswered)
        return not self.queue.is_lost and self.admission.has_room and seconds <= STUCK_SECONDS

    async def close(self) -> None:
        """Ends all requests, and closes the engine."""
        await self.queue.close()
        await self.counting.close()
        await self.writing.close()
        self._drafting.clear()  # closing them would close the tokenizer again
        await asyncio.to_thread(self.engine.close)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers /v1/chat/completions."""
        self._require_few(body.num_choices)
        content = "" if body.tool_choice in (None, "none", "auto") else None
        writer = ChatWriter(self.settings.name, self._texts(body), content)
        reply = ChoicesReply(writer, body.stream_options)
        return await self._chat(body, request, reply, lambda: body)

    async def messages(self, body: MessagesRequest, request: Request) -> Response:
        """Answers /v1/messages, as the chat that says the same."""
        reply, thinks = MessageReply(self.settings.name, body.thinks), body.thinks
        return await self._chat(body, request, reply, body.as_chat, body.is_begun, thinks=thinks)

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """Answers /v1/responses, as the chat that says the same after what is kept."""
        messages: list[dict[str, Any]] = []  # of the conversation; `as_chat` fills this

        def as_chat() -> ChatRequest:
            messages[:] = self._conversation(body)
            return body.as_chat(messages)

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                self.kept.keep(response, messages_of(response["output"], messages))

        texts = TokenTexts(self.engine.tokenizer, frozenset(self._eos))
        shape = Shape(body.known_tools, body.has_summary, ENCRYPTED in (body.include or ()))
        reply = ResponseReply(self.settings.name, body.repeated(), texts, keep, shape)
        return await self._chat(body, request, reply, as_chat, field="input")

    def _conversation(self, body: ResponsesRequest) -> list[dict[str, Any]]:
        """Returns the messages of the chat that a response goes on from."""
        before: list[dict[str, Any]] = []
        if (previous := body.previous_response_id) is not None:
            before = self.kept.messages(previous, "previous_response_id")
        return messages_of(body.found_items(self.kept.item), before)

    async def count_tokens(self, body: CountRequest, request: Request) -> Response:
        """Answers /v1/messages/count_tokens, also for prompts longer than the server takes."""

        def count() -> Response:
            chat = body.as_chat()
            return Json({"input_tokens": self._num_tokens(chat, "messages", body)})

        return await unless_gone(request.receive, self.counting.run(count))

    async def input_tokens(self, body: ResponsesRequest, request: Request) -> Response:
        """Answers /v1/responses/input_tokens, as `count_tokens`."""

        def count() -> Response:
            chat = body.as_chat(self._conversation(body))
            number = self._num_tokens(chat, "input")
            return Json({"object": "response.input_tokens", "input_tokens": number})

        return await unless_gone(request.receive, self.counting.run(count))

    def _num_tokens(self, chat: ChatRequest, field: str, body: CountRequest | None = None) -> int:
        """Counts the tokens of a chat's prompt."""
        thinks, is_begun = (None, False) if body is None else (body.thinks, body.is_begun)
        template_kwargs = chat.template_kwargs(self.engine.tokenizer.template, thinks)
        tools = chat.usable_tools
        return len(self.encode_messages(chat.messages, tools, is_begun, template_kwargs, field))

    def encode_messages(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools | None,
        is_begun: bool,
        template_kwargs: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> list[int]:
        """Returns the ids of the messages in this field of the request, however many these are; the
        last one is the beginning of the answer if it `is_begun`."""
        plain, codec = [message.plain() for message in messages], self.engine.tokenizer
        known = () if codec.template is None else codec.template.variables
        own = self.settings.template_kwargs.items()
        given = {name: value for name, value in own if name in known and value is not None}
        given |= template_kwargs or {}
        try:
            return encode_prompt(codec, plain, False, None, tools, is_begun, None, given)
        except UserError as error:
            raise as_api_error(error, field) from error

    async def _chat(
        self,
        asked: ChatRequest | MessagesRequest | ResponsesRequest,
        request: Request,
        reply: Reply,
        as_chat: Callable[[], ChatRequest],
        is_begun: bool = False,
        field: str = "messages",
        thinks: bool | None = None,
    ) -> Response:
        """Answers the chat that `as_chat` makes of what is asked, whose last message is the
        beginning of the answer if it `is_begun`. `field` is the request's that holds the messages.
        `thinks` says whether the model is to think, None leaves that to the request's further
        fields."""
        codec = self.engine.tokenizer
        family = "" if codec.template is None else codec.template.tool_family
        if codec.template is not None:
            unread = (asked.chat_template_kwargs or {}).keys() - codec.template.variables
            asked.ignore(f"chat_template_kwargs.{name}" for name in sorted(unread))

        def prepare() -> list[Call]:
            body = as_chat()
            tools = body.usable_tools and checked_tools(body.usable_tools)
            template_kwargs = body.template_kwargs(codec.template, thinks)
            ids = self.encode_messages(body.messages, tools, is_begun, template_kwargs, field)
            prompt = self._encoded(ids, field)
            at_most = 1 if body.parallel_tool_calls is False else None
            options = body.options(self.engine.target.max_length - len(prompt))
            if tools and (forced := format_of_choice(tools, body.tool_choice, family)) is not None:
                options["response_format"] = forced
            elif tools and not body.is_free:
                options["response_format"] = answer_or_call(body.response_format, tools, family)
            elif tools and not (body.min_tokens or options.get("ignore_eos")):
                options["response_format"] = strict_calls(tools)
            calls = self._calls(prompt, SamplingParams(**options), body)
            for call in calls:
                call.form = replace(call.form, tools=tools, at_most=at_most)
            return calls

        observe = self._with(asked.drafter)
        return await self._answer(request, prepare, reply, bool(asked.stream), observe=observe)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Answers /v1/completions."""
        prompts, tokenizer = body.prompts, self.engine.tokenizer
        room, has_bos = self.engine.target.max_length, body.add_special_tokens is not False
        # `prepare` fills these, and the engine the scores
        echoes: list[Echo] | None = [] if body.echo else None
        self._require_few(body.num_choices * len(prompts))

        def prepare() -> list[Call]:
            params = SamplingParams(**body.options(room))
            calls: list[Call] = []
            for prompt in prompts:
                ids = self._encoded(prompt, "prompt", has_bos)
                choices = self._calls(ids, params, body)
                if echoes is not None:  # ids that are no tokens were refused above
                    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
                    for call in choices:
                        if body.logprobs is not None:
                            call.scores = PromptScores(body.logprobs)
                        scores = [] if call.scores is None else call.scores.entries
                        echoes.append(Echo(text, ids, scores))
                calls += choices
            for call in calls:
                call.only_reads = body.most_tokens(room) == 0
            return calls

        make_engine = self._with(body.drafter)

        def observe(lane: Engine) -> Engine:
            is_short = body.scores_prompts and body.most_tokens(room) < 2
            return undrafted(lane) if is_short else make_engine(lane)

        writer = CompletionWriter(self.settings.name, self._texts(body), echoes)
        reply = ChoicesReply(writer, body.stream_options, len(prompts))
        is_stream = bool(body.stream)
        return await self._answer(request, prepare, reply, is_stream, len(prompts), observe)

    def begin(
        self,
        prepare: Prepare,
        is_stream: bool,
        num_prompts: int = 1,
        observe: Observe | None = None,
    ) -> Answers:
        """Puts in the queue a request whose prompts have equally many calls, one after the other.

        `observe` makes of a lane's engine what answers. Raises QueueFull if there is no place.
        """
        timeout, metrics = self.settings.timeout, self.metrics
        return Answers(self.queue, prepare, is_stream, timeout, metrics, observe, num_prompts)

    def event_stream(
        self, request: Request, answers: Answers, events: AsyncGenerator[str, None]
    ) -> Response:
        """Returns the stream of the events made of these answers."""

        def close() -> None:
            answers.close()
            _note_results(request, answers)

        return EventStream(events, close, lambda: answers.is_accepted)

    async def _answer(
        self,
        request: Request,
        prepare: Prepare,
        reply: Reply,
        is_stream: bool,
        num_prompts: int = 1,
        observe: Observe | None = None,
    ) -> Response:
        answers = self.begin(prepare, is_stream, num_prompts, observe)
        if is_stream:
            request.scope["log"]["stream"] = True
            return self.event_stream(request, answers, self._events(answers, reply))

        async def collect() -> Response:
            results = await answers.collect()
            return await self.writing.run(lambda: Json(reply.whole(results)))

        try:
            return await unless_gone(request.receive, collect())
        finally:
            answers.close()
            _note_results(request, answers)

    async def _events(self, answers: Answers, reply: Reply) -> AsyncGenerator[str, None]:
        """Yields the events of a stream. Chunks of a few words more of the same kind are written
        here; the first of an answer may repeat its prompt, and others what has come so far."""
        kinds: dict[int, str] = {}  # of each choice's last part
        async for index, chunk in answers:

            def write(index: int = index, chunk: Chunk = chunk) -> str:
                return "".join(reply.events(answers, index, chunk))

            kind = kinds.get(index)
            goes_on = kind is not None and all(part.kind == kind for part in chunk.parts)
            kinds[index] = chunk.parts[-1].kind if chunk.parts else kind or ""
            yield write() if goes_on and is_small(chunk) else await self.writing.run(write)
        yield await self.writing.run(lambda: "".join(reply.last_events(answers)))

    def _encoded(self, prompt: str | list[int], field: str, has_bos: bool = True) -> list[int]:
        """Returns the ids of the text or ids in this field of the request, within the limits of
        engine and server. `has_bos` adds to a text what the tokenizer adds by itself."""
        try:
            if isinstance(prompt, str) and not has_bos:
                prompt = self.engine.tokenizer.encode(prompt, special_tokens=False)
            ids = self.engine.encode(prompt, raw=True)
        except UserError as error:
            raise as_api_error(error, field) from error
        return self.check_prompt(ids, field)

    def check_prompt(self, ids: list[int], field: str) -> list[int]:
        """Returns the ids of a prompt. Raises ApiError if they are more than the server takes, or
        leave no room for an answer."""
        most = self.engine.target.max_length - 1
        if self.settings.max_prompt is not None:
            most = min(most, self.settings.max_prompt)
        if len(ids) > most:
            raise ApiError(
                400,
                f"got a prompt of {len(ids)} tokens, expected at most {most} at this server",
                param=field,
                code="context_length_exceeded",
            )
        return ids

    def _calls(
        self, prompt: list[int], params: SamplingParams, body: ChatRequest | CompletionRequest
    ) -> list[Call]:
        """Makes the calls of one prompt's choices: with a seed, each one gets a seed of its own."""
        ending = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos)]
        known = [token for token in ending if token < self.engine.target.vocab_size]
        if body.min_tokens and known:
            processor = _not_before(known, len(prompt) + body.min_tokens)
            params = replace(params, logits_processor=processor)
        choices = [params] * body.num_choices
        if params.seed is not None:
            choices = [replace(params, seed=params.seed + i) for i in range(body.num_choices)]
        is_scored = isinstance(body, CompletionRequest) and body.scores_prompts
        reuse = not is_scored and body.cache_prompt is not False
        return [self.engine.make_call(prompt, params=choice, reuse=reuse) for choice in choices]

    def _require_few(self, num_choices: int) -> None:
        if num_choices > self.settings.max_choices:
            most = self.settings.max_choices
            message = f"got {num_choices} answers in one request, expected at most {most}"
            raise ApiError(400, message, param="n", code="invalid_value")

    def _with(self, drafter: str | None) -> Callable[[Engine], Engine]:
        """Returns a function from a lane's engine to the one that answers with this drafter of the
        bundle; None is the service's own.

        A drafter is opened on a lane when it is first asked for there; other requests wait for
        that.
        """
        if drafter in (None, self.engine.drafter.partition("+")[0]):
            return lambda lane: lane
        if drafter == "none":
            return undrafted

        def open_on(lane: Engine) -> Engine:
            if (lane, drafter) not in self._drafting:
                # observed: it keeps no conversations besides the lane's
                opened = lane.with_drafter(drafter).observed(lambda proposer: proposer)
                self._drafting[lane, drafter] = opened
            return self._drafting[lane, drafter]

        return open_on

    def _texts(self, body: ChatRequest | CompletionRequest) -> TokenTexts:
        """Returns what writes the tokens of the answers. Where a prompt's tokens go before them it
        writes all, so that their number is that of `usage`."""
        if isinstance(body, CompletionRequest) and body.scores_prompts:
            return TokenTexts(self.engine.tokenizer, frozenset())
        ending = frozenset(body.sampling.get("stop_token_ids", ()))
        if not body.sampling.get("ignore_eos"):
            ending |= frozenset(self._eos)
        return TokenTexts(self.engine.tokenizer, ending)

    @property
    def _eos(self) -> tuple[int, ...]:
        return self.engine.tokenizer.eos

    def _note_counts(self) -> None:
        admission = self.admission
        running = min(self.batch.parallel, admission.num_requests)
        self.metrics.note(self, running, admission.num_waiting, admission.num_streams)


def _not_before(ending: list[int], length: int) -> LogitsProcessor:
    """Returns a processor that lets these tokens come only after `length` others, the prompt's
    among them."""

    def process(tokens: Sequence[int], logits_V: np.ndarray) -> np.ndarray:
        if len(tokens) < length:
            logits_V[ending] = -np.inf
        return logits_V

    return process


def _note_results(request: Request, answers: Answers) -> None:
    """Adds the answer's figures to the access log's line."""
    if answers.prompt_tokens:
        request.scope["log"]["prompt_tokens"] = answers.prompt_tokens
    if results := answers.results:
        request.scope["log"]["completion_tokens"] = sum(len(each.token_ids) for each in results)
        request.scope["log"]["finish_reason"] = results[-1].finish_reason
