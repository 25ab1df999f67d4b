"""Runs a session whose feeds, outputs and KV buffers are on a device.

A run copies its feeds there in one piece and brings back what is asked for. Shapes that come again
are captured as CUDA graphs and replayed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from spec_runtime.backends.copies import Copies
from spec_runtime.backends.packed_feeds import PackedFeeds
from spec_runtime.backends.pad_rows import WIDTHS, pad_rows
from spec_runtime.backends.session import (
    NO_GRAPH,
    bind_buffers,
    empty_value,
    naming_graph,
    run_options,
    takes_cuda_graphs,
)
from spec_runtime.backends.shapes import (
    MAX_SHAPES,
    LeastRecentlyUsed,
    axis_sizes,
    is_cache,
    mask_width,
    require_feeds,
    shape_of,
)
from spec_runtime.bundle import Graph, TensorSpec

RUNS_BEFORE_CAPTURE = 1  # there are few shapes, so what comes twice comes often
MAX_CAPTURED_ROWS = WIDTHS[-1]  # above, kernels take longer than their launches


class DeviceRows:
    """The first `num_rows` rows of an output [R, W] that stays on the device, see base.Rows."""

    def __init__(self, value: Any, num_rows: int, spec: TensorSpec, runs: DeviceRuns) -> None:
        self.shape = (num_rows, *value.shape()[1:])
        self._value, self._spec, self._runs = value, spec, runs
        self._num_runs = runs.num_runs
        self._row_W: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, row: int) -> np.ndarray:
        """Returns one row [W]."""
        if row not in self._row_W:
            self._require_current()
            assert 0 <= row < len(self), (row, self.shape)
            self._row_W[row] = self._runs.fetch_row(self._value, self._spec, int(row))
        return self._row_W[row]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._require_current()
        array = self._runs.fetch(self._value)[: len(self)]
        return array if dtype is None else array.astype(dtype, copy=False)

    def _require_current(self) -> None:
        assert self._num_runs == self._runs.num_runs, "read after the backend's next run"


class BoundShape:
    """A binding with buffers of its own, for one choice of outputs and one shape of each feed.

    Its addresses and shapes never change, which a CUDA graph needs.
    """

    def __init__(self, binding: Any, feeds: PackedFeeds, outputs: dict[str, Any]) -> None:
        self.binding, self.feeds, self.outputs = binding, feeds, outputs
        self.num_runs = 0
        self.landing: dict[int, np.ndarray] = {}  # see Copies.fetch
        feeds.bind(binding)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)


class _PerThread(threading.local):
    """The shapes that one thread has bound: ONNX Runtime keeps CUDA graphs by thread."""

    def __init__(self, copies: Copies) -> None:
        # A shape's memory may go only when nothing is on its way to it.
        self.eager: LeastRecentlyUsed[BoundShape] = LeastRecentlyUsed(
            MAX_SHAPES, lambda shape: copies.settle()
        )
        # Each with the options that replay it. None is dropped: ONNX Runtime cannot forget a graph.
        self.captured: dict[Hashable, tuple[BoundShape, Any]] = {}


class DeviceRuns:
    """Runs one session with feeds, outputs and KV buffers on the device.

    The mask of a graph in the slots form is cut to a width that holds all rows in use, because
    CUDA's GroupQueryAttention computes over the mask's width ("full_buffer" needs all of it).

    With CUDA graphs, at most MAX_SHAPES shapes that come again are captured. The others run as they
    are, in the same session and on the same stream, and share with the captured ones the KV buffers
    alone. pad_rows makes shapes come again.
    """

    def __init__(
        self,
        session: Any,
        graph: Graph,
        capacity: int,
        buffers: Mapping[str, Any],
        copies: Copies,
        device: str = "cuda",
    ) -> None:
        self.num_runs = self.bytes_to_host = 0
        self._session, self._graph, self._capacity = session, graph, capacity
        self._buffers, self._device = buffers, device
        self._has_cuda_graphs = takes_cuda_graphs(session)
        self._inputs = [spec.name for spec in graph.inputs if not is_cache(spec)]
        self._outputs = {spec.name: spec for spec in graph.outputs}
        self._checked: set[tuple[str, ...]] = set()  # outputs whose feeds were compared
        self._copies = copies
        self._shapes = _PerThread(copies)
        self._ids = itertools.count(1)  # 0 is ONNX Runtime's own
        self._num_graphs = 0
        self._eager = run_options(NO_GRAPH, copies.waits)
        self._peek = session.io_binding()  # never run: it makes views of rows

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, DeviceRows]]:
        """Returns `outputs`, copied to the host, and `kept`, left on the device."""
        if (*outputs, *kept) not in self._checked:
            require_feeds(self._graph, feeds, (*outputs, *kept))
            self._checked.add((*outputs, *kept))
        feeds = {name: feeds[name] for name in self._inputs}
        sizes = axis_sizes(self._graph, {name: feed.shape for name, feed in feeds.items()})
        wider = sizes
        if self._has_cuda_graphs:
            feeds, wider = pad_rows(self._graph, feeds, sizes, self._capacity)
        if self._graph.form == "slots" and self._graph.attention == "bias":
            width = mask_width(int(feeds["seqlens_k"][0]) + 1, self._capacity)
            feeds["mask"] = feeds["mask"][..., :width]
            wider = wider | {"S": width}
        self.num_runs += 1
        shape = self._run(feeds, wider, tuple(dict.fromkeys((*outputs, *kept))))
        values = shape.outputs
        fetched = self._copies.fetch([values[name] for name in outputs], shape.landing)
        self.bytes_to_host += sum(array.nbytes for array in fetched)
        specs = self._outputs
        count = {name: shape_of(specs[name], sizes)[0] for name in values}
        return (
            {n: array[: count[n]] for n, array in zip(outputs, fetched, strict=True)},
            {n: DeviceRows(values[n], count[n], specs[n], self) for n in kept},
        )

    def fetch(self, value: Any) -> np.ndarray:
        """Returns all of an OrtValue, on the host."""
        self._copies.settle()
        array: np.ndarray = value.numpy()
        self.bytes_to_host += array.nbytes
        return array

    def fetch_row(self, value: Any, spec: TensorSpec, row: int) -> np.ndarray:
        """Returns one row [W] of an output [R, W], on the host."""
        width, dtype = value.shape()[1], np.dtype(spec.dtype)
        address = value.data_ptr() + row * width * dtype.itemsize
        self._peek.bind_output(spec.name, self._device, 0, dtype, [1, width], address)
        (view,) = self._peek.get_outputs()
        return self.fetch(view)[0]

    def _run(
        self, feeds: dict[str, np.ndarray], sizes: Mapping[str, int], names: tuple[str, ...]
    ) -> BoundShape:
        """Replays the graph of these outputs and sizes; without one, runs and perhaps captures."""
        key, shapes = (names, *sorted(sizes.items())), self._shapes
        if key in shapes.captured:
            shape, options = shapes.captured[key]
            self._start(shape, feeds, options)
            return shape
        shape = shapes.eager.get(key, lambda: self._bind(feeds, names, sizes))
        self._start(shape, feeds, self._eager)
        shape.num_runs += 1
        rows = max((size for axis, size in sizes.items() if axis != "S"), default=1)
        if (
            self._has_cuda_graphs
            and shape.num_runs > RUNS_BEFORE_CAPTURE
            and rows <= MAX_CAPTURED_ROWS
            and self._num_graphs < MAX_SHAPES
        ):
            # ONNX Runtime makes warm-up runs, the capture and a first replay in this one call. All
            # of them write the same rows to the same slots.
            graph_id = next(self._ids)
            self._start(shape, feeds, run_options(graph_id))
            shapes.captured[key] = shape, run_options(graph_id, self._copies.waits)
            self._num_graphs += 1
        return shape

    def _start(self, shape: BoundShape, feeds: Mapping[str, np.ndarray], options: Any) -> None:
        shape.feeds.update(feeds)
        with naming_graph(self._graph.file):
            self._session.run_with_iobinding(shape.binding, options)

    def _bind(
        self, feeds: Mapping[str, np.ndarray], names: Sequence[str], sizes: Mapping[str, int]
    ) -> BoundShape:
        specs = [self._outputs[name] for name in names]
        return BoundShape(
            bind_buffers(self._session, self._buffers),
            PackedFeeds(feeds, self._device, self._copies),
            {s.name: empty_value(shape_of(s, sizes), s.dtype, self._device) for s in specs},
        )
