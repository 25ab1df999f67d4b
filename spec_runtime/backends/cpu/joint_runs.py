"""Runs what the drafters of several generations wait for together, with ONNX Runtime on the CPU."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_runtime.backends.base import GraphRun, Runtime
from spec_runtime.backends.cpu.backend import CpuBackend, open_lanes
from spec_runtime.backends.lanes import Joins
from spec_runtime.backends.session import OrtBackend, as_lender
from spec_runtime.bundle.manifest import (
    LANE_LOGITS,
    LANE_ROWS,
    MAX_LANES,
    Bundle,
    Graph,
    TensorSpec,
    draft_name,
    lane_name,
    lanes_name,
)
from spec_runtime.errors import UserError

log = logging.getLogger("spec_runtime")

Feeds = Mapping[str, np.ndarray]
Outputs = list[dict[str, np.ndarray]]  # those of each run


class JointRuns:
    """Runs graphs of drafters for several generations, each with a backend of its own.

    A graph with a cache has graphs for several lanes in the bundle, see
    `spec_export/graphs/lanes.py`. A thread opens them once two such runs meet, fewer lanes first,
    and they are used as they come: nobody waits for that. Once `closing` is set, no further one is
    opened. A graph without a cache, whose inputs and
    outputs are rows of nodes, takes those of all generations as it is. Other runs, and those that
    nobody shares, run by themselves.
    """

    def __init__(self, bundle: Bundle, runtime: Runtime, closing: threading.Event) -> None:
        self._bundle, self._runtime, self._closing = bundle, runtime, closing
        known = bundle.manifest.graphs
        self._graphs: dict[str, dict[int, Graph]] = {}  # by file of the graph for one, and lanes
        for info in bundle.manifest.drafters:
            for role, graph in info.graphs.items():
                name = draft_name(info.name, role)
                names = {n: lanes_name(n, name) for n in range(2, MAX_LANES + 1)}
                lanes = {n: known[each] for n, each in names.items() if each in known}
                self._graphs[graph.file] = lanes
        self._opened: dict[str, CpuBackend] = {}
        self.opening: dict[str, threading.Thread] = {}  # by file of the graph for one
        self._joins = Joins()

    def run(self, runs: Sequence[GraphRun]) -> None:
        """Runs them all; what each gets is valid until the next runs."""
        alike: dict[tuple[Any, ...], list[GraphRun]] = {}
        # always in the same order, so that what is bound for lanes that meet again is found
        for run in sorted(runs, key=lambda run: id(run.backend)):
            alike.setdefault(_kind(run), []).append(run)
        for same in alike.values():
            num_groups = -(-len(same) // self._most(same))
            for k in range(num_groups):
                self._run_together(same[k::num_groups])

    def _most(self, runs: Sequence[GraphRun]) -> int:
        """Returns how many of these runs of one kind one run takes."""
        if len(runs) == 1:
            return 1
        graph = _graph(runs[0])
        if graph.form == "stateless":
            return len(runs)
        if graph.file not in self.opening:
            lane = as_lender(runs[0].backend), runs[0].backend.capacity
            thread = threading.Thread(target=self._open, args=(graph, *lane))
            self.opening[graph.file] = thread
            thread.start()
        found = self._graphs[graph.file]
        return max((n for n in found if found[n].file in self._opened), default=1)

    def _open(self, graph: Graph, lane: OrtBackend, capacity: int) -> None:
        """Opens the graphs for several lanes in place of this one; any lane's buffers will do until
        they are used."""
        for num_lanes, each in sorted(self._graphs[graph.file].items()):
            if self._closing.is_set():
                return
            joined = self._joins.of([lane] * num_lanes)
            try:
                found = open_lanes(self._bundle, each, capacity, self._runtime, joined)
            except UserError as error:
                log.warning("drafts of several answers run one by one: %s", error)
                return
            self._opened[each.file] = found

    def _run_together(self, runs: Sequence[GraphRun]) -> None:
        if len(runs) == 1:
            runs[0].run()
            return
        begin = time.perf_counter()
        is_rows = _graph(runs[0]).form == "stateless"
        results = _run_rows(runs) if is_rows else self._run_lanes(runs)
        seconds = time.perf_counter() - begin
        for run, found in zip(runs, results, strict=True):
            run.results, run.seconds = found, seconds  # it waited for the others

    def _run_lanes(self, runs: Sequence[GraphRun]) -> Outputs:
        """Runs a graph with a cache; that for so many lanes is open."""
        outputs, lanes = runs[0].outputs, range(len(runs))
        graph = self._graphs[_graph(runs[0]).file][len(runs)]
        joined = self._joins.of([as_lender(run.backend) for run in runs])
        backend = self._opened[graph.file]
        backend.borrow(joined.buffers)
        # Outputs with rows are there once for all lanes, the others once a lane.
        shared = {spec.name: str(spec.shape[0]) for spec in graph.outputs if spec.name in outputs}
        own = [name for name in outputs if name not in shared]
        feeds = _joined_feeds(graph, [run.feeds for run in runs])
        found = backend.run(feeds, [*shared, *(lane_name(name, k) for name in own for k in lanes)])
        ends = {"N": feeds[LANE_ROWS].cumsum()[:-1], "M": feeds[LANE_LOGITS].cumsum()[:-1]}
        parts = {name: np.split(found[name], ends[axis]) for name, axis in shared.items()}
        parts |= {name: [found[lane_name(name, k)] for k in lanes] for name in own}
        return [{name: parts[name][k] for name in outputs} for k in lanes]


def _graph(run: GraphRun) -> Graph:
    assert isinstance(run.backend, CpuBackend), run.backend
    return run.backend.graph


def _kind(run: GraphRun) -> tuple[Any, ...]:
    """Returns what runs have in common that one run can take together.

    Without a cache, feeds that are not rows of nodes have to be the same, and all outputs rows.
    Runs of other graphs, and those without outputs, have nothing in common.
    """
    if not isinstance(run.backend, CpuBackend) or not run.outputs:
        return (id(run),)
    graph, outputs = run.backend.graph, tuple(run.outputs)
    if graph.form != "stateless":
        return graph.file, outputs
    if not all(_has_rows(spec) for spec in graph.outputs if spec.name in outputs):
        return (id(run),)
    fixed = (run.feeds[spec.name].tobytes() for spec in graph.inputs if not _has_rows(spec))
    return graph.file, outputs, *fixed


def _run_rows(runs: Sequence[GraphRun]) -> Outputs:
    """Runs a graph without a cache on the rows of all, by the first one's backend."""
    rows = [spec.name for spec in _graph(runs[0]).inputs if _has_rows(spec)]
    joined = {name: np.concatenate([run.feeds[name] for run in runs]) for name in rows}
    ends = np.cumsum([len(run.feeds[rows[0]]) for run in runs])[:-1]
    found = runs[0].backend.run(runs[0].feeds | joined, runs[0].outputs)
    parts = {name: np.split(array, ends) for name, array in found.items()}
    return [{name: part[k] for name, part in parts.items()} for k in range(len(runs))]


def _has_rows(spec: TensorSpec) -> bool:
    """Says whether the first axis of an input or output is that of rows."""
    return isinstance(spec.shape[0], str)


def _joined_feeds(graph: Graph, feeds: Sequence[Feeds]) -> dict[str, np.ndarray]:
    """Returns what all lanes feed together: rows one lane after another, and the rest by lane.

    >>> inputs = TensorSpec("logit_rows", "int64", ("M",)), TensorSpec("mask.lane0", "bool", ("N",))
    >>> rows = {"logit_rows": np.array([1]), "slots": np.array([4, 5])}
    >>> joined = _joined_feeds(Graph("", "slots", inputs, ()), [rows, rows])
    >>> joined["logit_rows"], joined["lane_rows"], joined["slots.lane1"]
    (array([1, 3]), array([2, 2]), array([4, 5]))
    """
    begins = np.cumsum([0, *(len(each["slots"]) for each in feeds)])
    joined = {lane_name(name, k): each[name] for k, each in enumerate(feeds) for name in each}
    for spec in graph.inputs:
        if spec.name in feeds[0]:
            arrays = [each[spec.name] for each in feeds]
            if spec.name == "logit_rows":
                arrays = [rows + begin for rows, begin in zip(arrays, begins, strict=False)]
            axis = next(i for i, size in enumerate(spec.shape) if isinstance(size, str))
            joined[spec.name] = np.concatenate(arrays, axis)
    joined[LANE_ROWS] = np.diff(begins)
    joined[LANE_LOGITS] = np.array([len(each["logit_rows"]) for each in feeds])
    return joined
