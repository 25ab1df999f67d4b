"""Runs a pass over several conversations with ONNX Runtime: each in its own buffers, all in one
graph."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spec_runtime.backends.base import Backend, DeviceBackend, GraphRun, RowsReader, Runtime
from spec_runtime.backends.cuda.copies import Copies
from spec_runtime.backends.cuda.device_rows import DeviceRows
from spec_runtime.backends.pad_rows import WIDTHS, PaddedRows, padded_sizes
from spec_runtime.backends.session import Lender, OrtBackend, as_lender
from spec_runtime.backends.shapes import axis_sizes, is_cache, mask_width, shape_of
from spec_runtime.bundle.manifest import LANE_ROWS, MAX_LANES, Bundle, Graph, lane_name, lanes_name

Feeds = Mapping[str, np.ndarray]
LOGITS = "logits"


class LanesOpener(Protocol):
    """Opens a graph for several lanes on a backend."""

    def __call__(
        self, bundle: Bundle, graph: Graph, capacity: int, runtime: Runtime, lanes: Lender
    ) -> OrtBackend: ...


@dataclass(frozen=True, eq=False)
class JoinedLanes:
    """Lends the buffers of lanes that share passes, each by its lane's name; see Lender."""

    buffers: Mapping[str, Any]
    copies: Copies


class Joins:
    """Joins the buffers of lanes, always the same for the same lanes."""

    def __init__(self) -> None:
        self._joined: dict[tuple[int, ...], JoinedLanes] = {}

    def of(self, lanes: Sequence[OrtBackend]) -> JoinedLanes:
        """Returns what lends these lanes' buffers."""
        key = tuple(map(id, lanes))
        if key not in self._joined:
            buffers = {
                lane_name(name, k): value
                for k, lane in enumerate(lanes)
                for name, value in lane.buffers.items()
            }
            self._joined[key] = JoinedLanes(buffers, lanes[0].copies)
        return self._joined[key]


class LanePasses:
    """Runs the target's graph for several lanes, see `spec_export/graphs/lanes.py`.

    A lane is a backend of the target with its own buffers; they share the weights. The graphs, one
    for each number of lanes, are opened by `open`, or when first used, on the first lane's stream.
    `max_lanes` is the most that one pass takes; 1 if the bundle has no such graph. Once `closing`
    is set, no further graph is opened in advance. `is_warm` says that the last pass took no longer
    than those like it will, as it does while it is captured.

    Where CUDA graphs are captured, all lanes' rows are padded to the same of a few widths, so that
    few shapes occur. A pass with a lane of more rows than the widest runs as it is.
    `run_drafts` runs what several drafters wait for.
    """

    def __init__(
        self,
        bundle: Bundle,
        runtime: Runtime,
        open_lanes: LanesOpener,
        open_sampling: Callable[[Bundle, Backend, Runtime], RowsReader | None],
        run_drafts: Callable[[Sequence[GraphRun]], None],
        closing: threading.Event,
    ) -> None:
        self.run_drafts, self.closing = run_drafts, closing
        self._bundle, self._runtime = bundle, runtime
        self._open_lanes, self._open_sampling = open_lanes, open_sampling
        known = bundle.manifest.graphs
        self._target = known["target"]
        self._graphs = {
            n: known[lanes_name(n)] for n in range(2, MAX_LANES + 1) if lanes_name(n) in known
        }
        self.max_lanes = max(self._graphs, default=1)
        self.is_warm = True
        self._opened: dict[int, tuple[OrtBackend, RowsReader | None]] = {}
        self._joins = Joins()
        self._opening = {n: threading.Lock() for n in self._graphs}

    @property
    def most_open(self) -> int:
        """Returns up to how many lanes the graphs are open; 1 while that for two is not."""
        return next(n for n in range(1, MAX_LANES + 1) if n + 1 not in self._opened)

    def open(self, lane: Backend, most: int) -> None:
        """Opens the graphs for up to `most` lanes, from any thread, fewer lanes first, so that no
        pass has to; any lane's buffers will do until they are used."""
        for num_lanes in range(2, min(most, self.max_lanes) + 1):
            if not self.closing.is_set():
                self._open(num_lanes, lane.capacity, self._joins.of([as_lender(lane)] * num_lanes))

    def run(
        self,
        lanes: Sequence[Backend],
        feeds: Sequence[Feeds],
        outputs: Sequence[str],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[dict[str, Any]]:
        """Runs the rows of all lanes once, and `meanwhile` while a device does; returns each lane's
        outputs, as its own run would.

        There are at least two lanes and a graph for so many. `feeds` holds each lane's feeds.
        Outputs that the graph has not are the sampling graph's. On a device logits stay there (see
        base.Rows). The next run of as many lanes may overwrite the arrays.
        """
        # always in the same order, so that what is bound for lanes that meet again is found
        order = sorted(range(len(lanes)), key=lambda k: id(lanes[k]))
        joined = self._joins.of([as_lender(lanes[k]) for k in order])
        capacity = lanes[0].capacity
        backend, sampling = self._open(len(lanes), capacity, joined)
        backend.borrow(joined.buffers)
        for lane in lanes:
            as_lender(lane).copies.settle()  # each has its own stream
        wider = self._wider(feeds, capacity)
        wide = [self._widened(feeds[k], wider) for k in order]
        found = _run(backend, sampling, _joined(wide), outputs, meanwhile)
        backend.copies.settle()
        self.is_warm = backend.is_warm
        axes = {spec.name: spec.shape[0] for spec in self._target.outputs}
        results: dict[int, dict[str, Any]] = {}
        begins = {"N": 0, "M": 0}
        for k, padded in zip(order, wide, strict=True):
            numbers, padded_numbers = _num_rows(feeds[k]), _num_rows(padded)
            results[k] = {}
            for name, rows in found.items():
                axis = str(axes.get(name, "M"))  # the sampling graph's are by row of logits
                results[k][name] = _part(rows, begins[axis], numbers[axis])
            begins = {axis: begin + padded_numbers[axis] for axis, begin in begins.items()}
        return [results[k] for k in range(len(lanes))]

    def _open(
        self, num_lanes: int, capacity: int, joined: JoinedLanes
    ) -> tuple[OrtBackend, RowsReader | None]:
        """Returns the graph for so many lanes, on these lanes' buffers, and what reads its
        logits."""
        with self._opening[num_lanes]:
            if num_lanes not in self._opened:
                bundle, runtime = self._bundle, self._runtime
                graph = self._graphs[num_lanes]
                backend: Any = self._open_lanes(bundle, graph, capacity, runtime, joined)
                self._opened[num_lanes] = backend, self._open_sampling(bundle, backend, runtime)
            return self._opened[num_lanes]

    def _wider(self, feeds: Sequence[Feeds], capacity: int) -> dict[str, int]:
        """Returns the sizes that the lanes' axes are padded and cut to; none on the CPU."""
        wider: dict[str, int] = {}
        if self._runtime.device == "cpu":
            return wider
        most = {axis: max(_num_rows(each)[axis] for each in feeds) for axis in ("N", "M")}
        is_cut = self._target.attention != "full_buffer"
        pasts = [each["seqlens_k"].item() + 1 - len(each["slots"]) for each in feeds]
        if self._runtime.has_cuda_graphs and most["N"] <= WIDTHS[-1]:
            precision = self._bundle.manifest.target.precision
            sizes = padded_sizes(self._target, most, capacity, precision=precision)
            if not is_cut or max(pasts) + sizes["N"] <= capacity:
                wider |= sizes
        if is_cut:
            num_new = [wider.get("N", len(each["slots"])) for each in feeds]
            wider["S"] = mask_width(max(map(sum, zip(pasts, num_new, strict=True))), capacity)
        return wider

    def _widened(self, feeds: Feeds, wider: Mapping[str, int]) -> Feeds:
        """Returns a lane's feeds with axes of these sizes, where there are any."""
        if not wider:
            return feeds
        inputs = [spec for spec in self._target.inputs if not is_cache(spec)]
        sizes = axis_sizes(self._target, {spec.name: feeds[spec.name].shape for spec in inputs})
        padded = {**sizes, **wider}
        arrays = {spec.name: np.empty(shape_of(spec, padded), spec.dtype) for spec in inputs}
        PaddedRows(self._target, sizes, padded, arrays).write(feeds)
        return arrays


def _run(
    backend: Backend,
    sampling: RowsReader | None,
    feeds: dict[str, np.ndarray],
    outputs: Sequence[str],
    meanwhile: Callable[[], None],
) -> dict[str, Any]:
    """Returns these outputs of one run, logits on the device if there is one."""
    if not isinstance(backend, DeviceBackend):
        meanwhile()
        return dict(backend.run(feeds, outputs))
    own = [name for name in outputs if name != LOGITS and backend.has_output(name)]
    finish = backend.start(feeds, own, [LOGITS])
    meanwhile()
    fetched, kept = finish()
    others = [name for name in outputs if not backend.has_output(name)]
    found = {**fetched, **kept}
    if others:
        assert sampling is not None, others
        found |= zip(others, sampling.run(kept[LOGITS], others), strict=True)
    return found


def _part(rows: np.ndarray | DeviceRows, begin: int, num_rows: int) -> np.ndarray | DeviceRows:
    if isinstance(rows, DeviceRows):
        return rows.part(begin, num_rows)
    return rows[begin : begin + num_rows]


def _num_rows(feeds: Feeds) -> dict[str, int]:
    """Returns how many rows a lane runs, and of how many it asks for the logits, by axis."""
    return {"N": len(feeds["slots"]), "M": len(feeds["logit_rows"])}


def _joined(feeds: Sequence[Feeds]) -> dict[str, np.ndarray]:
    """Returns what all lanes feed together: rows one lane after another, and the rest by lane.

    >>> rows = {"input_ids": np.array([[7, 8]]), "position_ids": np.array([[4, 5]])}
    >>> rows |= {"logit_rows": np.array([1]), "slots": np.array([4, 5])}
    >>> joined = _joined([rows, rows])
    >>> joined["logit_rows"], joined["lane_rows"]
    (array([1, 3]), array([2, 2]))
    """
    numbers = [_num_rows(each)["N"] for each in feeds]
    begins = np.cumsum([0, *numbers])
    joined = {
        name: np.concatenate([each[name] for each in feeds], axis=1)
        for name in ("input_ids", "position_ids")
    }
    rows = [each["logit_rows"] + begin for each, begin in zip(feeds, begins, strict=False)]
    joined |= {"logit_rows": np.concatenate(rows), LANE_ROWS: np.array(numbers)}
    for k, each in enumerate(feeds):
        joined |= {lane_name(name, k): array for name, array in each.items()}
    return joined
