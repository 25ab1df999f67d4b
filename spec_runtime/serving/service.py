"""Answers requests by one engine: admits them, prepares them, runs them, writes the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from spec_runtime import AsyncEngine, Engine, GenerationResult, SamplingParams
from spec_runtime.serving.answering import Answering, EventStream, Job, as_api_error, event_of
from spec_runtime.serving.errors import ApiError, Json
from spec_runtime.serving.gates import Gate, unless_gone
from spec_runtime.serving.metrics import Metrics
from spec_runtime.serving.replies import TokenTexts, usage
from spec_runtime.serving.schemas import ChatRequest, CompletionRequest
from spec_runtime.serving.settings import Settings
from spec_runtime.serving.tool_calls import CallReader, required_format
from spec_runtime.serving.writers import ChatWriter, CompletionWriter, Writer
from spec_runtime.text.tokenizer import Prompt, Tools


class Service:
    """Answers chat and completion requests.

    At most 1 + max_waiting requests are with the engine, in the order of their coming. A stream
    whose client reads slowly leaves the engine to others and counts among the open streams only.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.started = int(time.time())
        self.async_engine = AsyncEngine(engine, max_waiting=settings.max_waiting)
        waiting, streams = settings.max_waiting, settings.max_streams
        self._places = Gate(1 + waiting, f"{waiting} requests are waiting, the most allowed here")
        self._streams = Gate(streams, f"{streams} streams are open, the most allowed here")

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers /v1/chat/completions."""
        self._check(body.model, body.num_choices)
        messages = [message.plain() for message in body.messages]
        template = self.engine.tokenizer.template
        family = "" if template is None else template.tool_family
        tools = body.usable_tools

        def jobs() -> list[Job]:
            prompt = self._encoded(messages, "messages", tools=tools)
            options = body.options(self.engine.target.max_length - len(prompt))
            if tools and (forced := required_format(tools, body.tool_choice, family)) is not None:
                options["response_format"] = forced
            params = SamplingParams(**options)
            return [Job(i, prompt, _seeded(params, i)) for i in range(body.num_choices)]

        def make_reader() -> CallReader:
            return CallReader(family, at_most=1 if body.parallel_tool_calls is False else None)

        texts = self._texts(body)
        writer = ChatWriter(self.settings.name, texts, make_reader if tools else None)
        return await self._answer(body, request, jobs, writer, 1)

    async def completion(self, body: CompletionRequest, request: Request) -> Response:
        """Answers /v1/completions."""
        prompts, tokenizer = body.prompts, self.engine.tokenizer
        echoes: list[str] | None = [] if body.echo else None  # which `jobs` fills
        self._check(body.model, body.num_choices * len(prompts))

        def jobs() -> list[Job]:
            params = SamplingParams(**body.options())
            made: list[Job] = []
            for prompt in prompts:
                ids = self._encoded(prompt, "prompt", raw=True)
                if echoes is not None:  # ids that are no tokens were refused above
                    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
                    echoes.extend([text] * body.num_choices)
                for i in range(body.num_choices):
                    made.append(Job(len(made), ids, _seeded(params, i)))
            return made

        writer = CompletionWriter(self.settings.name, self._texts(body), echoes)
        return await self._answer(body, request, jobs, writer, len(prompts))

    @property
    def has_room(self) -> bool:
        """Says whether a request would be taken now."""
        return self._places.inside < self._places.most

    async def run(
        self,
        request: Request,
        engine: AsyncEngine,
        jobs: Callable[[], list[Job]],
    ) -> Answering:
        """Takes a place at the engine, prepares the jobs in a worker thread and begins them.

        Raises ApiError if there is no place, or the jobs are refused.
        """
        begun = time.monotonic()
        self._places.enter()
        self._note_places()

        def leave() -> None:
            self._places.leave(time.monotonic() - begun)
            self._note_places()

        try:
            prepared = await asyncio.to_thread(jobs)
        except BaseException as error:
            leave()
            if isinstance(error, Exception):
                raise as_api_error(error) from error
            raise
        request.scope["log"]["prompt_tokens"] = sum(len(job.prompt) for job in prepared)
        timeout = self.settings.timeout
        return Answering(engine, prepared, timeout, self.metrics, leave)

    async def open_stream(
        self,
        request: Request,
        engine: AsyncEngine,
        jobs: Callable[[], list[Job]],
        events: Callable[[Answering], AsyncGenerator[str, None]],
    ) -> Response:
        """Begins the jobs as `run` does, and returns the stream of their events."""
        begun = time.monotonic()
        self._streams.enter()
        self.metrics.streams.set(self._streams.inside)

        def leave() -> None:
            self._streams.leave(time.monotonic() - begun)
            self.metrics.streams.set(self._streams.inside)

        try:
            answering = await self.run(request, engine, jobs)
        except BaseException:
            leave()
            raise

        async def close() -> None:
            await answering.aclose()
            leave()
            _note_results(request, answering.results)

        return EventStream(events(answering), close)

    async def _answer(
        self,
        body: ChatRequest | CompletionRequest,
        request: Request,
        jobs: Callable[[], list[Job]],
        writer: Writer,
        num_prompts: int,
    ) -> Response:
        if body.stream:
            request.scope["log"]["stream"] = True

            def events(answering: Answering) -> AsyncGenerator[str, None]:
                return _events(answering, writer, body.includes_usage, num_prompts)

            return await self.open_stream(request, self.async_engine, jobs, events)
        answering = await self.run(request, self.async_engine, jobs)
        try:
            results = await unless_gone(request.receive, _collected(answering))
        finally:
            await answering.aclose()
            _note_results(request, answering.results)
        choices = [writer.whole(index, result) for index, result in enumerate(results)]
        return Json(writer.heading.reply(choices, usage(results, num_prompts)))

    def _encoded(
        self, prompt: Prompt, param: str, raw: bool = False, tools: Tools | None = None
    ) -> list[int]:
        """Returns the ids of a prompt, within the server's limit."""
        try:
            ids = self.engine.encode(prompt, raw, tools=tools)
        except ValueError as error:
            code = getattr(error, "code", None)
            param = "tools" if "tool" in str(error) else param
            raise ApiError(400, str(error), param=param, code=code) from error
        return self.check_prompt(ids, param)

    def check_prompt(self, ids: list[int], param: str) -> list[int]:
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
                param=param,
                code="context_length_exceeded",
            )
        return ids

    def _check(self, model: str | None, num_choices: int) -> None:
        if model is not None and model != self.settings.name:
            message = f"The model `{model}` does not exist; this server has `{self.settings.name}`."
            raise ApiError(404, message, param="model", code="model_not_found")
        if num_choices > self.settings.max_choices:
            message = f"This server gives at most {self.settings.max_choices} answers a request."
            raise ApiError(400, message, param="n", code="invalid_value")

    def _texts(self, body: ChatRequest | CompletionRequest) -> TokenTexts:
        ending = frozenset(body.stop_token_ids or ())
        if not body.ignore_eos:
            ending |= frozenset(self.engine.tokenizer.eos)
        return TokenTexts(self.engine.tokenizer.decode, ending)

    def _note_places(self) -> None:
        inside = self._places.inside
        self.metrics.running.set(min(1, inside))
        self.metrics.waiting.set(max(0, inside - 1))


def _seeded(params: SamplingParams, index: int) -> SamplingParams:
    """Returns the sampling of a choice: from a seed, each choice gets a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=params.seed + index)


def _note_results(request: Request, results: list[GenerationResult]) -> None:
    """Adds to the access log's line what was answered."""
    if results:
        request.scope["log"]["completion_tokens"] = sum(len(each.token_ids) for each in results)
        request.scope["log"]["finish_reason"] = results[-1].finish_reason


async def _collected(answering: Answering) -> list[GenerationResult]:
    async for _ in answering:
        pass
    return answering.results


async def _events(
    answering: Answering, writer: Writer, includes_usage: bool, num_prompts: int
) -> AsyncGenerator[str, None]:
    """Yields the server-sent events of a stream, up to OpenAI's last one, [DONE]."""
    more = {"usage": None} if includes_usage else {}
    async for index, chunk in answering:
        for choice in writer.parts(index, chunk):
            yield event_of(writer.heading.chunk(choice, **more))
    if includes_usage:
        yield event_of(writer.heading.chunk(usage=usage(answering.results, num_prompts)))
    yield "data: [DONE]\n\n"
