"""Holds the answers to one HTTP request: counts them as they come, and ends them in time.

The queue decodes one answer at a time, and a slow reader must not hold it. Chunks are therefore
kept until the client takes them. An answer is no longer than the bundle's context, and the number
of open streams is limited, so that this memory is limited as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from spec_runtime import Chunk, Engine, GenerationResult
from spec_runtime.serving.errors import as_api_error, stopped, timed_out
from spec_runtime.serving.metrics import Metrics
from spec_runtime.sessions.engine_queue import EngineQueue, Prepare


class Answers:
    """Iterates over (index of the choice, chunk) of a request's answers, one after the other.

    `results` holds what has been answered. Iterating raises ApiError for whatever goes wrong, also
    when `timeout` seconds are over, the wait included. `close` has to be called in the end. Raises
    QueueFull if there is no place at the engine, or too many streams are open.
    """

    def __init__(
        self,
        queue: EngineQueue,
        engine: Engine,
        prepare: Prepare,
        is_stream: bool,
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self.results: list[GenerationResult] = []
        self._metrics = metrics
        self._timeout = timeout
        self._begun = self._last = time.monotonic()  # of the choice, and of its last tokens
        self._first_seconds = 0.0
        self._job = queue.ask(engine, prepare, is_stream=is_stream, on_chunk=self._count)
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        try:
            async for index, chunk in self._job:
                yield index, chunk
        except Exception as error:
            raise as_api_error(error) from error

    async def collect(self) -> list[GenerationResult]:
        """Waits for all answers and returns them."""
        async for _ in self:
            pass
        return self.results

    def close(self) -> None:
        """Ends what still runs, and gives the request's place back."""
        self._timer.cancel()
        if not self._job.is_over:
            self._metrics.count_end("cancelled")
        self._job.leave()

    def _time_out(self) -> None:
        if not self._job.is_over:
            self._metrics.count_end("timeout")
            self._job.fail(timed_out(self._timeout))

    def _count(self, index: int, chunk: Chunk) -> None:
        """Counts a chunk as it comes. Raises ApiError for an answer that a stop has cut off."""
        now = time.monotonic()
        if chunk.token_ids:
            is_first = self._last == self._begun
            if is_first:
                self._first_seconds = now - self._begun
            self._metrics.count_chunk(now - self._last, is_first)
            self._last = now
        if chunk.result is not None:
            self.results.append(chunk.result)
            self._metrics.count_answer(chunk.result, self._first_seconds)
            self._begun = self._last = now
            if chunk.result.finish_reason == "cancelled":
                raise stopped()
