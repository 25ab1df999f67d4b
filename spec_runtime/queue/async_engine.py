"""Offers an engine to asyncio: any number of tasks share it, and a call ends with its reader."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Self, Unpack

from spec_runtime.batch.batch import Batch
from spec_runtime.engine import Engine
from spec_runtime.loop.call import Call
from spec_runtime.loop.options import CallOptions
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.queue.admission import Admission
from spec_runtime.queue.engine_queue import EngineQueue, Job
from spec_runtime.text.prompt import Prompt

MAX_UNREAD = 4  # chunks of a stream that its reader may lag behind


class AsyncEngine:
    """Answers calls from any number of asyncio tasks with one engine, in the order asked.

    Up to `parallel` calls are decoded together, each with caches of its own, which are opened when
    first used; None decides as Engine.most_parallel does. Each gets the tokens it would get by
    itself. At most `max_waiting` calls wait for those before them; a further one raises QueueFull.
    A call ends within one step when its task is cancelled or its stream is closed. A stream is
    computed at most four chunks ahead of its reader, and then waits, while others go on: a
    `timeout` ends the calls of readers that are too slow. Tasks of several event loops may share
    it. It owns the engine: `close`, or `async with`, closes both.

    Raises UserError if max_waiting is below 0, and for a `parallel` that Batch refuses.
    """

    def __init__(self, engine: Engine, max_waiting: int = 64, parallel: int | None = None) -> None:
        self.engine = engine
        self._batch = Batch(engine, engine.most_parallel if parallel is None else parallel)
        admission = Admission(max_waiting, num_answered=self._batch.parallel)
        self._queue = EngineQueue(self._batch, admission)

    @property
    def num_waiting(self) -> int:
        """Counts the calls that wait for those before them."""
        return self._queue.admission.num_waiting

    async def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> GenerationResult:
        """Returns the whole answer; see Engine.generate for arguments and errors.

        Raises QueueFull if too many calls wait, and RuntimeError if the engine is closed.
        """
        result: GenerationResult | None = None
        job = self._ask(prompt, options)
        try:
            async for _, chunk in job:
                result = chunk.result
        finally:
            job.leave()
        assert result is not None, "the last chunk has the result"
        return result

    async def stream(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yields a chunk a step, the last with the result; see `generate`.

        The call takes its place in the queue when the first chunk is asked for.
        """
        job = self._ask(prompt, options, MAX_UNREAD)
        try:
            async for _, chunk in job:
                yield chunk
        finally:
            job.leave()

    def _ask(self, prompt: Prompt, options: CallOptions, max_unread: int | None = None) -> Job:
        def prepare() -> list[Call]:
            return [self.engine.make_call(prompt, **options)]

        return self._queue.ask(prepare, max_unread=max_unread)

    async def close(self) -> None:
        """Ends the running calls with finish reason "cancelled", refuses those that wait with a
        RuntimeError, and closes the engine. Closing twice is fine."""
        await self._queue.close()
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
