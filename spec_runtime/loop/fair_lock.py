"""Lets one caller at a time use what several threads share, in the order in which they asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from spec_runtime.interruption import Interrupted, Interruption


class Holder:
    """One caller that waits for a lock, holds it or has held it.

    `thread` is the one that used it last, which need not be the first; `is_waiting` ends when the
    lock is the caller's.
    """

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.is_waiting = True
        self.wakes: SimpleQueue[None] = SimpleQueue()  # an entry wakes the thread that waits

    def resume(self) -> None:
        """Notes that this thread goes on with what the lock is held for."""
        self.thread = threading.current_thread()

    def wake(self) -> None:
        """Lets the thread that waits look again at whether the lock is still wanted."""
        self.wakes.put(None)


class FairLock:
    """A lock whose holders get it in the order of asking.

    No thread owns it, because a suspended generator that holds it may be read on, closed or
    collected as garbage by another thread, in the midst of any line below as well. Therefore there
    is no lock inside that could be held at that moment: each change of the queue is one operation
    on a list, which Python makes atomic, and whoever changed the queue then lets its first in.
    Letting a holder in twice does no harm.
    """

    def __init__(self) -> None:
        self._queue: list[Holder] = []

    @contextmanager
    def hold(
        self, holder: Holder | None = None, interruption: Interruption | None = None
    ) -> Iterator[Holder]:
        """Waits for those who asked before, then holds the lock while the block runs.

        Raises RuntimeError if this thread holds it already: it would wait for itself. Raises
        Interrupted if the interruption has a reason before the lock is free.
        """
        holder = Holder() if holder is None else holder
        holder.resume()
        interruption = Interruption() if interruption is None else interruption
        if any(other.thread is holder.thread for other in self._queue[:]):
            raise RuntimeError(
                "this thread has an open stream on this target, which would have to end first; "
                "read it to its end, close it, or load the bundle twice"
            )
        try:
            self._queue.append(holder)
            self._let_first_in()
            while self._queue[0] is not holder:
                with suppress(Empty):
                    holder.wakes.get(timeout=interruption.seconds_to_wait)
                if interruption.reason is not None:
                    raise Interrupted
            holder.is_waiting = False
            yield holder
        finally:
            with suppress(ValueError):  # interrupted before it was in the queue
                self._queue.remove(holder)
            self._let_first_in()

    @contextmanager
    def hold_beside(self) -> Iterator[None]:
        """Holds the lock while the block runs, or does nothing if this thread holds it already.

        Raises Interrupted if another thread holds it or waits for it.
        """
        if self.is_free_for_thread and self._queue:
            yield
            return
        with self.hold(interruption=Interruption(timeout=0.0)):
            yield

    @property
    def is_free_for_thread(self) -> bool:
        """Says whether no other thread holds the lock or waits for it."""
        thread = threading.current_thread()
        return all(holder.thread is thread for holder in self._queue[:])

    def _let_first_in(self) -> None:
        for first in self._queue[:1]:
            first.wake()
