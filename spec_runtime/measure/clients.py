"""Measures clients that ask at the same time: tokens a second of all, first tokens, and gaps."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_runtime.batch.batch import Batch
from spec_runtime.queue.admission import Admission
from spec_runtime.queue.engine_queue import EngineQueue

if TYPE_CHECKING:
    from spec_runtime import Engine
    from spec_runtime.loop.call import Call
    from spec_runtime.sampling import SamplingOptions


@dataclass
class Traffic:
    """Holds what clients saw: seconds from asking to the first tokens of each answer, and between
    those of one step and the next."""

    tokens: int = 0
    seconds: float = 0.0  # of all clients together
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Returns tokens a second, prompts' passes included, and seconds of waits."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "first_token": _spread(self.firsts),
            "gap": _spread(self.gaps),
        }


def run(
    engine: Engine,
    prompts: Sequence[list[int]],
    clients: int,
    parallel: int,
    sampling: SamplingOptions,
    on_answer: Callable[[], None] = lambda: None,
) -> Traffic:
    """Lets so many clients share the prompts, each asking for its next answer when it has one.

    The engine answers up to `parallel` of them together. No answer begins with rows of another.
    Raises what Batch raises.
    """
    return asyncio.run(_run(engine, prompts, clients, parallel, sampling, on_answer))


async def _run(
    engine: Engine,
    prompts: Sequence[list[int]],
    clients: int,
    parallel: int,
    sampling: SamplingOptions,
    on_answer: Callable[[], None],
) -> Traffic:
    queue = EngineQueue(Batch(engine, parallel), Admission(clients))
    traffic, waiting = Traffic(), iter(prompts)

    def make_calls(prompt: list[int]) -> list[Call]:
        return [engine.make_call(prompt, **sampling, reuse=False)]

    async def client() -> None:
        for prompt in waiting:
            last = begun = time.perf_counter()
            job = queue.ask(partial(make_calls, prompt))
            try:
                async for _, chunk in job:
                    now = time.perf_counter()
                    if chunk.token_ids:
                        (traffic.firsts if last == begun else traffic.gaps).append(now - last)
                        traffic.tokens += len(chunk.token_ids)
                        last = now
            finally:
                job.leave()
            on_answer()

    try:
        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        traffic.seconds = time.perf_counter() - begin
    finally:
        await queue.close()
        engine.lanes.close()
    return traffic


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Returns median, 95th and 99th percentile, and the longest; zeros for nothing."""
    if not seconds:
        return dict.fromkeys(("median", "p95", "p99", "longest"), 0.0)
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p95": ordered[round(0.95 * last)],
        "p99": ordered[round(0.99 * last)],
        "longest": ordered[-1],
    }
