"""Runs a graph's TensorRT plan, with all buffers on the device and everything on one CUDA stream.

Each KV buffer is one device address, bound as a graph input and as the output that updates it in
place. Feeds lie side by side in pinned memory and go to the device with one copy. Only the results
asked for come back. A run takes the first profile that holds its shapes; a shape seen for the
second time is captured as a CUDA graph and replayed from then on.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.backends.base import Backend, DeviceBackend, OnDevice, Rows, Runtime
from spec_runtime.backends.cuda.api import Cuda, open_cuda
from spec_runtime.backends.cuda.device_rows import DeviceRows
from spec_runtime.backends.cuda.graph_cache import GraphCache
from spec_runtime.backends.layout import Layout, PackedFeeds
from spec_runtime.backends.pad_rows import PaddedRows, plan_padding
from spec_runtime.backends.shapes import axis_sizes, is_cache, num_bytes, shape_of
from spec_runtime.backends.tensorrt.api import DTYPES, TensorRT, import_tensorrt
from spec_runtime.backends.tensorrt.contexts import ContextMaker, ShapedContext
from spec_runtime.bundle.manifest import Bundle, Graph, Plan
from spec_runtime.errors import UserError


def choose_plan(plans: Sequence[Plan], flavour: str, version: str, compute_capability: str) -> Plan:
    """Returns the plan for this flavour, version and GPU.

    Raises UserError, which lists what there is, if none fits.
    """
    wanted = (flavour, version, compute_capability)
    for plan in plans:
        if (plan.flavour, plan.version, plan.compute_capability) == wanted:
            return plan
    there = ", ".join(f"{p.flavour} {p.version} for {p.compute_capability}" for p in plans)
    raise UserError(
        f"no plan fits: got {flavour} {version} and a GPU of compute capability "
        f"{compute_capability}, the bundle has {there or 'none'}; run spec-export build --backend "
        f"tensorrt --compute-capability {compute_capability}, or choose --backend onnxruntime"
    )


def choose_profile(
    profiles: Sequence[Mapping[str, Sequence[int]]], sizes: Mapping[str, int]
) -> int:
    """Returns the index of the first profile, from narrow to wide, that holds these sizes.

    Raises UserError if none does.
    """
    for i, profile in enumerate(profiles):
        if all(profile[axis][0] <= size <= profile[axis][2] for axis, size in sizes.items()):
            return i
    widest = {axis: f"{low} to {high}" for axis, (low, _, high) in profiles[-1].items()}
    raise UserError(
        f"got rows {dict(sizes)}, the plan was built for {widest}: ask for smaller trees, or "
        "build the bundle again"
    )


# ------------------------------------------------------------------------------- running


class PinnedMemory:
    """Pinned host memory that grows to the most that was asked for."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._memory = np.empty(0, np.int8)

    def first(self, nbytes: int) -> np.ndarray:
        """Returns its first bytes i8[nbytes]; arrays returned before stay valid."""
        if nbytes > self._memory.size:
            self._memory = self._cuda.pinned(max(nbytes, 2 * self._memory.size))
        return self._memory[:nbytes]


class TensorRTBackend(DeviceBackend):
    """One engine with its KV buffers [1, G, capacity, Dh], which start at zero.

    `engine` was deserialised from `plan`, which was made from `graph`. `has_cuda_graphs` captures
    repeated shapes as CUDA graphs. All shapes share the memory of feeds and that of results.
    """

    def __init__(
        self,
        engine: Any,
        trt: TensorRT,
        graph: Graph,
        plan: Plan,
        capacity: int,
        cuda: Cuda,
        has_cuda_graphs: bool = True,
    ) -> None:
        self.form, self.capacity, self.num_runs = graph.form, capacity, 0
        self._trt, self._cuda, self._graph, self._profiles = trt, cuda, graph, plan.profiles
        _check_engine(engine, graph, plan, capacity)
        self._allocated: list[int] = []
        self._maker = ContextMaker(engine, trt)
        self._runs: GraphCache[ShapedContext] = GraphCache(has_cuda_graphs)
        # Registered first: a later allocation may fail.
        weakref.finalize(self, _release, cuda, self._runs, self._allocated)
        self._inputs = {s.name: s for s in graph.inputs if not is_cache(s)}
        self._outputs = {s.name: s for s in graph.outputs if not is_cache(s)}
        most = {axis: max(each[axis][2] for each in plan.profiles) for axis in graph.free_axes}
        most_feeds, most_results = (
            Layout.of({name: num_bytes(spec, most) for name, spec in specs.items()})
            for specs in (self._inputs, self._outputs)
        )
        self._feeds = self._malloc(most_feeds.num_bytes)
        self._host_feeds = cuda.pinned(most_feeds.num_bytes)
        self._results = self._malloc(most_results.num_bytes)
        self._host_results, self._host_rows = PinnedMemory(cuda), PinnedMemory(cuda)
        self._bytes_to_host = 0
        self._buffers: dict[str, int] = {}
        for spec in filter(is_cache, graph.inputs):
            nbytes = num_bytes(spec, most)
            address = self._malloc(nbytes)
            cuda.zero(address, nbytes)
            self._buffers[spec.name] = self._buffers[f"{spec.name}.out"] = address
        # All contexts compute in the same memory: they take turns on one stream.
        self._scratch_bytes = int(engine.device_memory_size_v2)
        self._scratch = self._malloc(max(self._scratch_bytes, 1))

    @property
    def bytes_to_host(self) -> int:
        return self._bytes_to_host

    @property
    def free_bytes(self) -> int:
        return self._cuda.free_bytes

    def has_output(self, name: str) -> bool:
        return name in self._outputs

    def start(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str] = ()
    ) -> Callable[[], OnDevice]:
        """See DeviceBackend.start. Outputs are views of pinned memory that the next run writes
        again.

        Raises UserError for shapes that no profile holds.
        """
        sizes = axis_sizes(self._graph, {name: feeds[name].shape for name in self._inputs})
        profile = choose_profile(self._profiles, sizes)
        most = {axis: three[-1] for axis, three in self._profiles[profile].items()}
        given, given_sizes, wider = plan_padding(self._graph, feeds, sizes, self.capacity, most)
        run = self._runs.get((profile, *sorted(wider.items())), lambda: self._bind(profile, wider))
        self.num_runs += 1
        places = run.feeds.arrays
        assert all(given[name].dtype == place.dtype for name, place in places.items()), given
        PaddedRows(self._graph, given_sizes, wider, places).write(given)
        packed = run.feeds.memory
        self._cuda.to_device(self._feeds, packed.ctypes.data, packed.nbytes)
        self._runs.run(run)
        rows: dict[str, Rows] = {}
        for name in kept:
            spec, first = self._outputs[name], self._results + run.results.first[name]
            num_rows = shape_of(spec, sizes)[0]
            rows[name] = DeviceRows(self, first, shape_of(spec, wider), num_rows, spec.dtype)
        return lambda: (self._fetch_results(run.results, outputs, sizes), rows)

    def fetch(self, address: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """See device_rows.Memory."""
        landing = self._host_rows.first(math.prod(shape) * dtype.itemsize)
        self._cuda.to_host(landing.ctypes.data, address, landing.nbytes)
        self._cuda.wait()
        self._bytes_to_host += landing.nbytes
        return landing.copy().view(dtype).reshape(shape)

    def _fetch_results(
        self, layout: Layout, names: Sequence[str], sizes: Mapping[str, int]
    ) -> dict[str, np.ndarray]:
        """Brings results to the host, those that lie side by side with one copy, and waits."""
        specs = {name: self._outputs[name] for name in names}
        wanted = {name: num_bytes(spec, sizes) for name, spec in specs.items()}
        pieces = layout.pieces(wanted)
        landing = self._host_results.first(pieces[-1][1] if pieces else 0)
        for begin, end in pieces:
            piece = landing[begin:end]
            self._cuda.to_host(piece.ctypes.data, self._results + begin, piece.nbytes)
            self._bytes_to_host += piece.nbytes
        self._cuda.wait()
        results = {}
        for name, spec in specs.items():
            content = landing[layout.first[name] :][: wanted[name]]
            results[name] = content.view(spec.dtype).reshape(shape_of(spec, sizes))
        return results

    def _bind(self, profile: int, sizes: Mapping[str, int]) -> ShapedContext:
        context = self._maker.make()
        context.set_device_memory(self._scratch, self._scratch_bytes)
        # Nobody else uses the stream: later work on it comes after the switch.
        done = [context.set_optimization_profile_async(profile, self._cuda.stream)]
        shapes = {name: shape_of(spec, sizes) for name, spec in self._inputs.items()}
        feeds = PackedFeeds(self._inputs.values(), sizes, lambda nbytes: self._host_feeds[:nbytes])
        # From small to large: the results that a step fetches lie together, before the logits.
        outputs = {name: num_bytes(spec, sizes) for name, spec in self._outputs.items()}
        results = Layout.of(
            {name: outputs[name] for name in sorted(outputs, key=outputs.__getitem__)}
        )
        addresses = {name: self._feeds + first for name, first in feeds.first.items()}
        addresses |= {name: self._results + first for name, first in results.first.items()}
        for name, shape in shapes.items():
            done.append(context.set_input_shape(name, shape))
        for name, address in (addresses | self._buffers).items():
            done.append(context.set_tensor_address(name, address))
        if not all(done):
            raise RuntimeError(
                f"TensorRT does not take rows {dict(sizes)} of profile {profile}: "
                f"{self._trt.reason}"
            )
        return ShapedContext(context, self._trt, self._cuda, feeds, results)

    def _malloc(self, nbytes: int) -> int:
        self._allocated.append(self._cuda.malloc(nbytes))
        return self._allocated[-1]


def _release(cuda: Cuda, runs: GraphCache[ShapedContext], allocated: list[int]) -> None:
    runs.clear()
    for address in allocated:
        cuda.free(address)


def _check_engine(engine: Any, graph: Graph, plan: Plan, capacity: int) -> None:
    """Refuses an engine without the graph's tensors, the plan's profiles, or KV buffers of
    `capacity` rows that it updates in place. Raises UserError."""

    def require(name: str, got: Any, expected: Any) -> None:
        if got != expected:
            raise UserError(
                f"{plan.file}: {name}: got {got}, expected {expected}; build the bundle again"
            )

    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
    require("tensors", sorted(names), sorted(specs))
    require("profiles", engine.num_optimization_profiles, len(plan.profiles))
    for name, spec in specs.items():
        require(f"type of {name}", DTYPES.get(engine.get_tensor_dtype(name).name), spec.dtype)
    for spec in graph.inputs:
        for i, profile in enumerate(plan.profiles):
            expected_shapes = [
                shape_of(spec, {axis: sizes[which] for axis, sizes in profile.items()})
                for which in range(3)
            ]
            got_shapes = [tuple(shape) for shape in engine.get_tensor_profile_shape(spec.name, i)]
            require(f"profile {i} of {spec.name}", got_shapes, expected_shapes)
        if is_cache(spec):
            require(f"rows of {spec.name}", spec.shape[2], capacity)
            output = f"{spec.name}.out"
            require(f"input of {output}", engine.get_aliased_input_tensor(output), spec.name)


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime,
    share: Backend | None,
    banks: Backend | None,
) -> TensorRTBackend:
    """Opens a graph's plan, see backends.open_graph.

    Raises UserError, one line, if this machine cannot run it: without a plan, TensorRT, a GPU or a
    plan for the GPU.
    """
    assert share is None, "contiguous caches cannot be shared"
    if not graph.plans:
        raise UserError(
            f"got a bundle without a TensorRT plan for {graph.file}, expected one: run spec-export "
            "build --backend tensorrt, or choose --backend onnxruntime"
        )
    trt = import_tensorrt()
    cuda = open_cuda()
    plan = choose_plan(graph.plans, trt.flavour, trt.version, cuda.compute_capability)
    engine = _deserialise(trt, bundle.file(plan.file))
    # A graph without a cache has no rows to hold: its proposer passes capacity 1.
    return TensorRTBackend(engine, trt, graph, plan, capacity, cuda, runtime.has_cuda_graphs)


@cache
def _runtime(trt: TensorRT) -> Any:
    """Returns the one TensorRT runtime of this process: no engine may outlive it."""
    return trt.module.Runtime(trt.logger)


def _deserialise(trt: TensorRT, path: Path) -> Any:
    # Mapped: a plan is as large as the weights, and read but once.
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = _runtime(trt).deserialize_cuda_engine(data)
    if engine is None:
        raise UserError(
            f"{trt.flavour} {trt.version} cannot load {path.name}: {trt.reason}; build the bundle "
            "again on this machine"
        )
    return engine
