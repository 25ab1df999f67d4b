"""Runs a pass over several conversations with ONNX Runtime on the CPU: each in its own buffers, all
in one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_runtime.backends.base import Backend, Runtime
from spec_runtime.backends.cpu import CpuBackend
from spec_runtime.backends.packed_files import hashes_of
from spec_runtime.backends.session import NamingGraph, SessionOptions, open_session
from spec_runtime.backends.shapes import KV, is_cache, shape_of
from spec_runtime.bundle.manifest import LANE_ROWS, MAX_LANES, Bundle, lane_name, lanes_name
from spec_runtime.bundle.operators import require_known_graph

MAX_BINDINGS = 64  # kept at a time: one for each set of lanes that met


class LanePasses:
    """Runs the target's graph for several lanes, see `spec_export/graphs/lanes.py`.

    A lane is a backend of the target with its own buffers; they share the weights. Its graphs,
    one for each number of lanes, are opened when first used, with weights that are mapped from
    one file. `max_lanes` is the most that one pass takes; 1 if the bundle has no such graph.
    """

    def __init__(self, bundle: Bundle, runtime: Runtime) -> None:
        self._bundle, self._runtime = bundle, runtime
        known = bundle.manifest.graphs
        self._graphs = {
            n: known[lanes_name(n)] for n in range(2, MAX_LANES + 1) if lanes_name(n) in known
        }
        self.max_lanes = max(self._graphs, default=1)
        self._sessions: dict[int, Any] = {}
        self._bindings: dict[tuple[Any, ...], Any] = {}

    def run(
        self,
        lanes: Sequence[Backend],
        feeds: Sequence[Mapping[str, np.ndarray]],
        outputs: Sequence[str],
    ) -> list[dict[str, np.ndarray]]:
        """Runs the rows of all lanes once; returns each lane's outputs, as its own run would.

        There are at least two lanes and a graph for so many. `feeds` are those of each lane. The
        next run may overwrite the arrays.
        """
        graph = self._graphs[len(lanes)]
        session = self._session(len(lanes))
        numbers = [len(each["slots"]) for each in feeds]
        joined = _joined(feeds)
        joined[LANE_ROWS] = np.array(numbers, np.int64)
        sizes = {"N": sum(numbers), "M": len(joined["logit_rows"])}
        binding = self._binding(session, lanes, tuple(outputs))
        held = []  # ONNX Runtime reads these arrays' memory during the run
        for spec in graph.inputs:
            if not is_cache(spec):
                array = np.ascontiguousarray(joined[spec.name])
                held.append(array)
                binding.bind_cpu_input(spec.name, array)
        specs = {spec.name: spec for spec in graph.outputs}
        results = {}
        for name in outputs:
            shape = shape_of(specs[name], sizes)
            results[name] = array = np.empty(shape, specs[name].dtype)
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        with NamingGraph(graph.file):
            session.run_with_iobinding(binding)
        ends = {
            "N": np.cumsum(numbers)[:-1],
            "M": np.cumsum([len(each["logit_rows"]) for each in feeds])[:-1],
        }
        parts = {
            name: np.split(array, ends[str(specs[name].shape[0])])
            for name, array in results.items()
        }
        return [{name: part[k] for name, part in parts.items()} for k in range(len(lanes))]

    def _session(self, num_lanes: int) -> Any:
        if num_lanes not in self._sessions:
            bundle, graph, runtime = self._bundle, self._graphs[num_lanes], self._runtime
            require_known_graph(bundle, graph)
            options = SessionOptions(runtime.num_threads, hashes=hashes_of(bundle, graph))
            self._sessions[num_lanes] = open_session(bundle.file(graph.file), graph, options)
        return self._sessions[num_lanes]

    def _binding(self, session: Any, lanes: Sequence[Backend], outputs: tuple[str, ...]) -> Any:
        """Returns the binding with the buffers of these lanes, for these outputs."""
        key = (*map(id, lanes), outputs)
        if key not in self._bindings:
            if len(self._bindings) == MAX_BINDINGS:
                self._bindings.clear()
            binding = self._bindings[key] = session.io_binding()
            for k, lane in enumerate(lanes):
                assert isinstance(lane, CpuBackend), lane
                for name, value in lane.buffers.items():
                    binding.bind_ortvalue_input(lane_name(name, k), value)
                    if name.startswith(KV):
                        binding.bind_ortvalue_output(lane_name(f"{name}.out", k), value)
        return self._bindings[key]


def _joined(feeds: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns what all lanes feed together: rows one lane after another, and the rest by lane.

    >>> rows = {"input_ids": np.array([[7, 8]]), "position_ids": np.array([[4, 5]])}
    >>> rows |= {"logit_rows": np.array([1]), "slots": np.array([4, 5])}
    >>> _joined([rows, rows])["logit_rows"]
    array([1, 3])
    """
    begins = np.cumsum([0, *(len(each["slots"]) for each in feeds)])
    joined = {
        name: np.concatenate([each[name] for each in feeds], axis=1)
        for name in ("input_ids", "position_ids")
    }
    rows = [each["logit_rows"] + begin for each, begin in zip(feeds, begins, strict=False)]
    joined["logit_rows"] = np.concatenate(rows)
    for k, each in enumerate(feeds):
        joined |= {lane_name(name, k): array for name, array in each.items()}
    return joined
