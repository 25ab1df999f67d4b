"""Keeps runs by their shapes and replays the repeated ones as CUDA graphs.

All captures of this process are made here, see captures.py.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.captures import capturing
from spec_runtime.errors import DeviceLostError

log = logging.getLogger("spec_runtime")

MAX_RUNS = 64  # kept at a time


class GraphRun(ABC):
    """A run at fixed addresses, with fixed shapes, on the stream of `cuda`. Only a GraphCache calls
    its methods.

    `may_capture` False keeps it from being captured, for instance where its kernels take much
    longer than their launches. The cache keeps `has_run`. A CUDA graph is destroyed with its run.
    """

    may_capture = True
    has_run = False
    _executable: Any = None

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    @property
    def is_captured(self) -> bool:
        return self._executable is not None

    @abstractmethod
    def enqueue(self) -> None:
        """Runs without a CUDA graph: puts the work on the stream and waits for nothing."""

    def capture(self) -> None:
        """Captures a CUDA graph, and runs nothing."""
        executable = self._cuda.capture(self.enqueue)
        weakref.finalize(self, self._cuda.destroy, executable).atexit = False
        self._executable = executable

    def replay(self) -> None:
        """Runs by the captured graph."""
        self._cuda.launch(self._executable)

    def close(self) -> None:  # noqa: B027 - most have none
        """Waits for work that still reads the run's memory, before that goes."""


_R = TypeVar("_R", bound=GraphRun)


class GraphCache(Generic[_R]):
    """Runs by key: the first run is made as it is, the second captured, later ones replayed.

    At most MAX_RUNS are kept; a new one takes the place of the one unused for longest. Any thread
    replays what another has captured; one at a time uses the cache. A run whose capture fails is
    made as it is from then on; the first one is said. `is_warm` says that the last run was made as
    its next ones will be: it was replayed, or is never captured.
    """

    def __init__(self, has_graphs: bool) -> None:
        self.is_warm = False
        self._has_graphs, self._has_said = has_graphs, False
        self._runs: OrderedDict[Hashable, _R] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _R]) -> _R:
        """Returns the run of `key`, made if it is not there."""
        run = self._runs.get(key)
        if run is not None:
            self._runs.move_to_end(key)
            return run
        if len(self._runs) >= MAX_RUNS:
            self._runs.popitem(last=False)[1].close()
        run = self._runs[key] = make()
        return run

    def run(self, run: _R) -> None:
        """Makes this run, which `get` has returned last, or replays it."""
        captures = self._has_graphs and run.may_capture
        self.is_warm = run.is_captured or (run.has_run and not captures)
        if captures and run.has_run and not run.is_captured:
            self._capture(run)
        if run.is_captured:
            run.replay()
        else:
            run.enqueue()
        run.has_run = True

    def _capture(self, run: _R) -> None:
        try:
            with capturing():
                run.capture()
        except DeviceLostError:
            raise
        except Exception as error:  # there may be no memory for it
            run.may_capture = False
            if not self._has_said:
                self._has_said = True
                log.warning("a CUDA graph was not captured, and such runs go without: %s", error)

    def clear(self) -> None:
        """Closes all runs."""
        while self._runs:
            self._runs.popitem()[1].close()
