"""Queues requests in front of engines: one thread prepares them, another answers them, and grammars
are compiled apart from both."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Self

from spec_runtime.engine import Engine
from spec_runtime.requests.call import Call
from spec_runtime.requests.result import Chunk
from spec_runtime.waiting.admission import Admission, Place

LOOP_SECONDS = 1.0  # until a thread that waits for a reader looks whether the loop is still open

NEVER_BEGUN = "this engine was closed before the call's turn came; load the bundle again"

Prepare = Callable[[], Sequence[Call]]
OnChunk = Callable[[int, Chunk], None]


class EngineQueue:
    """Prepares and answers requests in the order asked; AsyncEngine and the server ask here.

    One thread prepares the requests: it renders templates and tokenizes. A request with a grammar,
    which may take seconds to compile, gets a thread of its own for that, and those asked later
    overtake it meanwhile. Another thread answers what is prepared. A scheduler that decodes several
    requests at a time belongs in the place of that last thread, `Job.run`: it finds prepared calls
    in the order asked, and hands the chunks of each to its job. Admission before it and reading
    after it do not know how many run at once.

    Engines of one target may share a queue. Tasks of several event loops may ask.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._preparer = ThreadPoolExecutor(1, "spec_runtime.prepare")
        self._runner = ThreadPoolExecutor(1, "spec_runtime.answer")
        self._lock = threading.Lock()  # of what follows
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()  # among them those that wait or run
        self._prepared: list[Job] = []
        self._num_asked = 0
        self._is_closed = False
        self._step_begun: float | None = None
        self.preparing_since: float | None = None

    @property
    def seconds_in_step(self) -> float:
        """Returns for how long the step that is computed now has taken; 0 if none is.

        A prompt counts as one step, and so does the wait for others who use the target.
        """
        begun = self._step_begun
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def seconds_in_preparation(self) -> float:
        """Returns for how long a request has kept the thread that prepares them; 0 if none does."""
        begun = self.preparing_since
        return 0.0 if begun is None else time.monotonic() - begun

    def ask(
        self,
        engine: Engine,
        prepare: Prepare,
        *,
        is_stream: bool = False,
        max_unread: int | None = None,
        on_chunk: OnChunk | None = None,
    ) -> Job:
        """Puts in a request whose calls `prepare` makes, to be answered one after the other.

        The engine gets at most `max_unread` chunks ahead of the reader; None is no bound.
        `on_chunk` gets every chunk as it comes, in the event loop. `is_stream` says that the
        request counts among the open streams. Raises QueueFull, and RuntimeError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this engine is closed; load the bundle again")
            place = self.admission.enter(is_stream)
            self._num_asked += 1
            job = Job(self, self._num_asked, engine, prepare, place, max_unread, on_chunk)
            job.prepared = self._preparer.submit(job.prepare)
            self._jobs.add(job)
        return job

    def answer(self, job: Job) -> None:
        """Takes a prepared job, to be run after those that were asked before it."""
        with self._lock:
            self._prepared.append(job)
        self._runner.submit(self._run_next)

    def _run_next(self) -> None:
        with self._lock:
            job = min(self._prepared, key=lambda job: job.number)
            self._prepared.remove(job)
        job.run()

    def advance(self, chunks: Iterator[Chunk]) -> Chunk:
        """Computes a call's next chunk."""
        self._step_begun = time.monotonic()
        try:
            return next(chunks)
        finally:
            self._step_begun = None

    async def close(self) -> None:
        """Ends the running request, refuses those that wait with a RuntimeError, and ends the
        threads. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs)
        for job in jobs:
            job.refuse(RuntimeError(NEVER_BEGUN))
            job.end()
        await asyncio.to_thread(self._preparer.shutdown)
        for job in jobs:
            await asyncio.to_thread(job.wait_until_compiled)
        await asyncio.to_thread(self._runner.shutdown)


class Job:
    """One request between the task that reads its answers and the queue's threads.

    `number` is its place in the order asked. Iterating gives (number of the call, chunk) as they
    come, and raises what went wrong. The reader calls `leave` in the end. `is_over` says, in the
    event loop, that nothing more will come.
    """

    prepared: Future[None]

    def __init__(
        self,
        queue: EngineQueue,
        number: int,
        engine: Engine,
        prepare: Prepare,
        place: Place,
        max_unread: int | None,
        on_chunk: OnChunk | None,
    ) -> None:
        self.is_over = False
        self.number = number
        self._queue, self._engine, self._prepare = queue, engine, prepare
        self._place = place
        self._on_chunk = on_chunk
        self._room = None if max_unread is None else threading.Semaphore(max_unread)
        self._calls: Sequence[Call] = ()
        self._compiler: threading.Thread | None = None
        self._turn: Future[None] = Future()  # runs once the calls are answered
        self._is_ended = False
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        found = await self._inbox.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, BaseException):
            raise found
        if self._room is not None:
            self._room.release()
        return found

    def leave(self) -> None:
        """Ends the request for a reader that wants no more of it, and gives its place back."""
        self.is_over = True
        self.end()
        self._place.leave()

    def end(self) -> None:
        """Ends the calls within a step, from any thread; does nothing once they are over."""
        self._is_ended = True
        self._place.leave_engine()
        self.prepared.cancel()
        self._turn.cancel()
        self._end_calls()
        if self._room is not None:
            self._room.release()

    def _end_calls(self) -> None:
        for call in self._calls:
            call.end()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error for its reader, in the event loop."""
        if not self.is_over:
            self._receive(error)
            self.end()

    def refuse(self, error: Exception) -> None:
        """Tells the reader why the request is not answered, unless it is being answered."""
        if self._turn.cancel():
            self._post(error)

    def prepare(self) -> None:
        """Makes the calls, in the preparing thread; tells the reader at once if that fails."""
        self._queue.preparing_since = time.monotonic()
        try:
            self._calls = self._prepare()
        except BaseException as error:
            self._fail_early(error)
        finally:
            self._queue.preparing_since = None
        if self._is_ended:
            self._end_calls()
        if all(call.is_compiled for call in self._calls):
            self._queue.answer(self)
        else:
            self._compiler = threading.Thread(
                target=self._compile, name="spec_runtime.compile", daemon=True
            )
            self._compiler.start()

    def _compile(self) -> None:
        """Compiles the calls' grammars, in a thread of its own."""
        try:
            for call in self._calls:
                call.compile()
        except BaseException as error:
            self._fail_early(error)
        self._queue.answer(self)

    def wait_until_compiled(self) -> None:
        """Waits for the thread that compiles grammars, once the preparing one has ended."""
        if self._compiler is not None:
            self._compiler.join()

    def _fail_early(self, error: BaseException) -> None:
        """Tells the reader what is wrong with the request, of which nothing is answered."""
        self._is_ended = True
        self._calls = ()
        self._post(error)

    def run(self) -> None:
        """Answers the calls, in the answering thread; does nothing if they were ended before."""
        if not self._turn.set_running_or_notify_cancel():
            return
        end: BaseException | None = None
        try:
            for number, call in enumerate(self._calls):  # those that were ended give a result too
                self._run_call(number, call)
        except BaseException as error:
            end = error
        self._place.leave_engine()
        self._post(end)

    def _run_call(self, number: int, call: Call) -> None:
        with closing(self._engine.answer(call)) as chunks:
            is_last = False
            while not is_last:
                self._wait_for_room(call)
                chunk = self._queue.advance(chunks)
                is_last = chunk.result is not None
                self._post((number, chunk))

    def _wait_for_room(self, call: Call) -> None:
        """Waits until the reader has few chunks left, or the call has to end."""
        if self._room is None:
            return
        interruption = call.interruption
        while interruption.reason is None and not self._loop.is_closed():
            seconds = interruption.seconds_to_wait
            seconds = LOOP_SECONDS if seconds is None else min(seconds, LOOP_SECONDS)
            if self._room.acquire(timeout=seconds):
                return

    def _post(self, found: tuple[int, Chunk] | BaseException | None) -> None:
        """Hands a chunk, an error or the end to the reader; ends the calls if its loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._receive, found)
        except RuntimeError:  # the loop is closed
            self.end()

    def _receive(self, found: tuple[int, Chunk] | BaseException | None) -> None:
        if self.is_over:
            return
        if isinstance(found, tuple) and self._on_chunk is not None:
            try:
                self._on_chunk(*found)
            except Exception as error:
                found = error
                self.end()
        self.is_over = not isinstance(found, tuple)
        self._inbox.put_nowait(found)
