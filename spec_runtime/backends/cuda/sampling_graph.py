"""Runs the graph that finds the largest logits, on the device where the target left them.

Only requests that sample need it, so that its session is opened by the first of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from spec_runtime.backends.base import Rows, Runtime
from spec_runtime.backends.cuda.bound_run import BoundRun
from spec_runtime.backends.cuda.captures import free_later
from spec_runtime.backends.cuda.copies import Copies, Download, StreamCopies
from spec_runtime.backends.cuda.device_rows import DeviceRows
from spec_runtime.backends.cuda.device_runs import MAX_CAPTURED_ROWS
from spec_runtime.backends.cuda.graph_cache import GraphCache
from spec_runtime.backends.session import (
    NamingGraph,
    SessionOptions,
    empty_value,
    open_session,
    takes_cuda_graphs,
)
from spec_runtime.backends.shapes import axis_sizes, require_feeds, shape_of
from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.bundle.operators import require_known_graph

LOGITS = "logits"


class SamplingGraph:
    """Finds the largest logits of rows on the device, and copies nothing but these to the host.

    `bytes_to_host` counts the bytes copied. `copies` are those of the target, so that both run on
    one stream. Logits that lie at the same address in the same shape again are read by a captured
    CUDA graph.
    """

    def __init__(self, bundle: Bundle, graph: Graph, copies: Copies, runtime: Runtime) -> None:
        assert isinstance(copies, StreamCopies), copies
        self.bytes_to_host = 0
        self._bundle, self._graph, self._copies = bundle, graph, copies
        self._runtime = runtime
        self._specs = {spec.name: spec for spec in graph.outputs}
        self._is_checked = False
        # The session must not be closed while a thread captures.
        weakref.finalize(self, free_later, vars(self).clear).atexit = False

    def run(self, logits: Rows, outputs: Sequence[str]) -> list[np.ndarray]:
        """Returns these outputs of the graph, on the host, for each row of `logits` f32[M, V].

        They are valid until the next run. Raises UserError if the graph cannot be opened or does
        not fit these logits.
        """
        assert isinstance(logits, DeviceRows), logits
        names, shape = tuple(outputs), logits.padded_shape
        if not self._is_checked:
            require_feeds(self._graph, {LOGITS: np.broadcast_to(np.float32(0), shape)}, names)
            self._is_checked = True
        key = (names, logits.address, shape)
        bound = self._bound.get(key, lambda: self._bind(*key))
        self._bound.run(bound)
        bound.download.start()
        found = bound.download.read()
        self.bytes_to_host += sum(array.nbytes for array in found)
        return [array[: len(logits)] for array in found]

    @cached_property
    def _session(self) -> Any:
        """The session, which is opened when it is first used."""
        require_known_graph(self._bundle, self._graph)
        runtime = self._runtime
        options = SessionOptions(
            *(runtime.num_threads, runtime.device, runtime.has_cuda_graphs, self._copies.settings)
        )
        return open_session(self._bundle.file(self._graph.file), self._graph, options)

    @cached_property
    def _bound(self) -> GraphCache[BoundLogits]:
        return GraphCache(takes_cuda_graphs(self._session))

    def _bind(self, names: tuple[str, ...], address: int, shape: tuple[int, ...]) -> BoundLogits:
        binding = self._session.io_binding()
        device = self._runtime.device
        binding.bind_input(LOGITS, device, 0, np.dtype(np.float32), shape, address)
        sizes = axis_sizes(self._graph, {LOGITS: shape})
        outputs = {}
        for name in names:
            spec = self._specs[name]
            outputs[name] = empty_value(shape_of(spec, sizes), spec.dtype, device)
            binding.bind_ortvalue_output(name, outputs[name])
        naming = NamingGraph(self._graph.file, self._copies)
        bound = BoundLogits(self._session, binding, naming, self._copies)
        bound.may_capture = shape[0] <= MAX_CAPTURED_ROWS
        bound.download = self._copies.download(list(outputs.values()))
        return bound


class BoundLogits(BoundRun):
    """A run that reads logits at one address, and what brings its own outputs to the host.

    It does not hold the logits' memory: the target may drop that, and never shows it again then.
    """

    download: Download
