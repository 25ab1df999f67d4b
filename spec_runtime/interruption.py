"""Ends a call before its answer does: from another thread, or because its time is over."""

import math
import threading
import time

CANCELLED, TIMEOUT = "cancelled", "timeout"
# Seconds after which a call that waits for the lock looks at the caller's event again: an event
# wakes only those who wait for nothing else.
EVENT_SECONDS = 0.02


class Interrupted(Exception):
    """Says, inside the runtime, that a call ended before its first token, or within a step."""


class Interruption:
    """Says whether a call has to end early, and why.

    `timeout` are seconds from the making of this object on; `event` is the caller's own, set from
    any thread. A reason that was seen once stays.
    """

    def __init__(self, timeout: float | None = None, event: threading.Event | None = None) -> None:
        self._deadline = math.inf
        if timeout is not None:
            self._deadline = time.monotonic() + timeout
        self._event = event
        self._is_ended = False
        self._reason: str | None = None

    def end(self) -> None:
        """Ends the call as if its event had been set."""
        self._is_ended = True

    @property
    def reason(self) -> str | None:
        """Returns "cancelled" or "timeout", and None while the call may go on."""
        if self._reason is None:
            if self._is_ended or (self._event is not None and self._event.is_set()):
                self._reason = CANCELLED
            elif self._deadline < math.inf and time.monotonic() >= self._deadline:
                self._reason = TIMEOUT
        return self._reason

    @property
    def seconds_to_wait(self) -> float | None:
        """Returns how long a waiting call may sleep before it asks for `reason` again; None: until
        it is woken."""
        seconds = self._deadline - time.monotonic() if self._deadline < math.inf else math.inf
        if self._event is not None:
            seconds = min(seconds, EVENT_SECONDS)
        return max(0.0, seconds) if seconds < math.inf else None
