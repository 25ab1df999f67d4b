"""Holds the answers to one HTTP request: counts them as they come, and ends them in time.

A slow reader must not hold a lane that others wait for. Chunks are therefore kept until the client
takes them. An answer is no longer than the bundle's context, and the number of open streams is
limited, so that this memory is limited as well.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from spec_runtime import Chunk, GenerationResult
from spec_runtime.batch.lane import Observe
from spec_runtime.loop.answer import AnswerForm
from spec_runtime.loop.call import Call
from spec_runtime.queue.engine_queue import EngineQueue, Prepare
from spec_runtime.serve.errors import as_api_error, stopped, timed_out
from spec_runtime.serve.metrics import Metrics


class Answers:
    """Iterates over (index of the choice, chunk) of a request's answers as they come.

    `results` holds what has been answered, in the order of the choices. `prompt_tokens` counts the
    tokens of the prompts, which have equally many calls one after the other; it is 0 until these
    are prepared, and then `form` is that of the first answer. Iterating raises ApiError for
    whatever goes wrong, also when `timeout` seconds are over, the wait included. `close` has to be
    called in the end. Raises QueueFull if there is no place at the engine, or too many streams are
    open.
    """

    def __init__(
        self,
        queue: EngineQueue,
        prepare: Prepare,
        is_stream: bool,
        timeout: float,
        metrics: Metrics,
        observe: Observe | None = None,
        num_prompts: int = 1,
    ) -> None:
        self.prompt_tokens = 0
        self.form = AnswerForm()
        self._prepare, self._num_prompts = prepare, num_prompts
        self._results: dict[int, GenerationResult] = {}
        # of each choice so far, in pieces: joined anew each time they would take ever longer
        self._texts: dict[int, list[str]] | None = None if is_stream else {}
        self._metrics = metrics
        self._timeout = timeout
        self._begun = time.monotonic()
        self._last: dict[int, float] = {}  # when the last tokens of each choice came
        self._first_seconds: dict[int, float] = {}  # from the request to those of a choice
        self._job = queue.ask(
            self._prepared, observe=observe, is_stream=is_stream, on_chunk=self._count
        )
        self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out)

    @property
    def results(self) -> list[GenerationResult]:
        return [result for _, result in sorted(self._results.items(), key=lambda item: item[0])]

    @property
    def is_accepted(self) -> bool:
        """Says whether the request was found right; it waits then, or is answered."""
        return self._job.is_accepted

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        try:
            async for index, chunk in self._job:
                yield index, chunk
        except Exception as error:
            raise as_api_error(error) from error

    def _prepared(self) -> Sequence[Call]:
        calls = self._prepare()
        each_prompt = calls[:: max(1, len(calls) // self._num_prompts)]
        self.prompt_tokens = sum(len(call.prompt) for call in each_prompt)
        self.form = calls[0].form if calls else self.form
        return calls

    async def collect(self) -> list[GenerationResult]:
        """Waits for all answers and returns them."""
        async for _ in self:
            pass
        return self.results

    def close(self) -> None:
        """Ends what still runs, and gives the request's place back."""
        self._timer.cancel()
        if not self._job.is_over:
            self._metrics.count_end("cancelled")
        self._job.leave()

    def _time_out(self) -> None:
        if not self._job.is_over:
            self._metrics.count_end("timeout")
            self._job.fail(timed_out(self._timeout).with_texts(self._texts))

    def _count(self, index: int, chunk: Chunk) -> None:
        """Counts a chunk as it comes. Raises ApiError for an answer that a stop has cut off."""
        now = time.monotonic()
        if self._texts is not None and chunk.text:
            self._texts.setdefault(index, []).append(chunk.text)
        if chunk.token_ids:
            is_first = index not in self._last
            if is_first:
                self._first_seconds[index] = now - self._begun
            self._metrics.count_chunk(now - self._last.get(index, self._begun), is_first)
            self._last[index] = now
        if chunk.result is not None:
            self._results[index] = chunk.result
            self._metrics.count_answer(chunk.result, self._first_seconds.get(index, 0.0))
            if chunk.result.finish_reason == "cancelled":
                raise stopped().with_texts(self._texts)
