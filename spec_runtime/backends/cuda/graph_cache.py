"""Keeps runs by their shapes and replays the repeated ones as CUDA graphs.

All captures of this process are made here, apart from other threads' calls (see captures.py).
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from spec_runtime.backends.cuda.captures import capturing, no_capture
from spec_runtime.errors import DeviceLostError

log = logging.getLogger("spec_runtime")

MAX_RUNS = 64  # kept at a time, and captured at most where graphs cannot be destroyed


class GraphRun(ABC):
    """A run at fixed addresses, with fixed shapes. Only a GraphCache calls its methods.

    `may_capture` False keeps it from being captured, for instance where its kernels take much
    longer than their launches. The cache keeps `key`, `has_run` and `is_captured`.
    """

    may_capture = True
    key: Hashable = None
    has_run = is_captured = False

    @abstractmethod
    def enqueue(self) -> None:
        """Runs without a CUDA graph."""

    @abstractmethod
    def capture(self) -> None:
        """Captures a CUDA graph, and runs once by it."""

    @abstractmethod
    def replay(self) -> None:
        """Runs by the captured graph."""

    @abstractmethod
    def close(self) -> None:
        """Destroys the graph; waits for work that still reads the run's memory."""


_R = TypeVar("_R", bound=GraphRun)


class GraphCache(Generic[_R]):
    """Runs by key: the first run is made as it is, the second captured, later ones replayed.

    At most MAX_RUNS are kept; a new one takes the place of the one unused for longest. ONNX Runtime
    keeps its graphs by thread and cannot destroy one. `by_thread` therefore gives each thread runs
    of its own, keeps those that are captured, and captures at most MAX_RUNS over all threads, which
    it says. A run whose capture fails is made as it is from then on; the first one is said.
    """

    def __init__(self, has_graphs: bool, by_thread: bool = False) -> None:
        self._has_graphs, self._by_thread = has_graphs, by_thread
        self._here: _Runs[_R] = _RunsOfThread() if by_thread else _Runs()
        self._num_graphs = 0
        self._said: set[str] = set()

    def get(self, key: Hashable, make: Callable[[], _R]) -> _R:
        """Returns the run of `key`, made if it is not there."""
        here = self._here
        run = here.captured.get(key)
        if run is not None:
            return run
        run = here.recent.get(key)
        if run is not None:
            here.recent.move_to_end(key)
            return run
        if len(here.recent) >= MAX_RUNS:
            here.recent.popitem(last=False)[1].close()
        with no_capture():
            run = here.recent[key] = make()
        run.key = key
        return run

    def run(self, run: _R) -> None:
        """Makes this run, which `get` has returned last, or replays it."""
        if run.is_captured:
            with no_capture():
                run.replay()
        elif not (run.has_run and self._captures(run) and self._captured(run)):
            with no_capture():
                run.enqueue()
            run.has_run = True

    def _captured(self, run: _R) -> bool:
        """Captures the run, which makes it once; returns False if that fails."""
        try:
            with capturing():
                run.capture()
                self._num_graphs += 1
        except DeviceLostError:
            raise
        except Exception as error:  # another library may have allocated meanwhile
            run.may_capture = False
            self._say("a CUDA graph was not captured, and such runs go without: %s", str(error))
            return False
        run.is_captured = True
        if self._by_thread:
            self._here.captured[run.key] = self._here.recent.pop(run.key)
        return True

    def _say(self, message: str, detail: object) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning(message, detail)

    def clear(self) -> None:
        """Closes all runs, but for those of other threads."""
        for runs in (self._here.captured, self._here.recent):
            while runs:
                runs.popitem()[1].close()

    def _captures(self, run: _R) -> bool:
        if not (self._has_graphs and run.may_capture):
            return False
        has_room = not self._by_thread or self._num_graphs < MAX_RUNS
        if not has_room:
            self._say(
                "%d CUDA graphs are captured, and further shapes run without, slower: each thread "
                "needs its own, so call an engine from one thread, or use AsyncEngine",
                MAX_RUNS,
            )
        return has_room


class _Runs(Generic[_R]):
    """Holds the runs that may go, the one unused for longest first, and those that stay."""

    def __init__(self) -> None:
        self.recent: OrderedDict[Hashable, _R] = OrderedDict()
        self.captured: dict[Hashable, _R] = {}


class _RunsOfThread(_Runs[_R], threading.local):
    """Holds the runs of the thread that asks."""
