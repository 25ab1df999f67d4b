"""Opens a graph with ONNX Runtime on CUDA, with all buffers on the device."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.backends.base import Backend, DeviceBackend, OnDevice, Runtime
from spec_runtime.backends.cuda.captures import free_later
from spec_runtime.backends.cuda.copies import StreamCopies, open_copies
from spec_runtime.backends.cuda.device_runs import DeviceRuns
from spec_runtime.backends.cuda.weights import DeviceWeights
from spec_runtime.backends.session import (
    Lender,
    OrtBackend,
    SessionOptions,
    as_lender,
    open_session,
    prepare,
)
from spec_runtime.backends.shapes import KV
from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.bundle.memory import require_memory
from spec_runtime.bundle.operators import require_known_graph
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads


class CudaBackend(DeviceBackend, OrtBackend):
    """One session on CUDA with its KV buffers and banks, see OrtBackend.

    `has_cuda_graphs` captures repeated shapes as CUDA graphs; `precision` is that of the weights.
    """

    def __init__(
        self,
        path: Path,
        graph: Graph,
        capacity: int,
        threads: int | None = None,
        share: Lender | None = None,
        banks: Lender | None = None,
        has_cuda_graphs: bool = False,
        precision: str = "",
    ) -> None:
        prepare("cuda")
        self.form, self.capacity = graph.form, capacity
        partner = share if banks is None else banks
        copies = open_copies() if partner is None else partner.copies
        assert isinstance(copies, StreamCopies), copies
        self.copies, self._cuda = copies, copies.cuda
        self._weights = DeviceWeights(path, "cuda", copies)
        options = SessionOptions(
            threads or default_threads(),
            "cuda",
            has_cuda_graphs,
            copies.settings,
            self._weights.values,
        )
        if partner is None:  # otherwise most buffers are there
            free_bytes = copies.cuda.free_bytes
            require_memory(graph, capacity, free_bytes, "memory that is free on the GPU")
        session = open_session(path, graph, options)
        self.take_buffers(graph, "cuda", share, banks)
        self._names = {spec.name for spec in graph.outputs}
        self._runs = DeviceRuns(session, graph, capacity, self.buffers, copies, precision)
        # Copies and runs on the way must end before the memory goes.
        weakref.finalize(self, free_later, self._runs.close).atexit = False

    @property
    def free_bytes(self) -> int:
        return self._cuda.free_bytes

    @property
    def bytes_to_host(self) -> int:
        return self._runs.bytes_to_host

    @property
    def is_warm(self) -> bool:
        return self._runs.is_warm

    def has_output(self, name: str) -> bool:
        return name in self._names

    def borrow(self, buffers: Mapping[str, Any]) -> None:
        """See OrtBackend.borrow."""
        self.buffers = self._runs.buffers = buffers

    def start(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str] = ()
    ) -> Callable[[], OnDevice]:
        """See DeviceBackend.start."""
        return self._runs.start(feeds, outputs, kept)


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime,
    share: Backend | None,
    banks: Backend | None,
) -> CudaBackend:
    """Opens a graph on CUDA, see backends.open_graph.

    Raises UserError for a bundle that was not built for CUDA.
    """
    lenders = (None if each is None else as_lender(each) for each in (share, banks))
    return _open(bundle, graph, capacity, runtime, *lenders)


def open_lanes(
    bundle: Bundle, graph: Graph, capacity: int, runtime: Runtime, lanes: Lender
) -> CudaBackend:
    """Opens a graph for several lanes, on the buffers of these."""
    return _open(bundle, graph, capacity, runtime, lanes, lanes)


def _open(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime,
    share: Lender | None,
    banks: Lender | None,
) -> CudaBackend:
    require_known_graph(bundle, graph)
    precision = bundle.manifest.target.precision
    _require_cuda_kernels(precision, graph)
    path, threads = bundle.path / graph.file, runtime.num_threads
    has_graphs = runtime.has_cuda_graphs
    return CudaBackend(path, graph, capacity, threads, share, banks, has_graphs, precision)


def _require_cuda_kernels(precision: str, graph: Graph) -> None:
    """Refuses what ONNX Runtime's CUDA provider has no kernel for, or would run on the CPU."""
    types = {spec.dtype for spec in graph.inputs if spec.name.startswith(KV)}
    if precision in ("int8", "int4"):
        got, expected = f"an {precision} bundle", "fp16, bf16, fp32 or fp8"
    elif graph.form == "contiguous":
        got, expected = f"{graph.file} in the contiguous form", "the slots form"
    elif graph.form == "slots" and graph.attention != "full_buffer" and "float32" in types:
        # CUDA's GroupQueryAttention takes only half precision.
        got = f"{graph.file} in float32 with attention {graph.attention}"
        expected = "full_buffer"
    else:
        return
    raise UserError(
        f"got {got} with backend cuda, expected {expected}: build the bundle again with "
        "spec-export build --device cuda"
    )
