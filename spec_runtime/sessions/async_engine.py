"""Offers an engine to asyncio: calls run one after the other in a thread of their own, and end
when nobody reads them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from typing import Self, Unpack

from spec_runtime.engine import Engine
from spec_runtime.errors import UserError
from spec_runtime.requests.call import Call
from spec_runtime.requests.options import CallOptions
from spec_runtime.requests.result import Chunk, GenerationResult
from spec_runtime.text.tokenizer import Prompt

MAX_UNREAD = 4  # chunks of a stream that its reader may lag behind
LOOP_SECONDS = 1.0  # until a thread that waits for a reader looks whether the loop is still open

NEVER_BEGUN = "this engine was closed before the call's turn came; load the bundle again"


class QueueFull(RuntimeError):
    """Says that as many calls wait as may; try again later."""


class AsyncEngine:
    """Answers calls from any number of asyncio tasks with one engine, in the order asked.

    At most `max_waiting` calls wait for those before them; a further one raises QueueFull. A call
    ends within one step when its task is cancelled or its stream is closed. A stream is computed at
    most four chunks ahead of its reader, for which the calls behind it wait: a `timeout` ends the
    calls of readers that are too slow. Tasks of several event loops may share it. It owns the
    engine: `close`, or `async with`, closes both.

    Raises ValueError if max_waiting is below 0.
    """

    def __init__(self, engine: Engine, max_waiting: int = 64) -> None:
        if max_waiting < 0:
            raise UserError(f"got max_waiting {max_waiting}, expected 0 or more")
        self.engine = engine
        self._max_waiting = max_waiting
        self._preparer = ThreadPoolExecutor(1, "spec_runtime.prepare")
        self._runner = ThreadPoolExecutor(1, "spec_runtime.answer")
        self._lock = threading.Lock()  # of what follows
        self._jobs: set[_Job] = set()  # that run, wait, or are read
        self._is_closed = False
        self._clock = _StepClock()

    @property
    def seconds_in_step(self) -> float:
        """Returns for how long the step that the engine computes now has taken; 0 if it is idle.

        A prompt counts as one step, and so does the wait for other engines on the same target.
        """
        return self._clock.seconds

    @property
    def num_waiting(self) -> int:
        """Counts the calls that wait for one before them."""
        with self._lock:
            return max(0, self._num_unanswered - 1)

    @property
    def _num_unanswered(self) -> int:
        return sum(not job.answer.done() for job in self._jobs)

    async def generate(self, prompt: Prompt, **options: Unpack[CallOptions]) -> GenerationResult:
        """Returns the whole answer; see Engine.generate for arguments and errors.

        Raises QueueFull if too many calls wait, and RuntimeError if the engine is closed.
        """
        job = self._ask(prompt, options, is_stream=False)
        try:
            result = (await job.next()).result
            assert result is not None, "a chunk of a stream"
            return result
        finally:
            self._leave(job)

    async def stream(
        self, prompt: Prompt, **options: Unpack[CallOptions]
    ) -> AsyncGenerator[Chunk, None]:
        """Yields a chunk a step, the last with the result; see `generate`.

        The call takes its place in the queue when the first chunk is asked for.
        """
        job = self._ask(prompt, options, is_stream=True)
        try:
            while True:
                chunk = await job.next()
                yield chunk
                if chunk.result is not None:
                    return
        finally:
            self._leave(job)

    async def close(self) -> None:
        """Ends the running call with finish reason "cancelled", refuses those that wait with a
        RuntimeError, and closes the engine. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            jobs = self._jobs.copy()
        for job in jobs:
            job.refuse(RuntimeError(NEVER_BEGUN))
            job.end()
        await asyncio.to_thread(self._shut_down)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _shut_down(self) -> None:
        self._preparer.shutdown()
        self._runner.shutdown()
        self.engine.close()

    def _ask(self, prompt: Prompt, options: CallOptions, is_stream: bool) -> _Job:
        job = _Job(asyncio.get_running_loop(), is_stream)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this engine is closed; load the bundle again")
            if (num_unanswered := self._num_unanswered) > self._max_waiting:
                raise QueueFull(
                    f"got a call while {num_unanswered - 1} wait, expected at most "
                    f"{self._max_waiting}; try again later"
                )
            job.call = self._preparer.submit(self.engine.prepare, prompt, **options)
            job.answer = self._runner.submit(job.run, self.engine, self._clock)
            self._jobs.add(job)
        job.call.add_done_callback(job.look_at_call)
        return job

    def _leave(self, job: _Job) -> None:
        job.end()
        with self._lock:
            self._jobs.discard(job)


class _StepClock:
    """Knows since when the engine's thread has been computing a step."""

    def __init__(self) -> None:
        self._begun: float | None = None

    @property
    def seconds(self) -> float:
        begun = self._begun
        return 0.0 if begun is None else time.monotonic() - begun

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._begun = None


class _Job:
    """A call between the task that reads it and the threads that prepare and answer it."""

    call: Future[Call]
    answer: Future[None]

    def __init__(self, loop: asyncio.AbstractEventLoop, is_stream: bool) -> None:
        self._loop = loop
        self._is_stream = is_stream
        self._inbox: asyncio.Queue[Chunk | BaseException] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_UNREAD)
        self._is_ended = False

    async def next(self) -> Chunk:
        """Waits for the next chunk; raises what the call raised."""
        found = await self._inbox.get()
        self._room.release()
        if isinstance(found, BaseException):
            raise found
        return found

    def look_at_call(self, call: Future[Call]) -> None:
        """Tells the reader at once if its arguments are bad; ends a call that nobody waits for."""
        if call.cancelled():
            return
        error = call.exception()
        if error is not None:
            self._post(error)
        elif self._is_ended:
            call.result().end()

    def end(self) -> None:
        """Ends the call within a step, from any thread; does nothing once it is over."""
        self._is_ended = True
        self.answer.cancel()
        if not self.call.cancel() and self.call.done() and self.call.exception() is None:
            self.call.result().end()
        self._room.release()

    def refuse(self, error: Exception) -> None:
        """Tells the reader why its call is not answered, unless it is being answered."""
        if self.answer.cancel():
            self._post(error)

    def run(self, engine: Engine, clock: _StepClock) -> None:
        """Answers the call, in the engine's thread."""
        try:
            call = self.call.result()
        except CancelledError:  # ended before it was prepared
            self._post(RuntimeError(NEVER_BEGUN))
            return
        except Exception:
            return  # its reader knows, see `look_at_call`
        try:
            with closing(engine.answer(call)) as chunks:
                is_last = False
                while not is_last:
                    if self._is_stream:
                        self._wait_for_room(call)
                    with clock:
                        chunk = next(chunks)
                    is_last = chunk.result is not None
                    if self._is_stream or is_last:
                        self._post(chunk)
        except BaseException as error:
            self._post(error)

    def _wait_for_room(self, call: Call) -> None:
        """Waits until the reader has few chunks left, or the call has to end."""
        interruption = call.interruption
        while interruption.reason is None and not self._loop.is_closed():
            seconds = interruption.seconds_to_wait
            seconds = LOOP_SECONDS if seconds is None else min(seconds, LOOP_SECONDS)
            if self._room.acquire(timeout=seconds):
                return

    def _post(self, found: Chunk | BaseException) -> None:
        """Hands a chunk, or what went wrong, to the reader; ends the call if its loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, found)
        except RuntimeError:  # the loop is closed
            self.end()
