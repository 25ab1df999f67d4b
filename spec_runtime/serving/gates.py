"""Lets a bounded number of requests in, and ends the work for clients that have gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from spec_runtime.serving.errors import ClientGone, too_many

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Work = TypeVar("Work")

LONGEST_RETRY = 60  # seconds that a client is asked to wait at most
SMOOTHING = 0.2  # the share of the newest request in the mean of seconds


class Gate:
    """Counts who is in, up to `most`; further ones are refused with the error 429.

    The error asks the client to come back after the time in which half of those inside should have
    left, as far as the last requests tell.
    """

    def __init__(self, most: int, full: str) -> None:
        self.most = most
        self.inside = 0
        self._full = full
        self._mean_seconds = 1.0

    def enter(self) -> None:
        """Takes a place. Raises ApiError if there is none; `leave` gives the place back."""
        if self.inside >= self.most:
            wait = round(self._mean_seconds * self.inside / 2)
            raise too_many(self._full, min(max(wait, 1), LONGEST_RETRY))
        self.inside += 1

    def leave(self, seconds: float) -> None:
        """Gives a place back after so many seconds of work."""
        assert self.inside > 0, self.inside
        self.inside -= 1
        self._mean_seconds += SMOOTHING * (seconds - self._mean_seconds)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Work]) -> Work:
    """Returns what `work` returns; cancels it and raises ClientGone once the client disconnects.

    `receive` is ASGI's, and the request's body has to be read already.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
