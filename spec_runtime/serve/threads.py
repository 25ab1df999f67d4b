"""Runs what grows with a request in threads, so that the event loop goes on meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spec_runtime.serve.errors import ApiError

SMALL = 16 << 10  # bytes or characters that the event loop itself reads or writes at a time

Work = TypeVar("Work")


class Threads:
    """Runs the work of requests in up to `num_threads` threads, in the order asked. At most `most`
    pieces wait or run, None is no bound. Used by one event loop."""

    def __init__(self, num_threads: int, most: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "spec_runtime.serve")
        self._most = most
        self._num_asked = 0

    async def run(self, work: Callable[[], Work]) -> Work:
        """Returns what `work` returns; it is not begun once the caller is cancelled. Raises
        ApiError where too many wait."""
        if self._num_asked == self._most:
            message = f"{self._most} requests wait to be read; ask again in a moment."
            more = {"kind": "server_error", "code": "overloaded"}
            raise ApiError(503, message, **more, headers={"Retry-After": "1"})
        self._num_asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_asked -= 1

    async def close(self) -> None:
        """Waits for what runs, and drops what waits."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
