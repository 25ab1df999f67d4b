"""Runs a graph's TensorRT plan, with all buffers on the device and everything on one CUDA stream.

Each KV buffer is one device address, bound as a graph input and as the output that updates it in
place. Feeds and results pass through pinned host buffers. A run takes the first profile that holds
its shapes; a shape seen for the second time is captured as a CUDA graph and replayed from then on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spec_runtime.backends.base import Backend, Runtime
from spec_runtime.backends.cuda_api import Cuda, open_cuda
from spec_runtime.backends.pad_rows import pad_rows
from spec_runtime.backends.shapes import (
    MAX_SHAPES,
    LeastRecentlyUsed,
    axis_sizes,
    is_cache,
    num_bytes,
    shape_of,
)
from spec_runtime.backends.tensorrt_api import DTYPES, TensorRT, import_tensorrt
from spec_runtime.bundle import Bundle, Graph, Plan, TensorSpec


def choose_plan(plans: Sequence[Plan], flavour: str, version: str, compute_capability: str) -> Plan:
    """Returns the plan for this flavour, version and GPU.

    Raises ValueError, which lists what there is, if none fits.
    """
    wanted = (flavour, version, compute_capability)
    for plan in plans:
        if (plan.flavour, plan.version, plan.compute_capability) == wanted:
            return plan
    there = ", ".join(f"{p.flavour} {p.version} for {p.compute_capability}" for p in plans)
    raise ValueError(
        f"no plan fits: got {flavour} {version} and a GPU of compute capability "
        f"{compute_capability}, the bundle has {there or 'none'}; run spec-export build --backend "
        f"tensorrt --compute-capability {compute_capability}, or choose --backend onnxruntime"
    )


def choose_profile(
    profiles: Sequence[Mapping[str, Sequence[int]]], sizes: Mapping[str, int]
) -> int:
    """Returns the index of the first profile, from narrow to wide, that holds these sizes.

    Raises ValueError if none does.
    """
    for i, profile in enumerate(profiles):
        if all(profile[axis][0] <= size <= profile[axis][2] for axis, size in sizes.items()):
            return i
    widest = {axis: f"{low} to {high}" for axis, (low, _, high) in profiles[-1].items()}
    raise ValueError(
        f"got rows {dict(sizes)}, the plan was built for {widest}: ask for smaller trees, or "
        "build the bundle again"
    )


# ------------------------------------------------------------------------------- running


class ShapedContext:
    """One execution context, set up for one profile and one set of shapes.

    It is never changed again: a CUDA graph is valid only as long as the context that it was
    captured from stays as it was.
    """

    def __init__(self, context: Any, trt: TensorRT, cuda: Cuda, may_capture: bool) -> None:
        self._context, self._trt, self._cuda = context, trt, cuda
        self._may_capture = may_capture
        self._is_warm = False
        self._executable: Any = None

    def run(self) -> None:
        """Enqueues the first run, which finishes TensorRT's own preparations; then captures, and
        replays from then on."""
        if self._executable is None and self._is_warm and self._may_capture:
            self._executable = self._cuda.capture(self._enqueue)
        if self._executable is not None:
            self._cuda.launch(self._executable)
            return
        self._enqueue()
        if not self._is_warm:
            self._is_warm = True
            if self._trt.flavour == "tensorrt_rtx":  # TensorRT has no such method
                capturable = self._context.is_stream_capturable(self._cuda.stream)
                self._may_capture = self._may_capture and capturable

    def close(self) -> None:
        if self._executable is not None:
            self._cuda.destroy(self._executable)

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._cuda.stream):
            raise RuntimeError(f"TensorRT does not run: {self._trt.reason}")


class _Buffer(NamedTuple):
    """An input or output: its address on the device and its flat, pinned twin on the host."""

    device: int
    host: np.ndarray


class TensorRTBackend:
    """One engine with its KV buffers [1, G, capacity, Dh], which start at zero.

    `engine` was deserialised from `plan`, which was made from `graph`. `has_cuda_graphs` captures
    shapes that come again.
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
        self.form, self.capacity = graph.form, capacity
        self._engine, self._trt, self._cuda = engine, trt, cuda
        self._graph, self._profiles = graph, plan.profiles
        self._has_cuda_graphs = has_cuda_graphs
        _check_engine(engine, graph, plan, capacity)
        self._allocated: list[int] = []
        self._contexts: LeastRecentlyUsed[ShapedContext] = LeastRecentlyUsed(
            MAX_SHAPES, ShapedContext.close
        )
        # Registered first: a later allocation may fail.
        weakref.finalize(self, _release, cuda, self._contexts, self._allocated)
        self._inputs = {s.name: s for s in graph.inputs if not is_cache(s)}
        self._outputs = {s.name: s for s in graph.outputs if not is_cache(s)}
        both = (*self._inputs.values(), *self._outputs.values())
        self._buffers = {spec.name: self._buffer(spec) for spec in both}
        self._addresses = {name: buffer.device for name, buffer in self._buffers.items()}
        for spec in filter(is_cache, graph.inputs):
            nbytes = num_bytes(spec, self._profiles)
            address = self._malloc(nbytes)
            cuda.zero(address, nbytes)
            self._addresses[spec.name] = self._addresses[f"{spec.name}.out"] = address
        # All contexts compute in the same memory: they take turns on one stream.
        self._scratch_bytes = int(engine.device_memory_size_v2)
        self._scratch = self._malloc(max(self._scratch_bytes, 1))

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run. Returns views of pinned memory that the next run writes again.

        Raises ValueError for shapes that no profile holds.
        """
        sizes = axis_sizes(self._graph, {name: feeds[name].shape for name in self._inputs})
        profile = choose_profile(self._profiles, sizes)
        most = {axis: three[-1] for axis, three in self._profiles[profile].items()}
        feeds, wider = pad_rows(self._graph, feeds, sizes, self.capacity, most)
        context = self._contexts.get(
            (profile, *sorted(wider.items())), lambda: self._new_context(profile, wider)
        )
        for name in self._inputs:
            buffer, feed = self._buffers[name], feeds[name]
            assert feed.dtype == buffer.host.dtype, (name, feed.dtype, buffer.host.dtype)
            buffer.host[: feed.size] = feed.reshape(-1)
            self._cuda.to_device(buffer.device, buffer.host.ctypes.data, feed.nbytes)
        context.run()
        results = {}
        for name in outputs:
            buffer, shape = self._buffers[name], shape_of(self._outputs[name], sizes)
            # Rows behind these are those that pad_rows added.
            flat = buffer.host[: math.prod(shape)]
            self._cuda.to_host(flat.ctypes.data, buffer.device, flat.nbytes)
            results[name] = flat.reshape(shape)
        self._cuda.wait()
        return results

    def _new_context(self, profile: int, sizes: Mapping[str, int]) -> ShapedContext:
        strategy = self._trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise RuntimeError(f"TensorRT makes no execution context: {self._trt.reason}")
        context.set_device_memory(self._scratch, self._scratch_bytes)
        # The stream is ours alone, so what follows on it comes after the switch.
        done = [context.set_optimization_profile_async(profile, self._cuda.stream)]
        for name, spec in self._inputs.items():
            done.append(context.set_input_shape(name, shape_of(spec, sizes)))
        for name, address in self._addresses.items():
            done.append(context.set_tensor_address(name, address))
        if not all(done):
            raise RuntimeError(
                f"TensorRT does not take rows {dict(sizes)} of profile {profile}: "
                f"{self._trt.reason}"
            )
        return ShapedContext(context, self._trt, self._cuda, self._has_cuda_graphs)

    def _buffer(self, spec: TensorSpec) -> _Buffer:
        nbytes = num_bytes(spec, self._profiles)
        return _Buffer(self._malloc(nbytes), self._cuda.pinned(nbytes).view(spec.dtype))

    def _malloc(self, nbytes: int) -> int:
        self._allocated.append(self._cuda.malloc(nbytes))
        return self._allocated[-1]


def _release(cuda: Cuda, contexts: LeastRecentlyUsed[ShapedContext], allocated: list[int]) -> None:
    contexts.clear()
    for address in allocated:
        cuda.free(address)


def _check_engine(engine: Any, graph: Graph, plan: Plan, capacity: int) -> None:
    """Refuses an engine without the graph's tensors, the plan's profiles, or KV buffers of
    `capacity` rows that it updates in place. Raises ValueError."""

    def require(name: str, got: Any, expected: Any) -> None:
        if got != expected:
            raise ValueError(
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

    Raises ValueError, one line, if this machine cannot run it: without a plan, TensorRT, a GPU or a
    plan for the GPU.
    """
    assert share is None, "contiguous caches cannot be shared"
    if not graph.plans:
        raise ValueError(
            f"got a bundle without a TensorRT plan for {graph.file}, expected one: run spec-export "
            "build --backend tensorrt, or choose --backend onnxruntime"
        )
    trt = import_tensorrt(list(dict.fromkeys(plan.flavour for plan in graph.plans)))
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
    engine = _runtime(trt).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise ValueError(
            f"{trt.flavour} {trt.version} cannot load {path.name}: {trt.reason}; build the bundle "
            "again on this machine"
        )
    return engine
