"""Runs a session whose feeds, outputs and KV buffers are on a device.

A run copies its feeds there in one piece and brings back the outputs asked for. Repeated shapes are
captured as CUDA graphs and replayed.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from spec_runtime.backends.cuda.bound_run import BoundRun
from spec_runtime.backends.cuda.copies import Download, StreamCopies
from spec_runtime.backends.cuda.device_rows import DeviceRows
from spec_runtime.backends.cuda.graph_cache import GraphCache
from spec_runtime.backends.layout import PackedFeeds
from spec_runtime.backends.pad_rows import (
    WIDTHS,
    PaddedRows,
    padded_sizes,
    padded_width,
    widths_of,
)
from spec_runtime.backends.session import (
    NamingGraph,
    Viewer,
    bind_buffers,
    empty_value,
    takes_cuda_graphs,
)
from spec_runtime.backends.shapes import is_cache, mask_width, require_feeds, shape_of
from spec_runtime.bundle.manifest import LANE, LANE_ROWS, Graph

CUDA = "cuda"
MAX_PLANS = 1024  # a plan is small; there are several for each bound shape
MAX_CAPTURED_ROWS = WIDTHS[-1]  # above, kernels take longer than their launches


@dataclass(frozen=True, eq=False)  # compared by identity, which is fast
class RunPlan:
    """Says what a run does with feeds of certain shapes, worked out once.

    Its free axes have `sizes`, those of the binding that serves it `wider` ones. `fetched` and
    `kept` are the outputs it returns, with their numbers of rows.
    """

    sizes: Mapping[str, int]
    wider: Mapping[str, int]
    fetched: tuple[tuple[str, int], ...]
    kept: tuple[tuple[str, int], ...]

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names all outputs, each once."""
        return tuple(dict.fromkeys(name for name, _ in (*self.fetched, *self.kept)))

    @cached_property
    def bound_key(self) -> Hashable:
        """Names the binding: its outputs and the size of each axis."""
        return self.outputs, *sorted(self.wider.items())


class BoundShape(BoundRun):
    """A binding with buffers of its own, for one choice of outputs and one size of each axis.

    Its addresses and shapes never change, which a CUDA graph needs.
    """

    def __init__(
        self,
        session: Any,
        binding: Any,
        naming: NamingGraph,
        copies: StreamCopies,
        feeds: PackedFeeds,
        outputs: dict[str, Any],
    ) -> None:
        super().__init__(session, binding, naming, copies)
        self.feeds, self.outputs = feeds, outputs
        self.places = {name: (value.data_ptr(), value.shape()) for name, value in outputs.items()}
        # By plan: writes its feeds, and brings its outputs to the host.
        self.parts: dict[RunPlan, tuple[PaddedRows, Download]] = {}
        self.downloads: dict[tuple[str, ...], Download] = {}  # those of `parts`, by outputs
        value = empty_value(feeds.memory.shape, "uint8", CUDA)
        self.upload = copies.upload(feeds.memory, value)
        base = value.data_ptr()
        for name, array in feeds.arrays.items():
            if name == LANE_ROWS:  # Split reads it on the host, and it follows from the shapes
                binding.bind_cpu_input(name, array)
            else:
                address = base + feeds.first[name]
                binding.bind_input(name, CUDA, 0, array.dtype, array.shape, address)
        for name, output in outputs.items():
            binding.bind_ortvalue_output(name, output)


class DeviceRuns:
    """Runs one session with feeds, outputs and KV buffers on the device.

    The mask of a graph in the slots form is cut to a width that holds all rows in use, because
    CUDA's GroupQueryAttention computes over the mask's width ("full_buffer" needs all of it).

    Captured and other runs are on the same stream and share only the KV buffers. Padding (see
    backends/pad_rows.py) lets few shapes serve many runs. What a graph of lanes is fed has been
    padded and cut, see backends/lanes.py. `buffers` may be replaced between runs; what is bound is
    kept by identity.
    """

    def __init__(
        self,
        session: Any,
        graph: Graph,
        capacity: int,
        buffers: Mapping[str, Any],
        copies: StreamCopies,
        precision: str,
    ) -> None:
        self.num_runs = self.bytes_to_host = 0
        self._session, self._graph, self._capacity = session, graph, capacity
        self._precision = precision
        self.buffers = buffers
        self._naming = NamingGraph(graph.file, copies)
        self._has_cuda_graphs = takes_cuda_graphs(session)
        self._inputs = [spec for spec in graph.inputs if not is_cache(spec)]
        self._names = [spec.name for spec in self._inputs]
        self._outputs = {spec.name: spec for spec in graph.outputs}
        self._has_lanes = graph.has_input(LANE_ROWS)
        is_cut = graph.form == "slots" and graph.attention != "full_buffer"
        self._cuts_masks = is_cut and not self._has_lanes
        self._copies = copies
        self._plans: dict[Hashable, RunPlan] = {}  # by outputs and the feeds' shapes
        self._bound: GraphCache[BoundShape] = GraphCache(self._has_cuda_graphs)
        self._viewer = Viewer(CUDA)

    def start(
        self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> Callable[[], tuple[dict[str, np.ndarray], dict[str, DeviceRows]]]:
        """Puts a run on the stream. What is returned waits for it, once, and returns `outputs`,
        copied to the host, and `kept`, left on the device."""
        plan = self._plan(feeds, tuple(outputs), tuple(kept))
        key = id(self.buffers), plan.bound_key
        bound = self._bound.get(key, lambda: self._bind(plan))
        rows, download = bound.parts.get(plan) or self._add_parts(bound, plan)
        self.num_runs += 1
        bound.upload.claim()
        rows.write(feeds)
        bound.upload.start()
        self._bound.run(bound)
        download.start()
        return partial(self._finish, plan, bound, download)

    def _finish(
        self, plan: RunPlan, bound: BoundShape, download: Download
    ) -> tuple[dict[str, np.ndarray], dict[str, DeviceRows]]:
        results, fetched = download.read(), {}
        for (name, num_rows), array in zip(plan.fetched, results, strict=True):
            self.bytes_to_host += array.nbytes
            fetched[name] = array[:num_rows]
        left = {}
        for name, num_rows in plan.kept:
            dtype = self._outputs[name].dtype
            left[name] = DeviceRows(self, *bound.places[name], num_rows, dtype)
        return fetched, left

    @property
    def is_warm(self) -> bool:
        """See GraphCache."""
        return self._bound.is_warm

    def close(self) -> None:
        """Lets the session and its memory go, once all work is done. Nothing runs afterwards."""
        self._copies.settle()
        del self._bound, self._session

    def fetch(self, address: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See device_rows.Memory."""
        self._copies.settle()
        array: np.ndarray = self._viewer.view(address, shape, dtype).numpy()
        self.bytes_to_host += array.nbytes
        return array

    def _plan(
        self, feeds: Mapping[str, np.ndarray], outputs: tuple[str, ...], kept: tuple[str, ...]
    ) -> RunPlan:
        """Returns the plan for these outputs and the feeds' shapes."""
        try:
            known: dict[str, int] = {}
            if self._cuts_masks:  # behind all rows there has to be room for padding
                n = len(feeds["slots"])
                past = feeds["seqlens_k"].item() + 1 - n
                if self._has_cuda_graphs:
                    n = padded_width(n, self._capacity - past, widths_of(self._precision))
                known = {"N": n, "S": mask_width(past + n, self._capacity)}
            key = (outputs, kept, *known.values(), *[feeds[name].shape for name in self._names])
        except KeyError:
            require_feeds(self._graph, feeds, (*outputs, *kept))
            raise
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(feeds, outputs, kept, known)
        return plan

    def _new_plan(
        self,
        feeds: Mapping[str, np.ndarray],
        outputs: tuple[str, ...],
        kept: tuple[str, ...],
        known: Mapping[str, int],
    ) -> RunPlan:
        sizes = wider = require_feeds(self._graph, feeds, (*outputs, *kept))
        if self._has_cuda_graphs and not self._has_lanes:
            wider = padded_sizes(self._graph, sizes, self._capacity, precision=self._precision)
        wider = {**wider, **known}
        fetched, left = (
            tuple((name, shape_of(self._outputs[name], sizes)[0]) for name in names)
            for names in (outputs, kept)
        )
        return RunPlan(sizes, wider, fetched, left)

    def _add_parts(self, bound: BoundShape, plan: RunPlan) -> tuple[PaddedRows, Download]:
        names = tuple(name for name, _ in plan.fetched)
        if names not in bound.downloads:
            values = [bound.outputs[name] for name in names]
            bound.downloads[names] = self._copies.download(values)
        if len(bound.parts) >= MAX_PLANS:
            bound.parts.clear()
        rows = PaddedRows(self._graph, plan.sizes, plan.wider, bound.feeds.arrays)
        bound.parts[plan] = parts = rows, bound.downloads[names]
        return parts

    def _bind(self, plan: RunPlan) -> BoundShape:
        specs = [self._outputs[name] for name in plan.outputs]
        bound = BoundShape(
            self._session,
            bind_buffers(self._session, self.buffers),
            self._naming,
            self._copies,
            PackedFeeds(self._inputs, plan.wider, self._copies.host),
            {s.name: empty_value(shape_of(s, plan.wider), s.dtype, CUDA) for s in specs},
        )
        rows = [
            size
            for axis, size in plan.wider.items()
            # each lane has launches of its own, so that its rows count and not those of all
            if not axis.startswith("S") and (LANE in axis or not self._has_lanes)
        ]
        num_rows = max(rows, default=1)
        bound.may_capture = num_rows <= MAX_CAPTURED_ROWS
        return bound
