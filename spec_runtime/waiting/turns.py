"""Lets threads take turns at what only one of them at a time may use, in the order of asking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

from spec_runtime.waiting.interruption import Interrupted, Interruption


class Turn:
    """One caller's turn. `thread` is the one that used it last, which need not be the first;
    `has_come` says whether the waiting is over."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.has_come = False
        self.gate: SimpleQueue[None] = SimpleQueue()  # an entry wakes the thread that waits

    def resume(self) -> None:
        """Notes that this thread goes on with the turn."""
        self.thread = threading.current_thread()

    def wake(self) -> None:
        """Lets the thread that waits for the turn look again at whether it is still wanted."""
        self.gate.put(None)


class Turns:
    """A queue of turns: the first has what all wait for.

    No thread owns a turn, because a suspended generator that holds one may be read on, closed or
    collected as garbage by another thread, in the midst of any line below as well. Therefore there
    is no lock inside that could be held at that moment: each change of the queue is one operation
    on a list, which Python makes atomic, and whoever changed the queue then lets its first in.
    Letting a turn in twice does no harm.
    """

    def __init__(self) -> None:
        self._queue: list[Turn] = []

    @contextmanager
    def take(
        self, turn: Turn | None = None, interruption: Interruption | None = None
    ) -> Iterator[Turn]:
        """Waits for those who asked before, then has the turn while the block runs.

        Raises RuntimeError if this thread has a turn already: it would wait for itself. Raises
        Interrupted if the interruption has a reason before the turn has come.
        """
        turn = Turn() if turn is None else turn
        turn.resume()
        interruption = Interruption() if interruption is None else interruption
        if any(other.thread is turn.thread for other in self._queue[:]):
            raise RuntimeError(
                "this thread has an open stream on this target, which would have to end first; "
                "read it to its end, close it, or load the bundle twice"
            )
        try:
            self._queue.append(turn)
            self._let_first_in()
            while self._queue[0] is not turn:
                with suppress(Empty):
                    turn.gate.get(timeout=interruption.seconds_to_wait)
                if interruption.reason is not None:
                    raise Interrupted
            turn.has_come = True
            yield turn
        finally:
            with suppress(ValueError):  # interrupted before it was in the queue
                self._queue.remove(turn)
            self._let_first_in()

    def _let_first_in(self) -> None:
        for first in self._queue[:1]:
            first.wake()
