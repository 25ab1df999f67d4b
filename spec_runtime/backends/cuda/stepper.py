"""Runs a graph that makes its own next inputs: two bindings over two sets of state, in turn.

State goes in as `state.X` and comes out as `state.X.out`, which the next run reads in its place.
The two are never the same memory in one run, for ONNX Runtime does not order readers before the
writer. KV buffers are lent by other backends.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spec_runtime.backends.base import Backend, Runtime
from spec_runtime.backends.cuda.bound_run import BoundRun
from spec_runtime.backends.cuda.captures import free_later, no_capture
from spec_runtime.backends.cuda.copies import Download
from spec_runtime.backends.cuda.graph_cache import GraphCache
from spec_runtime.backends.cuda.weights import DeviceWeights
from spec_runtime.backends.session import (
    NamingGraph,
    OrtBackend,
    SessionOptions,
    as_lender,
    bind_buffers,
    open_session,
    takes_cuda_graphs,
    zero_value,
)
from spec_runtime.bundle.manifest import Graph, TensorSpec
from spec_runtime.errors import UserError

RESULT, STATE = "result", "state."


class _Side(NamedTuple):
    """A binding that reads `state` and writes the other side's; `key` tells it from all others."""

    key: Hashable
    binding: Any
    state: dict[str, Any]
    outputs: dict[str, Any]
    result: Download


class OrtStepper:
    """A session that steps from state to state.

    `start` sets the state, `step` runs once and returns the output `result`, `fetch` returns
    another output of the last run. Each shape of the state has two bindings; on CUDA each becomes a
    captured graph. `lenders` are the backends, all on ONNX Runtime, whose KV buffers and banks the
    graph uses: by the prefix that the buffers' names have here. `bytes_to_host` counts what was
    copied from the device so far.

    Raises UserError if the graph cannot be opened or, with `must_capture`, if CUDA graphs are
    wanted and ONNX Runtime refuses them.
    """

    def __init__(
        self,
        path: Path,
        graph: Graph,
        lenders: Mapping[str, Backend],
        runtime: Runtime,
        must_capture: bool = False,
    ) -> None:
        self.bytes_to_host = 0
        known = {prefix: as_lender(each) for prefix, each in lenders.items()}
        self._naming = NamingGraph(graph.file)
        self._device = runtime.device
        self._copies = known[""].copies
        self._weights = DeviceWeights(path, runtime.device, self._copies)
        options = SessionOptions(
            runtime.num_threads,
            runtime.device,
            runtime.has_cuda_graphs,
            self._copies.settings,
            self._weights.values,
            must_capture,
        )
        self._session = open_session(path, graph, options)
        self._runs: GraphCache[BoundRun] = GraphCache(
            takes_cuda_graphs(self._session), by_thread=True
        )
        self._inputs = [spec.name for spec in graph.inputs if spec.name.startswith(STATE)]
        self._results = [spec for spec in graph.outputs if not spec.name.endswith(".out")]
        self._buffers: dict[str, Any] = {}
        for spec in graph.inputs:
            if not spec.name.startswith(STATE):
                self._buffers[spec.name] = _lent(spec.name, graph, known)
        self._pairs: dict[tuple[tuple[int, ...], ...], tuple[_Side, _Side]] = {}  # by shapes
        self._last: _Side | None = None
        self._next: tuple[_Side, _Side] | None = None
        # The session must not be closed while a thread captures.
        weakref.finalize(self, free_later, vars(self).clear).atexit = False

    def start(self, state: Mapping[str, np.ndarray]) -> None:
        """Sets the state of the next run: by X, an array of the graph's type for `state.X`."""
        given = {
            name: np.ascontiguousarray(state[name.removeprefix(STATE)]) for name in self._inputs
        }
        assert len(given) == len(state), sorted(state)
        key = tuple(array.shape for array in given.values())
        self._copies.settle()
        if key not in self._pairs:
            with no_capture():
                self._pairs[key] = self._bind(given)
        self._next = self._pairs[key]
        with no_capture():
            for name, array in given.items():
                self._next[0].state[name].update_inplace(array)

    def step(self) -> np.ndarray:
        """Runs once and returns a copy of the output `result`."""
        assert self._next is not None, "step before start"
        self._last, other = self._next
        self._next = other, self._last
        self._runs.run(self._runs.get(self._last.key, self._bound_run))
        (result,) = self._last.result.read()
        self.bytes_to_host += result.nbytes
        return result.copy()

    def fetch(self, name: str) -> np.ndarray:
        """Returns a copy of this output of the last run."""
        assert self._last is not None, "fetch before step"
        return self._copy(self._last.outputs[name])

    def state(self) -> dict[str, np.ndarray]:
        """Returns a copy of the state of the next run, in the form that `start` takes."""
        assert self._next is not None, "state before start"
        values = self._next[0].state.items()
        return {name.removeprefix(STATE): self._copy(value) for name, value in values}

    def _bound_run(self) -> BoundRun:
        assert self._last is not None
        return BoundRun(self._session, self._last.binding, self._naming, self._copies)

    def _copy(self, value: Any) -> np.ndarray:
        self._copies.settle()
        with no_capture():
            array = np.array(value.numpy())
        self.bytes_to_host += array.nbytes
        return array

    def _bind(self, given: Mapping[str, np.ndarray]) -> tuple[_Side, _Side]:
        shapes = {spec.name: _fixed(spec) for spec in self._results}
        sides = []
        for _ in range(2):
            state = {name: self._zeros(a.shape, str(a.dtype)) for name, a in given.items()}
            outputs = {
                spec.name: self._zeros(shapes[spec.name], spec.dtype) for spec in self._results
            }
            binding = bind_buffers(self._session, self._buffers)
            result = self._copies.download([outputs[RESULT]])
            sides.append(_Side(object(), binding, state, outputs, result))
        for side, other in (sides, sides[::-1]):
            for name in given:
                side.binding.bind_ortvalue_input(name, side.state[name])
                side.binding.bind_ortvalue_output(f"{name}.out", other.state[name])
            for name, value in side.outputs.items():
                side.binding.bind_ortvalue_output(name, value)
        return sides[0], sides[1]

    def _zeros(self, shape: Sequence[int], dtype: str) -> Any:
        return zero_value(shape, dtype, self._device)


def _lent(name: str, graph: Graph, lenders: Mapping[str, OrtBackend]) -> Any:
    """Returns the buffer that a lender has for this input; raises UserError if none has it."""
    prefix = max((prefix for prefix in lenders if name.startswith(prefix)), key=len, default="")
    buffers = lenders[prefix].buffers
    if name.removeprefix(prefix) not in buffers:
        raise UserError(
            f"{graph.file}: got a graph that wants inputs {[name]!r:.100}, expected buffers of the "
            "target and the drafter; build the bundle again"
        )
    return buffers[name.removeprefix(prefix)]


def _fixed(spec: TensorSpec) -> list[int]:
    """Returns the shape of an output without free axes; raises UserError for another one."""
    sizes = [size for size in spec.shape if isinstance(size, int)]
    if len(sizes) < len(spec.shape):
        raise UserError(
            f"got output {spec.name} of shape {list(spec.shape)!r:.80}, expected fixed sizes; "
            "build the bundle again"
        )
    return sizes
