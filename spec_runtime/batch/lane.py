"""Answers one call at a time, pass by pass, beside other lanes."""

from collections.abc import Callable
from typing import Any

from spec_runtime.engine import Engine
from spec_runtime.loop.answering import Answering
from spec_runtime.loop.call import Call
from spec_runtime.loop.generate import Decoding
from spec_runtime.loop.proposer import OpenedDrafter, PlainProposer, Proposer
from spec_runtime.loop.reading import ChunkReader
from spec_runtime.loop.result import Chunk
from spec_runtime.loop.step import Step
from spec_runtime.loop.target import PREFILL_ROWS
from spec_runtime.pace.pacer import Pacer, Pause
from spec_runtime.trees.budget import Budget

# Rules by which what is accepted depends on what is drafted, so that trees stay what they are.
TREE_RULES = ("rejection", "typical")

Observe = Callable[[Engine], Engine]  # makes of a lane's engine the one that answers


def undrafted(engine: Engine) -> Engine:
    """Returns an engine on the same target that drafts nothing, and reuses no rows of this one."""
    plain = OpenedDrafter("none", PlainProposer(), Budget(1))
    return Engine(engine.target, engine.tokenizer, plain)


class Lane:
    """Has an engine with a target, caches and a drafter of its own, which shares the weights.

    It is the lane of this number of `primary`, opened when first used. `owner` is whatever the
    caller gave with the call that is answered.
    """

    def __init__(self, primary: Engine, number: int) -> None:
        self.owner: Any = None
        self.pacer = Pacer(PlainProposer())
        self.answering: Answering | None = None
        self.begun = 0  # which of the batch's calls, counted from 1, was its last
        self._primary, self._number = primary, number
        self._reader: ChunkReader | None = None
        self._step: Step | None = None  # that was put off
        self._has_exact_rows = True

    @property
    def engine(self) -> Engine:
        return self._primary.lane(self._number)

    @property
    def is_free(self) -> bool:
        return self.answering is None

    @property
    def is_taken(self) -> bool:
        """Says whether others hold the target, or wait for it, and a call would wait for them."""
        return self.is_open and not self.engine.target.lock.is_free_for_thread

    @property
    def call(self) -> Call:
        assert self.answering is not None, "nothing is answered"
        return self.answering.call

    @property
    def decoding(self) -> Decoding:
        assert self.answering is not None, "nothing is answered"
        assert self.answering.decoding is not None, "it has not begun"
        return self.answering.decoding

    @property
    def num_unread(self) -> int:
        """Counts the prompt's tokens that no pass has read so far."""
        if self.answering is None or self.answering.decoding is None:
            return len(self.call.prompt)
        return self.answering.decoding.num_unread

    @property
    def cuts_trees(self) -> bool:
        """Says whether no token depends on how large trees and chunks of the prompt are.

        Where rows are not exact, those in other places round noticeably otherwise, and a seed
        promises the same tokens again.
        """
        params = self.call.params
        return params.rule not in TREE_RULES and (params.seed is None or self._has_exact_rows)

    def num_common(self, prompt: list[int]) -> int:
        """Returns how many tokens at the beginning of the prompt this lane has rows of."""
        return self.engine.conversations.num_common(prompt) if self.is_open else 0

    @property
    def num_held(self) -> int:
        """Returns how many tokens this lane has rows of."""
        return self.engine.conversations.num_held if self.is_open else 0

    @property
    def is_open(self) -> bool:
        """Says whether it has its caches."""
        return self._number <= self._primary.num_lanes

    def begin(self, owner: Any, call: Call, observe: Observe | None, pause: Pause | None) -> None:
        """Begins to answer a call, by what `observe` makes of the lane's engine; `pause` is that of
        its pacer."""
        engine = self.engine if observe is None else observe(self.engine)
        own = self.engine.proposer
        # asked for here: later, another lane that opens holds the lock of all
        self._has_exact_rows = engine.target.has_exact_rows

        def paced(proposer: Proposer) -> Proposer:
            if isinstance(own, Pacer) and not isinstance(proposer, PlainProposer):
                self.pacer = own
            else:
                proposer = self.pacer = Pacer(proposer)
            self.pacer.begins_with = pause if self.cuts_trees else None
            return proposer

        self.owner, self._reader = owner, ChunkReader(call)
        self.answering = engine.answering(call, paced)

    def limit(self, max_rows: int, chunk_rows: int, is_shared: bool) -> None:
        """Sets what the call may ask of the next pass, and whether others share it."""
        self.pacer.is_shared = is_shared and self.cuts_trees
        rows = (max_rows, chunk_rows) if self.cuts_trees else (PREFILL_ROWS, PREFILL_ROWS)
        self.decoding.max_rows, self.decoding.chunk_rows = rows

    def puts_off(self) -> bool:
        """Keeps what the last pass committed until `read_put_off`, if the call goes on on a device,
        which then runs the next pass meanwhile."""
        answering = self.answering
        if answering is None or (decoding := answering.decoding) is None:
            return False
        if not (decoding.target.is_on_device and decoding.goes_on()):
            return False
        self._step = self._step or answering.take_step()
        return True

    def read_put_off(self) -> list[Chunk]:
        """Returns the chunk of what was put off, if anything was."""
        step, self._step = self._step, None
        assert self._reader is not None
        return [] if step is None else [self._reader.chunk(step)]

    def read(self) -> list[Chunk]:
        """Returns chunks of what the last pass committed, and of the end, which frees the lane."""
        assert self.answering is not None
        self._step = self._step or self.answering.take_step()
        chunks = self.read_put_off()
        if not self.answering.goes_on():
            assert self.answering.result is not None
            assert self._reader is not None
            chunks.append(self._reader.last(self.answering.result))
            self.close()
        return chunks

    def close(self) -> None:
        """Ends the call, if one is answered."""
        if self.answering is not None:
            self.answering.close()
        self.answering = self._reader = self._step = None
