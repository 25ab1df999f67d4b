"""Declares what a backend is: the interfaces, the table of backends, and the choice of one.

A backend runs one graph and owns its KV buffers. It sees arrays by name, never tokens or trees.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np
from annotated_types import Ge

from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads, require_threads
from spec_runtime.files.mapping import Checked
from spec_runtime.options import Option

T = TypeVar("T")


class Backend(Protocol):
    """One graph, ready to run, with its KV buffers of `capacity` slots. `form` is the graph's."""

    form: str
    capacity: int

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Runs once and returns these outputs; the next run may overwrite the arrays."""


@dataclass
class GraphRun:
    """Holds a run of a graph that somebody waits for, by itself or together with others'.

    The caller that runs it sets `results`, which the backend's next run may overwrite, and the
    `seconds` that it was waited for.
    """

    backend: Backend
    feeds: dict[str, np.ndarray]
    outputs: Sequence[str]
    results: dict[str, np.ndarray] = field(default_factory=dict)
    seconds: float = 0.0
    _finish: Callable[[], dict[str, np.ndarray]] | None = None

    def start(self) -> None:
        """Starts it on a device, once, so that it runs while its owner and others go on."""
        if self._finish is None and isinstance(self.backend, DeviceBackend):
            begin = time.perf_counter()
            self._finish = self.backend.start(self.feeds, self.outputs)
            self.seconds = time.perf_counter() - begin

    def run(self) -> None:
        """Runs it by itself, or waits for what was started."""
        begin = time.perf_counter()
        finish = self._finish
        self.results = finish() if finish else self.backend.run(self.feeds, self.outputs)
        self.seconds += time.perf_counter() - begin


def run_at_once(runs: Generator[GraphRun, None, T]) -> T:
    """Runs each graph that `runs` waits for by itself, until it returns."""
    try:
        while True:
            next(runs).run()
    except StopIteration as end:
        result: T = end.value
        return result


def run_each(runs: Sequence[GraphRun]) -> None:
    """Runs each of these by itself."""
    for run in runs:
        run.run()


class Rows(Protocol):
    """An output [R, W] that stays on the device until its backend's next run.

    A row is copied to the host when it is first read, all of them by `np.asarray`.
    """

    def __getitem__(self, row: int, /) -> np.ndarray: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class RowsReader(Protocol):
    """A graph that reads an output which stays on the device, where it lies."""

    def run(self, logits: Rows, outputs: Sequence[str], /) -> list[np.ndarray]:
        """Returns these outputs on the host; the next run may overwrite the arrays."""


class DeviceBackend(ABC):
    """A backend that can leave outputs on its device. Those that can inherit from this class.

    `bytes_to_host` counts the bytes copied from the device so far.
    """

    form: str
    capacity: int

    @property
    @abstractmethod
    def bytes_to_host(self) -> int: ...

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """Returns how much of the device's memory nobody has."""

    @abstractmethod
    def has_output(self, name: str) -> bool: ...

    @abstractmethod
    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run."""

    def start(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str]
    ) -> Callable[[], dict[str, np.ndarray]]:
        """Starts a run, if the backend can; what is returned waits for it and returns what `run`
        does. No other run of this backend may come in between."""
        return partial(self.run, feeds, outputs)

    @abstractmethod
    def run_keeping(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], Mapping[str, Rows]]:
        """Runs once; returns `outputs` on the host, and `kept` [R, W] as rows on the device."""


class RowBackend(ABC):
    """A backend whose KV rows can be copied to the host and back. Those that can inherit from this
    class."""

    @abstractmethod
    def read_rows(self, slot_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns copies of the rows in these slots, by buffer: bytes u8[G, N, B]."""

    @abstractmethod
    def write_rows(self, slot_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Puts what `read_rows` returned, or the first rows of it, into these slots."""


@dataclass(frozen=True)
class BackendKind:
    """Says what a backend's name stands for.

    `module` is imported when the first graph is opened; its function `open_graph` is a GraphOpener.
    `engine` names the library that runs the graphs, `device` is where buffers live, "cpu" or
    "cuda".
    """

    module: str
    engine: str
    device: str = "cpu"


BACKENDS: dict[str, BackendKind] = {
    "onnxruntime": BackendKind("spec_runtime.backends.cpu.backend", "onnxruntime"),
    "cuda": BackendKind("spec_runtime.backends.cuda.backend", "onnxruntime", "cuda"),
    "tensorrt": BackendKind("spec_runtime.backends.tensorrt.backend", "tensorrt", "cuda"),
}


@dataclass(frozen=True)
class Runtime(Checked):
    """Says what runs a bundle's graphs: a backend by its name in BACKENDS, and CPU threads.

    `threads` None means as many as this process may use. `cuda_graphs` False leaves CUDA graphs
    out on a GPU; on the CPU there are none. Raises UserError for an unknown backend and for a
    number of threads that this machine cannot serve.
    """

    backend: Annotated[
        str,
        Option(
            "onnxruntime (on the CPU), cuda (ONNX Runtime's) or tensorrt (built, never executed)"
        ),
    ] = "onnxruntime"
    threads: Annotated[
        int | None, Ge(1), Option("CPU threads", unset="the cores this process may use")
    ] = None
    cuda_graphs: Annotated[
        bool, Option("On a GPU: capture repeated runs as CUDA graphs; ignored on the CPU")
    ] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend not in BACKENDS:
            hint = "; --no-cuda-graphs leaves CUDA graphs out" if "eager" in self.backend else ""
            raise UserError(
                f"got backend {self.backend!r}, expected one of {', '.join(BACKENDS)}{hint}",
                param="backend",
            )
        require_threads(self.threads)

    @property
    def kind(self) -> BackendKind:
        return BACKENDS[self.backend]

    @property
    def engine(self) -> str:
        """Names the library that runs the graphs: "onnxruntime" or "tensorrt"."""
        return self.kind.engine

    @property
    def device(self) -> str:
        """Says where buffers live: "cpu" or "cuda"."""
        return self.kind.device

    @property
    def has_cuda_graphs(self) -> bool:
        """Says whether CUDA graphs are wanted, on a device that has them."""
        return self.cuda_graphs and self.device == "cuda"

    @property
    def num_threads(self) -> int:
        return self.threads or default_threads()


class GraphOpener(Protocol):
    """Opens a graph, see backends.open_graph; `share` and `banks` come from the same backend."""

    def __call__(
        self,
        bundle: Bundle,
        graph: Graph,
        capacity: int,
        runtime: Runtime,
        share: Backend | None,
        banks: Backend | None,
    ) -> Backend: ...
