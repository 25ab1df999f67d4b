"""Runs a graph with ONNX Runtime on the CPU.

Each KV buffer is one OrtValue, bound as an input and as the output of the node that writes it, so
that a step writes in place and no row is ever copied.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.backends.base import Backend, RowBackend, Runtime
from spec_runtime.backends.cuda.copies import Copies
from spec_runtime.backends.session import (
    Lender,
    NamingGraph,
    OrtBackend,
    SessionOptions,
    as_lender,
    bind_buffers,
    open_session,
)
from spec_runtime.backends.shapes import KV, is_cache, mask_width, require_feeds, shape_of
from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.bundle.memory import machine_bytes, require_memory
from spec_runtime.bundle.operators import require_known_graph
from spec_runtime.errors import UserError
from spec_runtime.files.machine import default_threads

MASK, ENDS = "mask", "seqlens_k"  # feeds of SlotCache.place
MAX_BINDINGS = 8  # kept at a time; only graphs of lanes have so many, one for each set that met


class CpuBackend(OrtBackend, RowBackend):
    """One session on the CPU with its KV buffers and banks, see OrtBackend."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        capacity: int,
        threads: int | None = None,
        share: Lender | None = None,
        banks: Lender | None = None,
    ) -> None:
        self.form, self.capacity = graph.form, capacity
        self.graph = graph
        self._naming = NamingGraph(graph.file)
        self.copies = Copies()
        options = SessionOptions(threads or default_threads())
        self.session = open_session(path, graph, options)
        self.has_exact_rows = getattr(self.session, "has_exact_rows", False)
        self.take_buffers(graph, "cpu", share, banks)
        self._specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        self._feed_names = [spec.name for spec in graph.inputs if not is_cache(spec)]
        # where the rows in use end, by the name of the mask, a lane's or the only one
        ends = {name.replace(ENDS, MASK): name for name in self._feed_names if ENDS in name}
        self._ends = {} if graph.attention == "full_buffer" else ends
        self._bindings: dict[tuple[tuple[str, ...], int], Any] = {}
        self._outputs: dict[str, np.ndarray] = {}

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run. Returns views of buffers that the next run writes again."""
        binding = self._binding(tuple(outputs), feeds)
        sizes: dict[str, int] = {}
        held = []  # ONNX Runtime reads these arrays' memory during the run
        for name in self._feed_names:
            array = feeds[name]
            if end := self._ends.get(name):  # no row attends a slot after the last in use
                array = array[..., : mask_width(feeds[end].item() + 1, self.capacity)]
            array = np.ascontiguousarray(array)
            held.append(array)
            binding.bind_cpu_input(name, array)
            for dim, size in zip(self._specs[name].shape, array.shape, strict=True):
                if isinstance(dim, str):
                    sizes[dim] = size
        results = {}
        for name in outputs:
            results[name] = array = self._output(name, sizes)
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        with self._naming:
            self.session.run_with_iobinding(binding)
        return results

    def read_rows(self, slot_N: np.ndarray) -> dict[str, np.ndarray]:
        """See RowBackend.read_rows."""
        return {name: bytes_GSB[:, slot_N] for name, bytes_GSB in self._kv_bytes().items()}

    def write_rows(self, slot_N: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """See RowBackend.write_rows."""
        for name, bytes_GSB in self._kv_bytes().items():
            bytes_GSB[:, slot_N] = rows[name][:, : len(slot_N)]

    def _kv_bytes(self) -> dict[str, np.ndarray]:
        """Returns views u8[G, S, B] of the KV buffers' memory, whatever their type."""
        views = {}
        for name, value in self.buffers.items():
            if name.startswith(KV):
                _, groups, capacity, _ = value.shape()
                memory = ctypes.c_uint8 * value.tensor_size_in_bytes()
                flat = np.ctypeslib.as_array(memory.from_address(value.data_ptr()))
                views[name] = flat.reshape(groups, capacity, -1)
        return views

    def _binding(self, outputs: tuple[str, ...], feeds: dict[str, np.ndarray]) -> Any:
        """Returns the binding of this set of outputs: those not bound are not computed.

        The first time, `feeds` are compared with the graph: later ones have the same names.
        """
        key = outputs, id(self.buffers)
        if key not in self._bindings:
            require_feeds(self.graph, feeds, outputs)
            if len(self._bindings) == MAX_BINDINGS:
                self._bindings.clear()
            self._bindings[key] = bind_buffers(self.session, self.buffers)
        return self._bindings[key]

    def _output(self, name: str, sizes: dict[str, int]) -> np.ndarray:
        """Returns a view of an output's buffer, which grows to the largest shape asked for."""
        spec = self._specs[name]
        shape = shape_of(spec, sizes)
        count = int(np.prod(shape))
        buffer = self._outputs.get(name)
        if buffer is None or buffer.size < count:
            buffer = self._outputs[name] = np.empty(count, dtype=spec.dtype)
        return buffer[:count].reshape(shape)


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime,
    share: Backend | None,
    banks: Backend | None,
) -> CpuBackend:
    """Opens a graph on the CPU, see backends.open_graph.

    Raises UserError for a bundle in fp8, for a graph whose file is not what ours are, and for
    buffers that this machine cannot hold.
    """
    if bundle.manifest.target.precision == "fp8":
        raise UserError(
            "got an fp8 bundle with backend onnxruntime, expected backend cuda: a CPU has no "
            "products of 8-bit floats; for one, run spec-export build --precision int8"
        )
    require_known_graph(bundle, graph)
    require_memory(graph, capacity, machine_bytes(), "this machine")
    return CpuBackend(
        bundle.path / graph.file,
        graph,
        capacity,
        runtime.num_threads,
        share=None if share is None else as_lender(share),
        banks=None if banks is None else as_lender(banks),
    )


def open_lanes(
    bundle: Bundle, graph: Graph, capacity: int, runtime: Runtime, lanes: Lender
) -> CpuBackend:
    """Opens a graph for several lanes, on the buffers of these."""
    require_known_graph(bundle, graph)
    path = bundle.path / graph.file
    return CpuBackend(path, graph, capacity, runtime.num_threads, lanes, lanes)
