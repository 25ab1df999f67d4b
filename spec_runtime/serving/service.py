"""Answers requests by one engine: puts them in its queue, and writes the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from spec_runtime import Engine, SamplingParams
from spec_runtime.constraints.tools import format_of_choice
from spec_runtime.errors import UserError
from spec_runtime.lanes.batch import Batch
from spec_runtime.lanes.lane import Observe
from spec_runtime.requests.call import Call
from spec_runtime.serving.answers import Answers
from spec_runtime.serving.errors import ApiError, Json, as_api_error
from spec_runtime.serving.metrics import Metrics
from spec_runtime.serving.replies import TokenTexts, usage
from spec_runtime.serving.schemas import ChatRequest, CompletionRequest
from spec_runtime.serving.settings import Settings
from spec_runtime.serving.streams import EventStream, event_of, unless_gone
from spec_runtime.serving.tool_calls import CallReader
from spec_runtime.serving.writers import ChatWriter, CompletionWriter, Writer
from spec_runtime.sessions.engine_queue import EngineQueue, Prepare
from spec_runtime.text.messages import Tools
from spec_runtime.text.prompt import Prompt
from spec_runtime.waiting.admission import Admission

PREPARATION_SECONDS = 10.0  # a long prompt takes a few tenths


class Service:
    """Answers chat and completion requests, in the order of their coming, several together.

    At most parallel + max_waiting requests are in the queue. A stream whose client reads slowly
    leaves the engine to others and counts among the open streams only.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.started = int(time.time())
        parallel = settings.parallel or engine.most_parallel
        self.batch = Batch(engine, parallel, settings.max_gap)
        self.batch.on_pass = self.metrics.count_pass
        self.admission = Admission(
            settings.max_waiting, settings.max_streams, self._note_counts, self.batch.parallel
        )
        self.queue = EngineQueue(self.batch, self.admission)
        self.queue.open_passes()

    @property
    def is_ready(self) -> bool:
        """Says whether a request would be taken now, and its turn come: there is a place, and no
        request has kept the thread that prepares them, or the engine in one step, for too long."""
        queue = self.queue
        is_stuck = queue.seconds_in_preparation > PREPARATION_SECONDS
        is_stuck = is_stuck or queue.seconds_in_step > self.settings.timeout
        return self.admission.has_room and not is_stuck

    async def close(self) -> None:
        """Ends all requests, and closes the engine."""
        await self.queue.close()
        await asyncio.to_thread(self.engine.close)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers /v1/chat/completions."""
        self._check(body.model, body.num_choices)
        messages = [message.plain() for message in body.messages]
        template = self.engine.tokenizer.template
        family = "" if template is None else template.tool_family
        tools = body.usable_tools

        def prepare() -> list[Call]:
            prompt = self._encoded(messages, "messages", tools=tools)
            options = body.options(self.engine.target.max_length - len(prompt))
            if tools and (forced := format_of_choice(tools, body.tool_choice, family)) is not None:
                options["response_format"] = forced
            return self._calls(prompt, SamplingParams(**options), body.num_choices)

        def make_reader() -> CallReader:
            at_most = 1 if body.parallel_tool_calls is False else None
            return CallReader(family, tools or (), at_most)

        texts = self._texts(body)
        writer = ChatWriter(self.settings.name, texts, make_reader if tools else None)
        return await self._answer(body, request, prepare, writer, 1)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Answers /v1/completions."""
        prompts, tokenizer = body.prompts, self.engine.tokenizer
        echoes: list[str] | None = [] if body.echo else None  # which `prepare` fills
        self._check(body.model, body.num_choices * len(prompts))

        def prepare() -> list[Call]:
            params = SamplingParams(**body.options())
            calls: list[Call] = []
            for prompt in prompts:
                ids = self._encoded(prompt, "prompt", raw=True)
                if echoes is not None:  # ids that are no tokens were refused above
                    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
                    echoes.extend([text] * body.num_choices)
                calls += self._calls(ids, params, body.num_choices)
            return calls

        writer = CompletionWriter(self.settings.name, self._texts(body), echoes)
        return await self._answer(body, request, prepare, writer, len(prompts))

    def begin(
        self,
        request: Request,
        prepare: Prepare,
        is_stream: bool,
        num_prompts: int = 1,
        observe: Observe | None = None,
    ) -> Answers:
        """Puts in the queue a request whose prompts have equally many calls, one after the other.

        `observe` makes of a lane's engine the one that answers. Raises QueueFull if there is no
        place.
        """
        log = request.scope["log"]

        def prepare_and_note() -> list[Call]:
            calls = list(prepare())
            each_prompt = calls[:: len(calls) // num_prompts]
            log["prompt_tokens"] = sum(len(call.prompt) for call in each_prompt)
            return calls

        timeout, metrics = self.settings.timeout, self.metrics
        return Answers(self.queue, prepare_and_note, is_stream, timeout, metrics, observe)

    def event_stream(
        self, request: Request, answers: Answers, events: AsyncGenerator[str, None]
    ) -> Response:
        """Returns the stream of the events made of these answers."""

        def close() -> None:
            answers.close()
            _note_results(request, answers)

        return EventStream(events, close)

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        request: Request,
        prepare: Prepare,
        writer: Writer,
        num_prompts: int,
    ) -> Response:
        answers = self.begin(request, prepare, bool(body.stream), num_prompts)
        if body.stream:
            request.scope["log"]["stream"] = True
            events = _events(answers, writer, body.includes_usage, num_prompts)
            return self.event_stream(request, answers, events)
        try:
            results = await unless_gone(request.receive, answers.collect())
        finally:
            answers.close()
            _note_results(request, answers)
        choices = [writer.whole(index, result) for index, result in enumerate(results)]
        return Json(writer.heading.reply(choices, usage(results, num_prompts)))

    def _encoded(
        self, prompt: Prompt, field: str, raw: bool = False, tools: Tools | None = None
    ) -> list[int]:
        """Returns the ids of the prompt in this field of the request, within the server's limit."""
        try:
            ids = self.engine.encode(prompt, raw, tools=tools)
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
                f"This server takes prompts of at most {most} tokens. However, yours has "
                f"{len(ids)} tokens.",
                param=field,
                code="context_length_exceeded",
            )
        return ids

    def _calls(self, prompt: list[int], params: SamplingParams, num_choices: int) -> list[Call]:
        """Makes the calls of one prompt's choices: with a seed, each one gets a seed of its own."""
        choices = [params] * num_choices
        if params.seed is not None:
            choices = [replace(params, seed=params.seed + i) for i in range(num_choices)]
        return [self.engine.make_call(prompt, params=choice) for choice in choices]

    def _check(self, model: str | None, num_choices: int) -> None:
        if model is not None:
            self.require_model(model)
        if num_choices > self.settings.max_choices:
            message = f"This server gives at most {self.settings.max_choices} answers a request."
            raise ApiError(400, message, param="n", code="invalid_value")

    def require_model(self, name: str) -> None:
        """Raises ApiError for a model that this server does not have."""
        if name != self.settings.name:
            message = f"The model `{name}` does not exist; this server has `{self.settings.name}`."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _texts(self, body: ChatRequest | CompletionRequest) -> TokenTexts:
        ending = frozenset(body.sampling.get("stop_token_ids", ()))
        if not body.sampling.get("ignore_eos"):
            ending |= frozenset(self.engine.tokenizer.eos)
        return TokenTexts(self.engine.tokenizer, ending)

    def _note_counts(self) -> None:
        admission, metrics = self.admission, self.metrics
        metrics.running.set(min(self.batch.parallel, admission.num_requests))
        metrics.waiting.set(admission.num_waiting)
        metrics.streams.set(admission.num_streams)


def _note_results(request: Request, answers: Answers) -> None:
    """Adds the answer's figures to the access log's line."""
    if results := answers.results:
        request.scope["log"]["completion_tokens"] = sum(len(each.token_ids) for each in results)
        request.scope["log"]["finish_reason"] = results[-1].finish_reason


async def _events(
    answers: Answers, writer: Writer, includes_usage: bool, num_prompts: int
) -> AsyncGenerator[str, None]:
    """Yields the server-sent events of a stream, up to OpenAI's last one, [DONE]."""
    more = {"usage": None} if includes_usage else {}
    async for index, chunk in answers:
        for choice in writer.parts(index, chunk):
            yield event_of(writer.heading.chunk(choice, **more))
    if includes_usage:
        yield event_of(writer.heading.chunk(usage=usage(answers.results, num_prompts)))
    yield "data: [DONE]\n\n"
