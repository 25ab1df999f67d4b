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

    The engine answers one request, for which at most `max_waiting` others wait. A stream counts as
    open until its client has read it, for which the engine need not wait. None is no bound.
    `on_change` is called after each change, from whichever thread made it.

    Raises UserError if `max_waiting` is below 0.
    """

    def __init__(
        self,
        max_waiting: int,
        max_streams: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        if max_waiting < 0:
            raise UserError(f"got max_waiting {max_waiting}, expected 0 or more")
        self.requests = _Count(1 + max_waiting, f"{max_waiting} requests are waiting")
        self.streams = _Count(max_streams, f"{max_streams} streams are open")
        self._on_change = on_change
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Counts the requests that wait for the one being answered."""
        return max(0, self.requests.inside - 1)

    @property
    def has_room(self) -> bool:
        """Says whether a request would be let in now."""
        return self.requests.has_room

    def enter(self, is_stream: bool = False) -> Place:
        """Takes a place for a request. Raises QueueFull if there is none."""
        with self._lock:
            counts = [self.streams, self.requests] if is_stream else [self.requests]
            for count in counts:
                count.require_room()
            for count in counts:
                count.inside += 1
            self._on_change()
        return Place(self, counts)

    def leave(self, count: _Count, seconds: float) -> None:
        """Gives back one of a count's places, which was held for `seconds`."""
        with self._lock:
            count.leave(seconds)
            self._on_change()


class Place:
    """One request's share of an Admission. Giving it back twice does no harm."""

    def __init__(self, admission: Admission, counts: list[_Count]) -> None:
        self._admission = admission
        self._held = counts
        self._begun = time.monotonic()

    def leave_engine(self) -> None:
        """Lets the next request in, as the engine has no more to do for this one."""
        self._leave(self._admission.requests)

    def leave(self) -> None:
        """Gives everything back, as the answer was read to its end or nobody reads it."""
        self.leave_engine()
        self._leave(self._admission.streams)

    def _leave(self, count: _Count) -> None:
        try:
            self._held.remove(count)  # one operation, so that of two threads one succeeds
        except ValueError:
            return
        self._admission.leave(count, time.monotonic() - self._begun)


class _Count:
    """Counts who is inside, up to `most`, and how long they stay."""

    def __init__(self, most: int | None, full: str) -> None:
        self.inside = 0
        self._most = most
        self._full = full
        self._mean_seconds = 1.0

    @property
    def has_room(self) -> bool:
        return self._most is None or self.inside < self._most

    def require_room(self) -> None:
        """Raises QueueFull if all places are taken. It names the time in which half of those
        inside should have left, as far as the last requests tell."""
        if not self.has_room:
            wait = round(self._mean_seconds * self.inside / 2)
            raise QueueFull(self._full, min(max(wait, 1), LONGEST_RETRY))

    def leave(self, seconds: float) -> None:
        """Counts one less, who was inside for `seconds`."""
        assert self.inside > 0, self.inside
        self.inside -= 1
        self._mean_seconds += SMOOTHING * (seconds - self._mean_seconds)
