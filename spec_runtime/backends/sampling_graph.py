"""Runs the graph that finds the largest logits, on the device where the target left them.

Only requests that sample need it, so that its session is opened by the first of them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spec_runtime.backends.base import Rows, Runtime
from spec_runtime.backends.bound_run import BoundRun
from spec_runtime.backends.captures import free_later
from spec_runtime.backends.copies import Copies, Download
from spec_runtime.backends.device_runs import (
    MAX_CAPTURED_ROWS,
    RUNS_BEFORE_CAPTURE,
    DeviceRows,
)
from spec_runtime.backends.session import (
    NamingGraph,
    SessionOptions,
    empty_value,
    open_session,
    takes_cuda_graphs,
)
from spec_runtime.backends.shapes import (
    MAX_SHAPES,
    LeastRecentlyUsed,
    axis_sizes,
    require_feeds,
    shape_of,
)
from spec_runtime.bundle.manifest import Bundle, Graph
from spec_runtime.bundle.operators import require_known_graph

LOGITS = "logits"


class SamplingGraph:
    """Finds the largest logits of rows on the device, and copies nothing but these to the host.

    `bytes_to_host` counts what was copied. `copies` are those of the target, so that both run on
    one stream. Logits that come again at the same address, in the same shape, are read by a
    captured CUDA graph.
    """

    def __init__(self, bundle: Bundle, graph: Graph, copies: Copies, runtime: Runtime) -> None:
        self.bytes_to_host = 0
        self._bundle, self._graph, self._copies = bundle, graph, copies
        self._runtime = runtime
        self._specs = {spec.name: spec for spec in graph.outputs}
        self._bound = _PerThread()
        self._ids = itertools.count(1)  # 0 is ONNX Runtime's own
        self._num_graphs = 0
        self._is_checked = False
        # The session must not be closed while a thread captures.
        weakref.finalize(self, free_later, vars(self).clear).atexit = False

    def run(self, logits: Rows, outputs: Sequence[str]) -> list[np.ndarray]:
        """Returns these outputs of the graph, on the host, for each row of `logits` f32[M, V].

        They are valid until the next run. Raises ValueError if the graph cannot be opened or does
        not fit these logits.
        """
        assert isinstance(logits, DeviceRows), logits
        value, names = logits.value, tuple(outputs)
        shape = tuple(value.shape())
        if not self._is_checked:
            require_feeds(self._graph, {LOGITS: np.broadcast_to(np.float32(0), shape)}, names)
            self._is_checked = True
        bound = self._run((names, value.data_ptr(), shape))
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

    def _run(self, key: _Key) -> _BoundLogits:
        """Replays the graph of these logits; without one, runs and perhaps captures."""
        captured = self._bound.captured
        bound = captured.get(key) or self._bound.eager.get(key, lambda: self._bind(*key))
        bound.run.run()
        if (
            not bound.run.is_captured
            and takes_cuda_graphs(self._session)
            and bound.run.num_runs > RUNS_BEFORE_CAPTURE
            and key[2][0] <= MAX_CAPTURED_ROWS
            and self._num_graphs < MAX_SHAPES
        ):
            bound.run.capture(next(self._ids))
            captured[key] = bound
            self._num_graphs += 1
        return bound

    def _bind(self, names: tuple[str, ...], address: int, shape: tuple[int, ...]) -> _BoundLogits:
        binding = self._session.io_binding()
        device = self._runtime.device
        binding.bind_input(LOGITS, device, 0, np.dtype(np.float32), shape, address)
        sizes = axis_sizes(self._graph, {LOGITS: shape})
        outputs = {}
        for name in names:
            spec = self._specs[name]
            outputs[name] = empty_value(shape_of(spec, sizes), spec.dtype, device)
            binding.bind_ortvalue_output(name, outputs[name])
        run = BoundRun(self._session, binding, NamingGraph(self._graph.file), self._copies.waits)
        return _BoundLogits(run, self._copies.download(list(outputs.values())))


_Key = tuple[tuple[str, ...], int, tuple[int, ...]]  # outputs; address and shape of the logits


class _BoundLogits(NamedTuple):
    """A run that reads logits at one address, and what brings its own outputs to the host.

    It does not hold the logits' memory: the target may drop that, and never shows it again then.
    """

    run: BoundRun
    download: Download


class _PerThread(threading.local):
    """The logits that one thread has bound: ONNX Runtime keeps CUDA graphs by thread."""

    def __init__(self) -> None:
        # Every run is waited for, so that nothing is on its way to what is dropped.
        self.eager: LeastRecentlyUsed[_BoundLogits] = LeastRecentlyUsed(MAX_SHAPES, lambda _: None)
        # None is dropped: ONNX Runtime cannot forget a graph.
        self.captured: dict[_Key, _BoundLogits] = {}
