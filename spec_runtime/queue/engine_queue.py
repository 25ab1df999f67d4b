"""Queues requests in front of an engine: one thread prepares them, another answers several at a
time, and grammars are compiled apart from both."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from spec_runtime.batch.batch import Batch, Found
from spec_runtime.batch.lane import Observe
from spec_runtime.errors import DeviceLostError
from spec_runtime.loop.call import Call
from spec_runtime.loop.result import Chunk
from spec_runtime.queue.admission import Admission, Place

LOOP_SECONDS = 1.0  # until a thread that waits for readers looks whether their loops are still open
MAX_COMPILING = 8  # threads that compile grammars, or wait for the processes that try them

NEVER_BEGUN = "this engine was closed before the call's turn came; load the bundle again"

Prepare = Callable[[], Sequence[Call]]
OnChunk = Callable[[int, Chunk], None]


class EngineQueue:
    """Prepares and answers requests in the order asked; AsyncEngine and the server ask here.

    One thread prepares the requests: it renders templates and tokenizes. Grammars, which may take
    seconds to compile, are left to a few threads, and requests asked later overtake theirs
    meanwhile. Another thread answers what is prepared, as many calls together as
    `batch` has lanes: a free lane goes to the request that has fewest, and of these to the one that
    was asked first. Tasks of several event loops may ask.
    """

    def __init__(self, batch: Batch, admission: Admission) -> None:
        self.admission = admission
        self._batch = batch
        batch.open_beside(self.wake)
        self._preparer = ThreadPoolExecutor(1, "spec_runtime.prepare")
        self._compiler = ThreadPoolExecutor(MAX_COMPILING, "spec_runtime.compile")
        self._runner = ThreadPoolExecutor(1, "spec_runtime.answer")
        # Guards what follows. Event loops take it, so that it is never held over work.
        self._lock = threading.Lock()
        self.is_lost = False  # the GPU: nothing that is asked later can be answered
        self.on_lost: Callable[[], None] = lambda: None
        self._jobs: weakref.WeakSet[Job] = weakref.WeakSet()  # among them those that wait or run
        self._prepared: list[Job] = []  # with calls that have not begun
        self._num_asked = 0
        self._is_closed = self._is_answering = False
        self._changed = threading.Event()  # a call that waited may go on, or one can begin
        self._went_on = time.monotonic()  # when the last step ended, or the first request came
        self.preparing_since: float | None = None

    @property
    def seconds_in_preparation(self) -> float:
        """Returns for how long a request has kept the thread that prepares them; 0 if none does."""
        begun = self.preparing_since
        return 0.0 if begun is None else time.monotonic() - begun

    @property
    def seconds_unanswered(self) -> float:
        """Returns for how long no request has gone on, though there are some; 0 if there are
        none."""
        return time.monotonic() - self._went_on if self.admission.num_requests else 0.0

    def ask(
        self,
        prepare: Prepare,
        *,
        observe: Observe | None = None,
        is_stream: bool = False,
        max_unread: int | None = None,
        on_chunk: OnChunk | None = None,
    ) -> Job:
        """Puts in a request whose calls `prepare` makes, each to be answered on a lane of its own.

        `observe` makes of a lane's engine the one that answers. The engine gets at most
        `max_unread` chunks ahead of the reader; None is no bound. `on_chunk` gets every chunk as it
        comes, in the event loop. `is_stream` says that the request counts among the open streams.
        Raises QueueFull, and RuntimeError after `close`.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this engine is closed; load the bundle again")
            place = self.admission.enter(is_stream)
            if self.admission.num_requests == 1:
                self._went_on = time.monotonic()
            self._num_asked += 1
            job = Job(self, self._num_asked, prepare, observe, place, max_unread, on_chunk)
            job.prepared = self._preparer.submit(job.prepare)
            self._jobs.add(job)
        return job

    def compile(self, compile_all: Callable[[], None]) -> Future[None]:
        """Has a thread compile grammars, in its turn."""
        return self._compiler.submit(compile_all)

    def answer(self, job: Job) -> None:
        """Takes a prepared job, whose calls begin when their turn comes."""
        with self._lock:
            self._prepared.append(job)
            begins = not self._is_answering
            self._is_answering = True
        self.wake()
        if begins:
            self._runner.submit(self._answer)

    def wake(self) -> None:
        """Lets the answering thread look again at the calls that wait."""
        self._changed.set()

    def _answer(self) -> None:
        """Answers calls until there are none, in the answering thread."""
        running: dict[Job, None] = {}  # in the order in which they began

        def give(found: Found) -> None:
            (job, number), chunk = found
            job.take(number, chunk)
            if not job.num_left:
                running.pop(job, None)

        while True:
            self._changed.clear()
            try:
                self._begin_calls(running)
                with self._lock:
                    if not self._batch.num_active and not self._prepared:
                        self._is_answering = False
                        return
                if self._batch.num_active > 1:
                    self._batch.open_passes_beside()
                self._batch.turn(give, _may_go_on)
                went_on = self._batch.has_gone_on
            except BaseException as error:  # of the scheduler itself: no call can go on
                self._batch.close()
                with self._lock:
                    broken = {*running, *self._prepared}
                    self._prepared = []
                for job in broken:
                    job.break_off(error)
                running.clear()
                went_on = True
            if went_on:
                self._went_on = time.monotonic()
            else:
                waits = [job.seconds_to_wait for job in running]
                self._changed.wait(min([LOOP_SECONDS, *waits]))

    def _begin_calls(self, running: dict[Job, None]) -> None:
        """Begins as many prepared calls as there are lanes for."""
        waiting = self._waiting()
        while waiting:
            job = waiting.pop(0)
            if not job.may_begin():
                self._remove(job)
                job.finish()
                continue
            number, call = job.waiting[0]
            lane = self._batch.lane_for(call)
            if lane is None:
                continue
            job.waiting.popleft()
            job.num_running += 1
            if not job.waiting:
                self._remove(job)
            running[job] = None
            try:
                self._batch.begin(lane, (job, number), call, job.observe)
            except Exception as error:  # the lane could not be opened
                job.take(number, error)
                if not job.num_left:
                    del running[job]
            waiting = self._waiting()

    def _waiting(self) -> list[Job]:
        """Returns the jobs with calls that wait for a lane, in their order."""
        with self._lock:
            return sorted(self._prepared, key=lambda job: (job.num_running, job.number))

    def _remove(self, job: Job) -> None:
        with self._lock:
            self._prepared.remove(job)

    async def close(self) -> None:
        """Ends the running requests, refuses those that wait with a RuntimeError, and ends the
        threads. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            jobs = list(self._jobs)
        for job in jobs:
            job.refuse(RuntimeError(NEVER_BEGUN))
            job.end()
        await asyncio.to_thread(self._preparer.shutdown)
        await asyncio.to_thread(self._compiler.shutdown)
        await asyncio.to_thread(self._runner.shutdown)
        await asyncio.to_thread(self._batch.end_opening)


def _may_go_on(owner: tuple[Job, int]) -> bool:
    job, number = owner
    return job.may_go_on(number)


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
        prepare: Prepare,
        observe: Observe | None,
        place: Place,
        max_unread: int | None,
        on_chunk: OnChunk | None,
    ) -> None:
        self.is_over = False
        self.number = number
        self.observe = observe
        self.waiting: deque[tuple[int, Call]] = deque()  # calls that have not begun
        self.num_running = 0
        self._queue, self._prepare = queue, prepare
        self._place = place
        self._on_chunk = on_chunk
        self._max_unread = max_unread
        self._num_posted = self._num_read = 0  # chunks, counted by one thread each
        self._calls: Sequence[Call] = ()
        self._compiled: Future[None] | None = None  # None without grammars
        self._turn: Future[None] = Future()  # runs once a call is answered
        self._error: BaseException | None = None
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
        self._num_read += 1
        if self._max_unread is not None:
            self._queue.wake()
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
        if self._compiled is not None:
            self._compiled.cancel()
        self._turn.cancel()
        self._end_calls()
        self._queue.wake()

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
            self._pass_on()
        else:
            self._compiled = self._queue.compile(self._compile)

    def _compile(self) -> None:
        """Compiles the calls' grammars, in a thread that does nothing else."""
        try:
            for call in self._calls:
                call.compile()
        except BaseException as error:
            self._fail_early(error)
        self._pass_on()

    def _pass_on(self) -> None:
        self.waiting.extend(enumerate(self._calls))
        self._queue.answer(self)

    def _fail_early(self, error: BaseException) -> None:
        """Tells the reader what is wrong with the request, which gets no answer."""
        self._is_ended = True
        self._calls = ()
        self._post(error)

    @property
    def is_accepted(self) -> bool:
        """Says whether the calls are made and their grammars compiled."""
        calls = self._calls
        return bool(calls) and all(call.is_compiled for call in calls)

    @property
    def num_left(self) -> int:
        """Counts the calls that are answered or have not begun."""
        return self.num_running + len(self.waiting)

    def may_begin(self) -> bool:
        """Says, in the answering thread, whether the next call may begin: there is one, and the
        request was not ended before its first call began."""
        is_running = self._turn.running() or self._turn.set_running_or_notify_cancel()
        return is_running and bool(self.waiting)

    def may_go_on(self, number: int) -> bool:
        """Says whether this call may be taken on: the reader has few chunks left, or the call has
        to end."""
        if self._max_unread is None or self._num_posted - self._num_read < self._max_unread:
            return True
        return self._calls[number].interruption.reason is not None or self._loop.is_closed()

    @property
    def seconds_to_wait(self) -> float:
        """Returns for how long its calls may wait for the reader before they are looked at."""
        waits = [call.interruption.seconds_to_wait for call in self._calls]
        return min([LOOP_SECONDS, *(each for each in waits if each is not None)])

    def take(self, number: int, found: Chunk | BaseException) -> None:
        """Takes what came of a running call, in the answering thread: a chunk, or an error, which
        ends the request."""
        if isinstance(found, BaseException):
            self._error = found
            self.waiting.clear()
            self._end_calls()
        elif self._error is None:
            self._num_posted += 1
            self._post((number, found))
        if isinstance(found, BaseException) or found.result is not None:
            self.num_running -= 1
            if not self.num_left:
                self.finish()

    def break_off(self, error: BaseException) -> None:
        """Ends the request with an error, in the answering thread, where no call goes on."""
        self._error = error
        self.waiting.clear()
        self.num_running = 0
        self.finish()

    def finish(self) -> None:
        """Tells the reader that nothing more will come, and gives the place at the engine back."""
        self._place.leave_engine()
        self._post(self._error)
        if isinstance(self._error, DeviceLostError):
            self._queue.is_lost = True
            self._queue.on_lost()

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
