"""TensorRT: one plan a graph, all its buffers on the device, one CUDA stream.

Each KV buffer is one device address, bound as a graph input and as the output that updates it in
place. Feeds and results pass through pinned host buffers. A run takes the first profile that holds
its shapes; a shape seen for the second time is captured as a CUDA graph and replayed from then on.
Knows plans, addresses and shapes; knows nothing of what the rows mean. `tensorrt` (11.x) and
TensorRT-RTX have the same interface and are one code path. spec_export builds with it too.
"""

from __future__ import annotations

import importlib
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from spec_runtime.backends.cuda import Cuda, open_cuda
from spec_runtime.backends.pad_rows import pad_rows
from spec_runtime.bundle import BANK, FLAVOURS, Bundle, Graph, Plan, TensorSpec

# flavour -> its Python module and our extra that brings it
PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt"),
    "tensorrt_rtx": ("tensorrt_rtx_bindings", "tensorrt-rtx"),
}
DTYPES = {
    **{"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{"INT64": "int64", "INT32": "int32", "INT8": "int8", "UINT8": "uint8"},
}
MAX_STEPS = 64  # execution contexts kept, one a shape

log = logging.getLogger("spec_runtime")


# ------------------------------------------------------------------------------- what is installed


class TensorRT(NamedTuple):
    """The Python module of a flavour, its version as plans have it, and the logger of all its
    objects."""

    module: Any
    flavour: str
    version: str
    logger: Any

    @property
    def reason(self) -> str:
        """The last error TensorRT told."""
        return self.logger.errors[-1][:400] if self.logger.errors else "it gave no reason"


def import_tensorrt(flavours: Sequence[str] = FLAVOURS) -> TensorRT:
    """The first of these flavours that is installed. ValueError says what to install."""
    reasons = []
    for flavour in flavours:
        name = PACKAGES[flavour][0]
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library it needs does not load
            reasons.append(f"{name} ({error})")
            continue
        version = str(module.__version__)
        if flavour == "tensorrt" and int(version.partition(".")[0]) < 11:
            reasons.append(f"{name} (version {version}, expected 11 or later)")
            continue
        return TensorRT(module, flavour, version, _logger(module))
    extras = " or ".join(f"pip install 'specsplit[{PACKAGES[flavour][1]}]'" for flavour in flavours)
    raise ValueError(f"TensorRT is not installed: got no {', no '.join(reasons)}; run {extras}")


@cache
def _logger(module: Any) -> Any:
    """One a module, which keeps the errors told, as one line each."""

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (module.ILogger.ERROR, module.ILogger.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Logger()


# ------------------------------------------------------------------------------- pure decisions


def choose_plan(plans: Sequence[Plan], flavour: str, version: str, compute_capability: str) -> Plan:
    """The plan for this flavour, version and GPU. ValueError lists what there is."""
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


def is_cache(spec: TensorSpec) -> bool:
    """Whether it is a KV buffer or a bank (bundle.BANK), before or after a step."""
    return spec.name.startswith(("kv.", BANK))


def axis_sizes(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The free axes' sizes in these inputs' shapes. ValueError: a shape the graph does not take.

    Example: input_ids [1, "N"] given as [1, 5] is {"N": 5}.
    """
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        if is_cache(spec):
            continue
        shape = tuple(shapes[spec.name])
        fits = len(shape) == len(spec.shape) and all(
            size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
            for axis, size in zip(spec.shape, shape, strict=False)
        )
        if not fits:
            raise ValueError(
                f"got {spec.name} of shape {list(shape)}, expected {list(spec.shape)} with {sizes}"
            )
    return sizes


def choose_profile(
    profiles: Sequence[Mapping[str, Sequence[int]]], sizes: Mapping[str, int]
) -> int:
    """The index of the first profile, from narrow to wide, that holds these sizes. ValueError: none
    does."""
    for i, profile in enumerate(profiles):
        if all(profile[axis][0] <= size <= profile[axis][2] for axis, size in sizes.items()):
            return i
    widest = {axis: f"{low} to {high}" for axis, (low, _, high) in profiles[-1].items()}
    raise ValueError(
        f"got rows {dict(sizes)}, the plan was built for {widest}: ask for smaller trees, or "
        "build the bundle again"
    )


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape)


def num_bytes(spec: TensorSpec, profiles: Sequence[Mapping[str, Sequence[int]]]) -> int:
    """Of the largest shape any profile allows."""
    largest = {axis: max(p[axis][2] for p in profiles) for axis in profiles[0]}
    # numpy has no bfloat16
    item = 2 if spec.dtype == "bfloat16" else np.dtype(spec.dtype).itemsize
    return math.prod(shape_of(spec, largest)) * item


_V = TypeVar("_V")


class Recent(Generic[_V]):
    """The values last asked for, at most `limit`; the one unused for longest goes first.

    close: called with each that goes.
    """

    def __init__(self, limit: int, close: Callable[[_V], None]) -> None:
        self._limit, self._close = limit, close
        self._values: OrderedDict[Hashable, _V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _V]) -> _V:
        """The value of `key`, made if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        if len(self._values) >= self._limit:
            self._close(self._values.popitem(last=False)[1])
        self._values[key] = made = make()
        return made

    def clear(self) -> None:
        while self._values:
            self._close(self._values.popitem()[1])


# ------------------------------------------------------------------------------- running


class _Step:
    """One execution context, set up for one profile and one set of shapes and never changed again:
    a CUDA graph is valid only as long as the context it was captured from stays as it was."""

    def __init__(self, context: Any, trt: TensorRT, cuda: Cuda, is_captured: bool) -> None:
        self._context, self._trt, self._cuda = context, trt, cuda
        self._may_capture = is_captured
        self._is_warm = False
        self._executable: Any = None

    def run(self) -> None:
        """The first time enqueued, which finishes TensorRT's own preparations; then captured."""
        if self._executable is None and self._is_warm and self._may_capture:
            self._executable = self._cuda.capture(self._enqueue)
        if self._executable is not None:
            self._cuda.launch(self._executable)
            return
        self._enqueue()
        if not self._is_warm:
            self._is_warm = True
            # TensorRT-RTX can say so itself; TensorRT has no such question
            ask = getattr(self._context, "is_stream_capturable", None)
            self._may_capture = self._may_capture and (ask is None or ask(self._cuda.stream))

    def close(self) -> None:
        if self._executable is not None:
            self._cuda.destroy(self._executable)

    def _enqueue(self) -> None:
        if not self._context.execute_async_v3(self._cuda.stream):
            raise RuntimeError(f"TensorRT does not run: {self._trt.reason}")


class _Buffer(NamedTuple):
    """One input or output: the device's memory and its pinned twin on the host, flat."""

    device: int
    host: np.ndarray


class TensorRTBackend:
    """One engine with its KV buffers, [1, G, capacity, Dh] each, zero-initialised.

    engine: deserialised from `plan`, which was made from `graph`. is_captured: with CUDA graphs.
    """

    def __init__(
        self,
        engine: Any,
        trt: TensorRT,
        graph: Graph,
        plan: Plan,
        capacity: int,
        cuda: Cuda,
        is_captured: bool = True,
    ) -> None:
        self.form, self.capacity = graph.form, capacity
        self._engine, self._trt, self._cuda = engine, trt, cuda
        self._graph, self._profiles, self._is_captured = graph, plan.profiles, is_captured
        check_engine(engine, trt.module, graph, plan, capacity)
        self._allocated: list[int] = []
        self._steps: Recent[_Step] = Recent(MAX_STEPS, _Step.close)
        # registered first: a later allocation may fail
        weakref.finalize(self, _release, cuda, self._steps, self._allocated)
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
        # what the contexts compute in: one for all, as they take turns on one stream
        self._scratch_bytes = int(engine.device_memory_size_v2)
        self._scratch = self._malloc(max(self._scratch_bytes, 1))

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run; the arrays returned are views of pinned memory that the next run writes
        again. ValueError: shapes no profile holds."""
        sizes = axis_sizes(self._graph, {name: feeds[name].shape for name in self._inputs})
        profile = choose_profile(self._profiles, sizes)
        most = {axis: three[-1] for axis, three in self._profiles[profile].items()}
        feeds, wider = pad_rows(self._graph, feeds, sizes, self.capacity, most)
        step = self._steps.get(
            (profile, *sorted(wider.items())), lambda: self._new_step(profile, wider)
        )
        for name in self._inputs:
            buffer, feed = self._buffers[name], feeds[name]
            assert feed.dtype == buffer.host.dtype, (name, feed.dtype, buffer.host.dtype)
            buffer.host[: feed.size] = feed.reshape(-1)
            self._cuda.to_device(buffer.device, buffer.host.ctypes.data, feed.nbytes)
        step.run()
        results = {}
        for name in outputs:
            buffer, shape = self._buffers[name], shape_of(self._outputs[name], sizes)
            # the first rows of what was computed
            flat = buffer.host[: math.prod(shape)]
            self._cuda.to_host(flat.ctypes.data, buffer.device, flat.nbytes)
            results[name] = flat.reshape(shape)
        self._cuda.wait()
        return results

    def _new_step(self, profile: int, sizes: Mapping[str, int]) -> _Step:
        strategy = self._trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise RuntimeError(f"TensorRT makes no execution context: {self._trt.reason}")
        context.set_device_memory(self._scratch, self._scratch_bytes)
        # the stream is ours alone, so what follows on it comes after the switch
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
        return _Step(context, self._trt, self._cuda, self._is_captured)

    def _buffer(self, spec: TensorSpec) -> _Buffer:
        nbytes = num_bytes(spec, self._profiles)
        return _Buffer(self._malloc(nbytes), self._cuda.pinned(nbytes).view(spec.dtype))

    def _malloc(self, nbytes: int) -> int:
        self._allocated.append(self._cuda.malloc(nbytes))
        return self._allocated[-1]


def _release(cuda: Cuda, steps: Recent[_Step], allocated: list[int]) -> None:
    steps.clear()
    for address in allocated:
        cuda.free(address)


def check_engine(engine: Any, module: Any, graph: Graph, plan: Plan, capacity: int) -> None:
    """ValueError unless the engine has the graph's tensors, the plan's profiles and KV buffers of
    `capacity` rows updated in place."""

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


def open_plan(
    bundle: Bundle, graph: Graph, capacity: int, is_captured: bool = True
) -> TensorRTBackend:
    """The backend for one graph of a bundle. ValueError, one line, if this machine cannot run it:
    no plan, TensorRT, GPU or plan for the GPU."""
    if not graph.plans:
        raise ValueError(
            f"got a bundle without a TensorRT plan for {graph.file}, expected one: run spec-export "
            "build --backend tensorrt, or choose --backend onnxruntime"
        )
    trt = import_tensorrt(list(dict.fromkeys(plan.flavour for plan in graph.plans)))
    cuda = open_cuda()
    plan = choose_plan(graph.plans, trt.flavour, trt.version, cuda.compute_capability)
    engine = _deserialise(trt, bundle.file(plan.file))
    # a graph without a cache has no rows to hold: its proposer passes 1
    return TensorRTBackend(engine, trt, graph, plan, capacity, cuda, is_captured)


@cache
def _runtime(trt: TensorRT) -> Any:
    """One for the whole process: no engine may outlive it."""
    return trt.module.Runtime(trt.logger)


def _deserialise(trt: TensorRT, path: Path) -> Any:
    engine = _runtime(trt).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise ValueError(
            f"{trt.flavour} {trt.version} cannot load {path.name}: {trt.reason}; build the bundle "
            "again on this machine"
        )
    return engine
