"""Runs a session whose feeds, outputs and KV buffers are on a device.

A run copies its feeds there in one piece and brings back what is asked for. Shapes that come again
are captured as CUDA graphs and replayed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spec_runtime.backends.bound_run import BoundRun
from spec_runtime.backends.captures import no_capture
from spec_runtime.backends.copies import Copies, Download
from spec_runtime.backends.packed_feeds import PackedFeeds
from spec_runtime.backends.pad_rows import WIDTHS, PaddedRows, padded_sizes
from spec_runtime.backends.session import (
    NamingGraph,
    bind_buffers,
    empty_value,
    takes_cuda_graphs,
)
from spec_runtime.backends.shapes import (
    MAX_SHAPES,
    LeastRecentlyUsed,
    is_cache,
    mask_width,
    require_feeds,
    shape_of,
)
from spec_runtime.bundle.manifest import Graph, TensorSpec

MAX_PLANS = 1024  # a plan is small; there are several for each bound shape
RUNS_BEFORE_CAPTURE = 1  # there are few shapes, so what comes twice comes often
MAX_CAPTURED_ROWS = WIDTHS[-1]  # above, kernels take longer than their launches


class DeviceRows:
    """The first `num_rows` rows of an output [R, W] that stays on the device, see base.Rows."""

    def __init__(
        self, value: Any, shape: tuple[int, ...], spec: TensorSpec, runs: DeviceRuns
    ) -> None:
        self.shape = shape
        self._value, self._spec, self._runs = value, spec, runs
        self._num_runs = runs.num_runs
        self._row_W: dict[int, np.ndarray] = {}

    @property
    def value(self) -> Any:
        """The OrtValue of all R rows on the device, padding included, for another graph to read."""
        self._require_current()
        return self._value

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
    """A binding with buffers of its own, for one choice of outputs and one size of each axis.

    Its addresses and shapes never change, which a CUDA graph needs. `run` runs the binding, and
    `num_rows` is the longest axis of rows.
    """

    def __init__(
        self,
        key: Hashable,
        num_rows: int,
        binding: Any,
        feeds: PackedFeeds,
        outputs: dict[str, Any],
        copies: Copies,
        device: str,
        run: BoundRun,
    ) -> None:
        self.key, self.num_rows, self.run = key, num_rows, run
        self.feeds, self.outputs = feeds, outputs
        self.plans: list[Hashable] = []  # keys of the plans that run it
        value = empty_value(feeds.memory.shape, "uint8", device)
        self.upload = copies.upload(feeds.memory, value)
        base = value.data_ptr()
        for name, array in feeds.arrays.items():
            address = base + feeds.first[name]
            binding.bind_input(name, device, 0, array.dtype, array.shape, address)
        for name, output in outputs.items():
            binding.bind_ortvalue_output(name, output)
        self._copies = copies
        self._downloads: dict[tuple[str, ...], Download] = {}

    def download(self, names: tuple[str, ...]) -> Download:
        """Returns what brings these outputs to the host."""
        if names not in self._downloads:
            values = [self.outputs[name] for name in names]
            self._downloads[names] = self._copies.download(values)
        return self._downloads[names]


@dataclass(frozen=True)
class RunPlan:
    """Says what a run does with feeds of certain shapes, worked out once: which binding it runs,
    how feeds are written there, and which outputs it returns, cut to which shapes."""

    bound: BoundShape
    rows: PaddedRows
    download: Download
    fetched: tuple[tuple[str, int], ...]  # names and numbers of rows, in the download's order
    kept: tuple[tuple[str, tuple[int, ...], TensorSpec], ...]


class _PerThread(threading.local):
    """The shapes that one thread has bound: ONNX Runtime keeps CUDA graphs by thread."""

    def __init__(self, copies: Copies) -> None:
        self.plans: dict[Hashable, RunPlan] = {}  # by outputs and the feeds' shapes
        # Nothing here refers back to this object: all of it goes with DeviceRuns.close.
        self.eager: LeastRecentlyUsed[BoundShape] = LeastRecentlyUsed(
            MAX_SHAPES, partial(_drop, copies, self.plans)
        )
        # None is dropped: ONNX Runtime cannot forget a graph.
        self.captured: dict[Hashable, BoundShape] = {}


def _drop(copies: Copies, plans: dict[Hashable, RunPlan], bound: BoundShape) -> None:
    if not bound.run.is_captured:
        copies.settle()  # memory may go only when nothing is on its way to it
        for key in bound.plans:
            plans.pop(key, None)


class DeviceRuns:
    """Runs one session with feeds, outputs and KV buffers on the device.

    The mask of a graph in the slots form is cut to a width that holds all rows in use, because
    CUDA's GroupQueryAttention computes over the mask's width ("full_buffer" needs all of it).

    With CUDA graphs, at most MAX_SHAPES shapes that come again are captured. The others run as they
    are, in the same session and on the same stream, and share with the captured ones the KV buffers
    alone. Padding (see pad_rows.py) makes shapes come again.
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
        self._naming = NamingGraph(graph.file)
        self._has_cuda_graphs = takes_cuda_graphs(session)
        self._inputs = [spec for spec in graph.inputs if not is_cache(spec)]
        self._names = [spec.name for spec in self._inputs]
        self._outputs = {spec.name: spec for spec in graph.outputs}
        self._cuts_masks = graph.form == "slots" and graph.attention == "bias"
        self._copies = copies
        self._shapes = _PerThread(copies)
        self._ids = itertools.count(1)  # 0 is ONNX Runtime's own
        self._num_graphs = 0
        self._peek = session.io_binding()  # never run: it makes views of rows

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, DeviceRows]]:
        """Returns `outputs`, copied to the host, and `kept`, left on the device."""
        plan = self._plan(feeds, tuple(outputs), tuple(kept))
        bound = plan.bound
        self.num_runs += 1
        bound.upload.claim()
        plan.rows.write(feeds)
        bound.upload.start()
        bound.run.run()
        if not bound.run.is_captured:
            self._maybe_capture(bound)
        fetched = {}
        for (name, num_rows), array in zip(plan.fetched, plan.download.read(), strict=True):
            self.bytes_to_host += array.nbytes
            fetched[name] = array[:num_rows]
        values = bound.outputs
        return fetched, {n: DeviceRows(values[n], shape, s, self) for n, shape, s in plan.kept}

    def close(self) -> None:
        """Lets the session and its memory go, once all work is done. Nothing runs afterwards."""
        self._copies.settle()
        del self._shapes, self._peek, self._session

    def fetch(self, value: Any) -> np.ndarray:
        """Returns all of an OrtValue, on the host."""
        self._copies.settle()
        with no_capture():
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

    # ---- plans ----

    def _plan(
        self, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...], kept: tuple[str, ...]
    ) -> RunPlan:
        """Returns the plan for these outputs and the feeds' shapes, made when they first come."""
        shapes = self._shapes
        try:
            width = 0
            if self._cuts_masks:
                width = mask_width(feeds["seqlens_k"].item() + 1, self._capacity)
            key = (outputs, kept, width, *[feeds[name].shape for name in self._names])
        except KeyError:
            require_feeds(self._graph, feeds, (*outputs, *kept))
            raise
        plan = shapes.plans.get(key)
        if plan is None:
            if len(shapes.plans) >= MAX_PLANS:
                shapes.plans.clear()
            plan = shapes.plans[key] = self._new_plan(feeds, outputs, kept, width)
            plan.bound.plans.append(key)
        elif not plan.bound.run.is_captured:
            shapes.eager.touch(plan.bound.key)
        return plan

    def _new_plan(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: tuple[str, ...],
        kept: tuple[str, ...],
        width: int,
    ) -> RunPlan:
        sizes = wider = require_feeds(self._graph, feeds, (*outputs, *kept))
        if self._has_cuda_graphs:
            wider = padded_sizes(self._graph, sizes, self._capacity)
        if width:
            wider = wider | {"S": mask_width(max(width, wider["N"]), self._capacity)}
        bound = self._bound(tuple(dict.fromkeys((*outputs, *kept))), wider)
        specs = self._outputs
        shapes = {name: shape_of(specs[name], sizes) for name in (*outputs, *kept)}
        return RunPlan(
            bound,
            PaddedRows(self._graph, sizes, wider, bound.feeds.arrays),
            bound.download(outputs),
            tuple((name, shapes[name][0]) for name in outputs),
            tuple((name, shapes[name], specs[name]) for name in kept),
        )

    def _bound(self, names: tuple[str, ...], sizes: Mapping[str, int]) -> BoundShape:
        key = (names, *sorted(sizes.items()))
        if key in self._shapes.captured:
            return self._shapes.captured[key]
        return self._shapes.eager.get(key, lambda: self._bind(key, names, sizes))

    def _bind(self, key: Hashable, names: Sequence[str], sizes: Mapping[str, int]) -> BoundShape:
        specs = [self._outputs[name] for name in names]
        binding = bind_buffers(self._session, self._buffers)
        return BoundShape(
            key,
            max((size for axis, size in sizes.items() if axis != "S"), default=1),
            binding,
            PackedFeeds(self._inputs, sizes, self._copies.host),
            {s.name: empty_value(shape_of(s, sizes), s.dtype, self._device) for s in specs},
            self._copies,
            self._device,
            BoundRun(self._session, binding, self._naming, self._copies.waits),
        )

    def _maybe_capture(self, bound: BoundShape) -> None:
        """Captures a shape that came often enough, by more runs with the same feeds: all of them
        write the same rows to the same slots."""
        if (
            self._has_cuda_graphs
            and bound.run.num_runs > RUNS_BEFORE_CAPTURE
            and bound.num_rows <= MAX_CAPTURED_ROWS
            and self._num_graphs < MAX_SHAPES
        ):
            bound.run.capture(next(self._ids))
            self._shapes.captured[bound.key] = bound
            self._num_graphs += 1
