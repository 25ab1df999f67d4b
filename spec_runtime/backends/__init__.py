"""Backends run one graph and own its KV buffers; they know nothing of tokens or trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from spec_runtime.backends.threads import default_threads
from spec_runtime.bundle import Bundle, Graph

# name -> (engine, device, CUDA graphs); "cuda" is ONNX Runtime's CUDA provider
_RUNTIMES = {
    "onnxruntime": ("onnxruntime", "cpu", False),
    "cuda": ("onnxruntime", "cuda", True),
    "cuda_eager": ("onnxruntime", "cuda", False),
    "tensorrt": ("tensorrt", "cuda", True),
    "tensorrt_eager": ("tensorrt", "cuda", False),
}
BACKENDS = tuple(_RUNTIMES)


@dataclass(frozen=True)
class Runtime:
    """Says what runs a bundle's graphs: a backend by its name in BACKENDS, and CPU threads.

    `threads` None means as many as this process may use. The names that end in "_eager" run
    without CUDA graphs. Raises ValueError for an unknown backend.
    """

    backend: str = "onnxruntime"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in _RUNTIMES:
            raise ValueError(f"got backend {self.backend!r}, expected one of {', '.join(BACKENDS)}")

    @property
    def engine(self) -> str:
        """The library that runs the graphs: "onnxruntime" or "tensorrt"."""
        return _RUNTIMES[self.backend][0]

    @property
    def device(self) -> str:
        """Where buffers live: "cpu" or "cuda"."""
        return _RUNTIMES[self.backend][1]

    @property
    def has_cuda_graphs(self) -> bool:
        return _RUNTIMES[self.backend][2]

    @property
    def num_threads(self) -> int:
        return self.threads or default_threads()


DEFAULT_RUNTIME = Runtime()


class Backend(Protocol):
    """One graph, ready to run; owns its KV buffers, of `capacity` slots."""

    form: str
    capacity: int

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Runs once and returns these outputs; the arrays may be overwritten by the next run."""


class Rows(Protocol):
    """An output [R, W] left on the device until the backend's next run: rows are copied to the host
    as they are read, all of them by `np.asarray`."""

    def __getitem__(self, row: int, /) -> np.ndarray: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class DeviceBackend(Backend, Protocol):
    """A backend whose outputs may stay on its device. bytes_to_host: copied from there so far."""

    @property
    def bytes_to_host(self) -> int: ...

    def has_output(self, name: str) -> bool: ...

    def run_keeping(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Rows]]:
        """As `run`; besides, the outputs `kept` as rows on the device."""


def on_device(backend: Backend) -> DeviceBackend | None:
    """The backend, if its outputs can be kept on a device."""
    return cast(DeviceBackend, backend) if getattr(backend, "is_on_device", False) else None


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime = DEFAULT_RUNTIME,
    share: Backend | None = None,
    banks: Backend | None = None,
) -> Backend:
    """Opens one of a bundle's graphs with KV buffers of `capacity` slots.

    KV buffers are shared with `share`, and banks (see bundle.BANK) with `banks`, where the names
    agree. Raises ValueError for a file that this machine's runtime cannot load.
    """
    if runtime.engine == "tensorrt":
        from spec_runtime.backends.tensorrt import open_plan

        assert share is None, "contiguous caches cannot be shared"
        return open_plan(bundle, graph, capacity, is_captured=runtime.has_cuda_graphs)
    from spec_runtime.backends.ort import OrtBackend

    assert share is None or isinstance(share, OrtBackend), share
    assert banks is None or isinstance(banks, OrtBackend), banks
    path, threads = bundle.path / graph.file, runtime.num_threads
    if runtime.device == "cuda":
        _require_cuda_kernels(bundle.manifest.target.precision, graph)
        is_captured = runtime.has_cuda_graphs
        return OrtBackend(
            path, graph, capacity, threads, share, "cuda", is_captured=is_captured, banks=banks
        )
    probe = bundle.manifest.graphs.get("probe")
    if probe is not None and graph is bundle.manifest.graphs["target"]:
        _require_exact_int8(OrtBackend(bundle.path / probe.file, probe, 1, 1))
    return OrtBackend(path, graph, capacity, threads, share, banks=banks)


def _require_cuda_kernels(precision: str, graph: Graph) -> None:
    """Refuse what ONNX Runtime's CUDA provider has no kernel for, or would run on the CPU."""
    is_quantised = precision in ("int8", "int4")
    # GroupQueryAttention is half precision there
    is_wide = (
        graph.form == "slots"
        and graph.attention != "full_buffer"
        and any(spec.name.startswith("kv.") and spec.dtype == "float32" for spec in graph.inputs)
    )
    if is_quantised or is_wide:
        got = f"an {precision} bundle" if is_quantised else f"{graph.file} in float32, slots form"
        raise ValueError(
            f"got {got} with backend cuda, expected one made by spec-export build --device cuda"
        )


def _require_exact_int8(probe: Backend) -> None:
    """Refuse a CPU whose u8·s8 products saturate: every int8 result would be silently wrong."""
    x = np.full((1, 64), 255, np.uint8)
    got, expected = int(probe.run({"x": x}, ["y"])["y"][0, 0]), (255 - 128) * 127 * 64
    if got != expected:
        raise ValueError(
            f"this CPU's int8 products saturate (got {got}, expected {expected}): build the "
            "bundle with --precision int8 --reduce-range, or with another precision"
        )
