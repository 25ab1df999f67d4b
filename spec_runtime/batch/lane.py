"""Answers one call at a time, pass by pass, beside other lanes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

from spec_runtime.batch.answering import Answering, Observe
from spec_runtime.engine import Engine
from spec_runtime.loop.call import Call
from spec_runtime.loop.generate import Gate
from spec_runtime.loop.result import Chunk, GenerationResult
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.pace.row_budget import Gain

# Rules by which what is accepted depends on what is drafted, so that trees stay what they are.
TREE_RULES = ("rejection", "typical")


class Lane:
    """Has an engine with a target, caches and a drafter of its own, which shares the weights.

    It is the lane of this number of `primary`, opened when first used. `owner` is whatever the
    caller gave with the call that is answered. With `has_gate` false it is the only lane, whose
    engine runs its passes itself.
    """

    def __init__(self, primary: Engine, number: int, has_gate: bool) -> None:
        self.gate = Gate() if has_gate else None
        self.owner: Any = None
        self.call: Call | None = None
        self.gain = Gain()
        self.is_reading = False  # the prompt
        self.seconds = 0.0  # of the host and the drafter since the last pass
        self.num_accepted = 0  # drafted tokens of the last step
        self._primary, self._number = primary, number
        self._chunks: Generator[Chunk, None, GenerationResult] | None = None

    @property
    def engine(self) -> Engine:
        return self._primary.lane(self._number)

    @property
    def is_free(self) -> bool:
        return self._chunks is None

    @property
    def is_taken(self) -> bool:
        """Says whether others hold the target, or wait for it, and a call would wait for them."""
        return self.is_open and not self.engine.target.lock.is_free_for_thread

    @property
    def cuts_trees(self) -> bool:
        """Says whether no token depends on how large the trees are.

        Below fp32 rows in other places round noticeably otherwise, and a seed promises the same
        tokens again.
        """
        if self.call is None or self.call.params.rule in TREE_RULES:
            return False
        return self.call.params.seed is None or self.engine.target.precision == "fp32"

    def num_common(self, prompt: list[int]) -> int:
        """Returns how many tokens at the beginning of the prompt this lane has rows of."""
        return self.engine.num_common(prompt) if self.is_open else 0

    @property
    def is_open(self) -> bool:
        """Says whether it has its caches."""
        return self._number <= self._primary.num_lanes

    @property
    def num_unread(self) -> int:
        """Counts the prompt's tokens that no pass has read so far, or is about to."""
        assert self.call is not None, "nothing is read"
        num_tokens = len(self.call.prompt)
        if self.gate is None or self.gate.asked is None:
            return num_tokens
        return num_tokens - self.engine.target.length - self.gate.asked.tree.num_nodes

    def begin(self, owner: Any, call: Call, observe: Observe | None, gain: Gain) -> None:
        """Begins to answer a call, by what `observe` makes of the lane's engine; `gain` judges its
        drafts."""
        engine: Answering = self.engine if observe is None else observe(self.engine)
        self.owner, self.call, self.gain, self.is_reading = owner, call, gain, True
        self._chunks = engine.answer(call, self.gate)

    def advance(self) -> Iterator[Chunk]:
        """Yields the call's chunks until it waits for a run or ends; without a gate, one."""
        begin = time.perf_counter()
        while self._chunks is not None:
            chunk = next(self._chunks)
            if self.gate is not None and (self.gate.asked or self.gate.drafting):
                self.seconds += time.perf_counter() - begin
                return
            self.is_reading = False
            if chunk.token_ids:
                self.num_accepted = sum(depth > 0 for depth in chunk.depths)
            if chunk.result is not None:
                self._chunks = self.call = None
            yield chunk
            if self.gate is None:
                return

    def limit(self, max_rows: int, chunk_rows: int) -> None:
        """Sets what the call may ask of the next pass."""
        if self.gate is not None:
            self.gate.max_rows = max_rows if self.cuts_trees else PREFILL_ROWS
            self.gate.chunk_rows = chunk_rows

    def close(self) -> None:
        """Ends the call, if one is answered."""
        if self._chunks is not None:
            self._chunks.close()
        self._chunks = self.call = None
        if self.gate is not None:
            self.gate.asked = self.gate.verified = self.gate.drafting = None
