"""A graph that makes its own next inputs: two bindings over two sets of state, used in turn.

Its KV buffers are lent by the sessions that share them. State goes in as `state.X` and comes out as
`state.X.out`, which the next run reads in its place: never the same memory in one run, for ONNX
Runtime does not order readers before the writer. On CUDA each binding is one captured graph. States
of other shapes have bindings of their own. Knows nothing of what the state means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spec_runtime.backends.ort import (
    PROVIDERS,
    OrtBackend,
    _bind_caches,
    _check_signature,
    _open_session,
    _run_options,
    copied,
)
from spec_runtime.backends.threads import default_threads
from spec_runtime.bundle import Graph

RESULT, STATE = "result", "state."


class _Side(NamedTuple):
    """A binding that reads `state` and writes the other side's; options that name its graph."""

    binding: Any
    state: dict[str, Any]
    outputs: dict[str, Any]
    options: Any


class OrtStepper:
    """lenders: how names of KV buffers and banks begin -> the backend whose buffers they are, under
    the rest of the name.

    `start` sets the state, `step` runs once and returns the output `result`, `fetch` another one of
    the last run. bytes_to_host: copied by these so far.
    """

    def __init__(
        self,
        path: Path,
        graph: Graph,
        lenders: Mapping[str, OrtBackend],
        threads: int | None = None,
        device: str = "cpu",
        is_captured: bool = False,
    ) -> None:
        self.bytes_to_host = 0
        self._landing: dict[int, np.ndarray] = {}
        self._device = device
        provider = PROVIDERS[device]
        self._copies = lenders[""]._copies
        self._session = _open_session(
            path, threads or default_threads(), provider, is_captured, self._copies.settings
        )
        _check_signature(self._session, graph, path)
        self._inputs = [spec.name for spec in graph.inputs if spec.name.startswith(STATE)]
        self._results = [spec for spec in graph.outputs if not spec.name.endswith(".out")]
        self._caches: dict[str, Any] = {}
        for spec in graph.inputs:
            if not spec.name.startswith(STATE):
                before = max((b for b in lenders if spec.name.startswith(b)), key=len)
                self._caches[spec.name] = lenders[before]._caches[spec.name.removeprefix(before)]
        self._pairs: dict[tuple[tuple[int, ...], ...], tuple[_Side, _Side]] = {}  # by shapes
        self._last: _Side | None = None
        self._next: tuple[_Side, _Side] | None = None

    def start(self, state: Mapping[str, np.ndarray]) -> None:
        """The state of the next run: an array for each `state.X`, by X, as the graph has it."""
        given = {
            name: np.ascontiguousarray(state[name.removeprefix(STATE)]) for name in self._inputs
        }
        assert len(given) == len(state), sorted(state)
        key = tuple(array.shape for array in given.values())
        self._copies.settle()
        if key not in self._pairs:
            self._pairs[key] = self._bind(given)
        self._next = self._pairs[key]
        for name, array in given.items():
            self._next[0].state[name].update_inplace(array)

    def step(self) -> np.ndarray:
        """One run; its `result`."""
        assert self._next is not None, "step before start"
        self._last, other = self._next
        self._next = other, self._last
        self._session.run_with_iobinding(self._last.binding, self._last.options)
        (result,) = self._copies.fetch([self._last.outputs[RESULT]], self._landing)
        self.bytes_to_host += result.nbytes
        return result.copy()

    def fetch(self, name: str) -> np.ndarray:
        """A copy of this output of the last run."""
        assert self._last is not None, "fetch before step"
        return self._copy(self._last.outputs[name])

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the state of the next run, as for `start`."""
        assert self._next is not None, "state before start"
        values = self._next[0].state.items()
        return {name.removeprefix(STATE): self._copy(value) for name, value in values}

    def _copy(self, value: Any) -> np.ndarray:
        self._copies.settle()
        array = np.array(value.numpy())
        self.bytes_to_host += array.nbytes
        return array

    def _bind(self, given: Mapping[str, np.ndarray]) -> tuple[_Side, _Side]:
        first = 2 * len(self._pairs) + 1
        shapes = {spec.name: [int(size) for size in spec.shape] for spec in self._results}
        sides = []
        for graph_id in (first, first + 1):
            # each its own memory: on the CPU a value keeps the array it is made from
            state = {name: self._zeros(array.shape, array.dtype) for name, array in given.items()}
            outputs = {
                spec.name: self._zeros(shapes[spec.name], spec.dtype) for spec in self._results
            }
            binding = _bind_caches(self._session, self._caches)
            sides.append(_Side(binding, state, outputs, _run_options(graph_id)))
        for side, other in (sides, sides[::-1]):
            for name in given:
                side.binding.bind_ortvalue_input(name, side.state[name])
                side.binding.bind_ortvalue_output(f"{name}.out", other.state[name])
            for name, value in side.outputs.items():
                side.binding.bind_ortvalue_output(name, value)
        return sides[0], sides[1]

    def _zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        return copied(np.zeros(shape, dtype), self._device)
