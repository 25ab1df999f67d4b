"""Lets threads take turns at what only one of them at a time may use, in the order of asking."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue


class Turn:
    """One caller's turn. `thread` is the one that used it last, which need not be the first."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.gate: SimpleQueue[None] = SimpleQueue()  # holds an entry once the turn has come

    def resume(self) -> None:
        """Notes that this thread goes on with the turn."""
        self.thread = threading.current_thread()


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
    def take(self) -> Iterator[Turn]:
        """Waits for those who asked before, then has the turn while the block runs.

        Raises RuntimeError if this thread has a turn already: it would wait for itself.
        """
        turn = Turn()
        if any(other.thread is turn.thread for other in self._queue[:]):
            raise RuntimeError(
                "this thread has an open stream on this target, which would have to end first; "
                "read it to its end, close it, or load the bundle twice"
            )
        try:
            self._queue.append(turn)
            self._let_first_in()
            turn.gate.get()
            yield turn
        finally:
            with suppress(ValueError):  # interrupted before it was in the queue
                self._queue.remove(turn)
            self._let_first_in()

    def _let_first_in(self) -> None:
        for first in self._queue[:1]:
            first.gate.put(None)
