"""Has the lanes on which an engine's calls are answered together, and what comes from a bundle."""

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Generic, Protocol, TypeVar

from spec_runtime.errors import UserError
from spec_runtime.loop.call import Call
from spec_runtime.loop.proposer import OpenedDrafter
from spec_runtime.loop.result import Chunk
from spec_runtime.loop.target import SharedPasses

E = TypeVar("E", bound="Closable")


class Closable(Protocol):
    """An engine."""

    def close(self) -> None: ...


class ManyAnswers(Protocol):
    """Answers several calls at a time, see batch.batch.Batch."""

    def answer(self, calls: Sequence[Call]) -> Generator[tuple[int, Chunk], None, None]: ...


class Source(Protocol[E]):
    """Opens more of the same bundle, see load.DrafterOpener; `names` are those of the drafters."""

    @property
    def names(self) -> Sequence[str]: ...

    def open(self, name: str | None, lookup: bool | None) -> OpenedDrafter: ...

    def open_lane(self, engine: E) -> E: ...

    def free_bytes(self) -> int: ...

    def lane_bytes(self, drafter: str) -> int: ...

    def open_passes(self) -> SharedPasses | None: ...

    def open_batch(self, engine: E, parallel: int) -> ManyAnswers: ...


class Lanes(Generic[E]):
    """Holds the engines of an engine's lanes but the first, which is that engine itself, and what
    runs a pass for all of them. Each has a target and caches of its own, opened when first used.

    Without a `source` there is one lane only. `require_open` raises RuntimeError once the engine is
    closed.
    """

    def __init__(self, source: Source[E] | None, require_open: Callable[[], None]) -> None:
        self.others: list[E] = []
        self._source, self._require_open = source, require_open
        self._passes: SharedPasses | None = None
        self._opening = threading.Lock()  # of threads that open lanes, one at a time

    @property
    def source(self) -> Source[E]:
        """Returns what opens lanes; raises UserError if there is nothing, and RuntimeError if the
        engine is closed."""
        self._require_open()
        if self._source is None:
            raise UserError(
                "this engine was not loaded from a bundle: it has one drafter and one lane only"
            )
        return self._source

    @property
    def has_source(self) -> bool:
        return self._source is not None

    def get(self, engine: E, number: int) -> E:
        """Returns the engine of a lane, of which number 0 is `engine`."""
        with self._opening:
            while number > len(self.others):
                self.others.append(self.source.open_lane(engine))
        return engine if number == 0 else self.others[number - 1]

    @property
    def passes(self) -> SharedPasses | None:
        """Returns what runs a pass for several lanes; None if each lane runs by itself."""
        if self._passes is None and self._source is not None:
            self._passes = self._source.open_passes()
        return self._passes

    def bytes(self, drafter: str) -> int:
        """Returns the bytes of memory that the caches of one more lane take with this drafter."""
        return self.source.lane_bytes(drafter)

    def most_parallel(self, drafter: str) -> int:
        """Returns how many calls are best decoded together: as many as share a pass, if half of the
        memory that is free holds their caches."""
        if self.passes is None:
            return 1
        room = self.source.free_bytes() // 2 // max(1, self.bytes(drafter))
        return max(1, min(self.passes.max_lanes, 1 + room))

    def close(self, for_good: bool = False) -> None:
        """Closes the lanes but the first, and gives their memory back; opens no more if that is
        `for_good`."""
        if for_good:
            self._source = None
        lanes, self.others, self._passes = self.others, [], None
        for lane in lanes:
            lane.close()
