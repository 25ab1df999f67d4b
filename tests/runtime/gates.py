"""Holds a toy target's runs until a test lets them through, and counts the work of a function, so
that tests need no clock."""

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec

import numpy as np

from spec_runtime import Engine

PATIENCE = 20.0  # seconds until a thread counts as stuck
MANY = 10_000
Arguments = ParamSpec("Arguments")


def wait_until(is_so: Callable[[], object], patience: float = PATIENCE) -> None:
    """Waits for what no event tells."""
    end = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def in_loop(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """Runs a test that is a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Arguments.args, **options: Arguments.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), PATIENCE))

    return run


class GatedRuns:
    """Each run of the engine's target waits for `let_through`; `wait_for_run` waits for one that
    waits. `num_begun` counts those that came, `num_runs` those let through."""

    def __init__(self, engine: Engine) -> None:
        backend: Any = engine.target.lend()[0]
        self._run = backend.run
        self._arrived, self._permits = threading.Semaphore(0), threading.Semaphore(0)
        self.num_begun = self.num_runs = 0
        backend.run = self._wait_and_run

    def _wait_and_run(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str]
    ) -> dict[str, np.ndarray]:
        self.num_begun += 1
        self._arrived.release()
        assert self._permits.acquire(timeout=PATIENCE), "nobody let this run through"
        self.num_runs += 1
        found: dict[str, np.ndarray] = self._run(feeds, outputs)
        return found

    def wait_for_run(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE), "no run came"

    def let_through(self, num_runs: int = MANY) -> None:
        self._permits.release(num_runs)


def calls_in(function: Callable[[], Any], counts: list[int] | None = None) -> int:
    """Returns how many functions one calls, those in C too; `counts` always holds the last sum."""
    counted = [0] if counts is None else counts

    def see(frame: Any, event: str, argument: Any) -> None:
        counted[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted[0]
