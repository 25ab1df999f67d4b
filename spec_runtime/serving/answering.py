"""Runs the generations of one request and hands their chunks on.

The engine decodes one answer at a time. A slow reader must therefore not hold it: chunks are read
from the engine as they come and are kept until the client takes them. An answer is no longer than
the bundle's context, and the number of open streams is limited, so that this memory is too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from spec_runtime import AsyncEngine, Chunk, GenerationResult, QueueFull, SamplingParams
from spec_runtime.errors import UserError
from spec_runtime.sampling import SamplingOptions
from spec_runtime.serving.errors import (
    ApiError,
    ClientGone,
    dumped,
    internal_error,
    response,
    stopped,
    timed_out,
    too_many,
)
from spec_runtime.serving.gates import unless_gone
from spec_runtime.serving.metrics import Metrics

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class Job:
    """One generation of a request: the choice that it makes, its prompt and its sampling."""

    index: int
    prompt: list[int]
    params: SamplingParams


class Answering:
    """Runs jobs one after the other; iterating gives (index, chunk) as they come.

    `on_end` is called once, as soon as the engine has no more to do for them. `results` holds what
    has been answered. Iterating raises ApiError for whatever goes wrong.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        jobs: Sequence[Job],
        timeout: float,
        metrics: Metrics,
        on_end: Callable[[], None],
    ) -> None:
        self.results: list[GenerationResult] = []
        self._engine = engine
        self._timeout = timeout
        self._metrics = metrics
        chunks: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue()
        self._chunks = chunks
        self._task = asyncio.create_task(self._run(jobs))

        def end(task: asyncio.Task[None]) -> None:  # also if it was cancelled before it began
            on_end()
            chunks.put_nowait(None)

        self._task.add_done_callback(end)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        while (item := await self._chunks.get()) is not None:
            yield item
        try:
            await self._task
        except Exception as error:
            raise as_api_error(error) from error

    async def aclose(self) -> None:
        """Cancels what still runs, and waits until it has ended."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, jobs: Sequence[Job]) -> None:
        try:
            async with asyncio.timeout(self._timeout):  # also while others have the engine
                for job in jobs:
                    result = await self._run_one(job)
                    self.results.append(result)
                    if result.finish_reason == "cancelled":
                        raise stopped()
        except TimeoutError:
            self._metrics.count_end("timeout")
            raise timed_out(self._timeout) from None
        except asyncio.CancelledError:
            self._metrics.count_end("cancelled")
            raise

    async def _run_one(self, job: Job) -> GenerationResult:
        last = begun = time.monotonic()
        first_seconds = 0.0
        result: GenerationResult | None = None
        async with aclosing(self._engine.stream(job.prompt, params=job.params)) as chunks:
            async for chunk in chunks:
                now = time.monotonic()
                if chunk.token_ids:
                    is_first = last == begun
                    first_seconds = now - begun if is_first else first_seconds
                    self._metrics.count_chunk(now - last, is_first)
                    last = now
                result = chunk.result
                self._chunks.put_nowait((job.index, chunk))
        assert result is not None, "the last chunk has the result"
        self._metrics.count_answer(result, first_seconds)
        return result


def as_api_error(error: Exception) -> ApiError:
    """Returns what the client is told of an error: the one line of a UserError, which was written
    for it, and of a bug nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return too_many(str(error), 1)
    if isinstance(error, UserError):
        return ApiError(400, str(error), param=_param(str(error)), code="invalid_value")
    log.error("a request failed", exc_info=error)
    return internal_error()


def _param(message: str) -> str | None:
    """Returns the field of the request that a line of SamplingParams or a grammar is about."""
    word = message.removeprefix("got ").split(maxsplit=1)[0]
    if word in ("JSON", "json_schema", "schema", "regex", "grammar", "ebnf"):
        return "response_format"
    return word if word in SamplingOptions.__annotations__ else None


class EventStream(Response):
    """Sends server-sent events, and ends with the client.

    Headers go out with the first event: what fails before becomes an ordinary error response, and
    what fails later the stream's last event, so that no stream ends early in silence. `close` is
    awaited in any case.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, receive, send))
        except ClientGone:
            scope["log"]["gone"] = True
        finally:
            await self._events.aclose()
            await self._close()  # also where the client left before the first event

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async for event in self._events:
                if not has_started:
                    has_started = True
                    await send(self._start())
                await send(_body(event))
        except ApiError as error:
            scope["log"]["error"] = error.code
            if not has_started:
                await response(error)(scope, receive, send)
                return
            await send(last_event(error))
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start(self) -> dict[str, object]:
        return {"type": "http.response.start", "status": 200, "headers": self.raw_headers}


def _body(text: str, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def is_event_stream(start: Message) -> bool:
    """Says whether the response that begins with this message is a stream of events."""
    kind = Headers(raw=start["headers"]).get("content-type", "")
    return kind.startswith("text/event-stream")


def last_event(error: ApiError) -> Message:
    """Returns the message that ends a stream of events with an error."""
    return _body(event_of(error.body), more=False)


def event_of(content: object) -> str:
    """Returns a server-sent event with JSON."""
    return f"data: {dumped(content)}\n\n"
