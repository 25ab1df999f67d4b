"""Lets a bounded number of requests and streams in; others hear when to try again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spec_runtime.errors import UserError

LONGEST_RETRY = 60  # seconds that a caller is asked to wait at most
SMOOTHING = 0.2  # the share of the newest request in the mean of seconds


class QueueFull(UserError):
    """Says that as many requests wait, or streams are open, as may; try again after `seconds`."""

    def __init__(self, full: str, seconds: int = 1) -> None:
        message = f"{full}, the most allowed here; try again in {seconds} s"
        super().__init__(message, code="rate_limit_exceeded")
        self.seconds = seconds


class Admission:
    """Counts the requests at the engine and the open streams, up to a bound of each.

    The engine answers `num_answered` requests at a time, for which at most `max_waiting` others
    wait. A stream counts as open until its client has read it, for which the engine need not wait;
    None is no bound. `on_change` is called after each change, from whichever thread made it.

    Raises UserError if `max_waiting` is below 0.
    """

    def __init__(
        self,
        max_waiting: int,
        max_streams: int | None = None,
        on_change: Callable[[], None] = lambda: None,
        num_answered: int = 1,
    ) -> None:
        if max_waiting < 0:
            raise UserError(f"got max_waiting {max_waiting}, expected 0 or more")
        self.num_requests = self.num_streams = 0
        self._max_waiting, self._max_streams = max_waiting, max_streams
        self._num_answered = num_answered
        self._on_change = on_change
        self._mean_seconds = 1.0  # of a request at the engine
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Counts the requests that wait for those being answered."""
        return max(0, self.num_requests - self._num_answered)

    @property
    def has_room(self) -> bool:
        """Says whether a request would be let in now."""
        return self.num_requests < self._num_answered + self._max_waiting

    def enter(self, is_stream: bool = False) -> Place:
        """Takes a place for a request. Raises QueueFull if there is none. It asks to try again
        once half of those inside should have left, going by how long the last requests took."""
        with self._lock:
            wait = round(self._mean_seconds * self.num_requests / self._num_answered / 2)
            seconds = min(max(wait, 1), LONGEST_RETRY)
            if is_stream and self.num_streams == self._max_streams:
                raise QueueFull(f"{self._max_streams} streams are open", seconds)
            if not self.has_room:
                raise QueueFull(f"{self._max_waiting} requests are waiting", seconds)
            self.num_requests += 1
            self.num_streams += is_stream
            self._on_change()
        return Place(self, is_stream)

    def leave(self, place: Place, wholly: bool) -> None:
        """Takes back a place at the engine, `wholly` also that of a stream; see Place."""
        with self._lock:
            if place.is_at_engine:
                place.is_at_engine = False
                self.num_requests -= 1
                seconds = time.monotonic() - place.begun
                self._mean_seconds += SMOOTHING * (seconds - self._mean_seconds)
            if place.is_stream and wholly:
                place.is_stream = False
                self.num_streams -= 1
            self._on_change()


class Place:
    """One request's share of an Admission. Giving it back twice does no harm."""

    def __init__(self, admission: Admission, is_stream: bool) -> None:
        self.begun = time.monotonic()
        self.is_at_engine, self.is_stream = True, is_stream
        self._admission = admission

    def leave_engine(self) -> None:
        """Lets the next request in, as the engine has no more to do for this one."""
        self._admission.leave(self, wholly=False)

    def leave(self) -> None:
        """Gives all back: the answer was read to its end, or its reader has left."""
        self._admission.leave(self, wholly=True)
