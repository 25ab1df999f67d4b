"""Answers several calls at a time: each on a lane, and one pass of the target for all lanes.

A lane is an engine with a target, caches and a drafter of its own, which shares weights with the
others. What a call gets does not depend on who shares its passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack

from spec_runtime.engine import Engine
from spec_runtime.generate import Gate
from spec_runtime.requests.call import Call
from spec_runtime.requests.result import Chunk, GenerationResult
from spec_runtime.target import PREFILL_ROWS, SharedPasses, verify_together

# Rows of a pass that several share: of all trees together, and of a chunk of one prompt.
TREE_ROWS, CHUNK_ROWS = 16, 64


class Lane:
    """Answers one call at a time, pass by pass; `open_engine` opens its engine when first used."""

    def __init__(self, open_engine: Callable[[Gate], Engine]) -> None:
        self.gate = Gate()
        self.number = -1  # of the call that is answered
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._chunks: Generator[Chunk, None, GenerationResult] | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._open_engine(self.gate)
        return self._engine

    @property
    def is_free(self) -> bool:
        return self._chunks is None

    def begin(self, number: int, call: Call) -> None:
        """Begins to answer a call."""
        self.number, self._chunks = number, self.engine.answer(call)

    def advance(self) -> Iterator[Chunk]:
        """Yields the call's chunks until it waits for a pass or ends."""
        while self._chunks is not None:
            chunk = next(self._chunks)
            if self.gate.drafting is not None:
                self.gate.drafting.run()
                continue
            if self.gate.asked is not None:
                return
            if chunk.result is not None:
                self._chunks = None
            yield chunk

    def close(self) -> None:
        """Ends the call, if one is answered."""
        if self._chunks is not None:
            self._chunks.close()
            self._chunks = self.gate.asked = None


class Batch:
    """Decodes up to `parallel` calls together, a pass for all of them.

    `open_engines` open the engine of each lane, when first used. Without `passes` each runs by
    itself.
    """

    def __init__(
        self, open_engines: Sequence[Callable[[Gate], Engine]], passes: SharedPasses | None
    ) -> None:
        self._lanes = [Lane(each) for each in open_engines]
        self._passes = passes
        self.num_passes = self.num_rows = 0

    def answer(self, calls: Sequence[Call]) -> Generator[tuple[int, Chunk], None, None]:
        """Yields the chunks of prepared calls as they come, each with its call's number.

        Calls begin in their order as lanes become free. A call whose interruption ends it gives a
        result too. Closing the iterator ends all calls.
        """
        waiting = deque(enumerate(calls))
        with ExitStack() as stack:
            for lane in self._lanes:
                stack.callback(lane.close)
            while waiting or not all(lane.is_free for lane in self._lanes):
                for lane in self._lanes:
                    if lane.is_free and waiting:
                        lane.begin(*waiting.popleft())
                active = [lane for lane in self._lanes if not lane.is_free]
                for lane in active:
                    lane.gate.max_rows = max(1, TREE_ROWS // len(active))
                    lane.gate.chunk_rows = CHUNK_ROWS if len(active) > 1 else PREFILL_ROWS
                    for chunk in lane.advance():
                        yield lane.number, chunk
                asking = [lane for lane in active if lane.gate.asked is not None]
                most = 1 if self._passes is None else self._passes.max_lanes
                for begin in range(0, len(asking), most):
                    self._run(asking[begin : begin + most])

    def _run(self, lanes: Sequence[Lane]) -> None:
        """Runs one pass for these lanes."""
        targets, asked = [], []
        for lane in lanes:
            assert lane.gate.asked is not None, lane.number
            targets.append(lane.engine.target)
            asked.append(lane.gate.asked)
        self.num_passes += 1
        self.num_rows += sum(tree.num_nodes for tree, *_ in asked)
        for lane, verified in zip(
            lanes, verify_together(self._passes, targets, asked), strict=True
        ):
            lane.gate.verified = verified
