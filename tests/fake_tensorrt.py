"""Imitates CUDA and TensorRT over host memory, to test the order of calls.

Whatever the real ones leave undefined or refuse is an error here. A stream does its work only when
waited for, new memory is full of junk, and an engine runs its ONNX file on ONNX Runtime, reading
and writing at the addresses it was given. Classes and methods have the names of the real ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.shapes import shape_of
from spec_runtime.backends.tensorrt.api import DTYPES, TensorRT
from spec_runtime.bundle.manifest import Graph, Plan
from spec_runtime.loop.kv import Cache

FLAVOUR, VERSION, CAPABILITY = "tensorrt_rtx", "1.7.1.116", "8.9"
GPU_NAME = b"NVIDIA GeForce RTX 4090"
STREAM = 77
INVALID, CAPTURING = 1, 900  # cudaErrorInvalidValue, cudaErrorStreamCaptureUnsupported


class Runtime:
    """A fake of cuda.bindings.runtime, whose functions return (error, values…)."""

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76
    )

    def __init__(self, capability: str | None = CAPABILITY) -> None:
        self.capability = capability
        self.device: dict[int, Any] = {}  # address -> memory
        self.host: dict[int, Any] = {}
        self.executables: list[list[Callable[[], object]]] = []
        self.num_captured = self.num_launched = self.num_enqueued = 0
        self.num_to_device = self.num_to_host = self.bytes_to_host = self.num_compiled = 0
        self.recorded: list[Callable[[], object]] | None = None  # while capturing
        self._queue: list[Callable[[], object]] = []

    @property
    def is_busy(self) -> bool:
        """Returns whether work is on the stream that nobody has waited for."""
        return bool(self._queue)

    def put(self, work: Callable[[], object]) -> None:
        """Puts work on the stream, or into the graph that is being captured."""
        (self._queue if self.recorded is None else self.recorded).append(work)

    def holds(self, memory: dict[int, Any], address: int, nbytes: int) -> bool:
        """Returns whether `nbytes` from an address lie in one allocation."""
        return any(
            base <= address and address + nbytes <= base + len(block)
            for base, block in memory.items()
        )

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return (35, None) if self.capability is None else (0, 1)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, {35: b"CUDA driver version is insufficient"}.get(error, b"error %d" % error)

    def cudaDeviceGetAttribute(self, kind: int, device: int) -> tuple[int, int]:
        assert self.capability is not None
        return 0, int(self.capability.split(".")[kind - 75])

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(name=GPU_NAME)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, STREAM

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        return self._allocate(self.device, nbytes)

    def cudaMallocHost(self, nbytes: int) -> tuple[int, int]:
        return self._allocate(self.host, nbytes)

    def cudaFree(self, address: int) -> tuple[int]:
        return (0 if self.device.pop(address, None) is not None else INVALID,)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        return (0 if self.host.pop(address, None) is not None else INVALID,)

    def cudaMemsetAsync(self, address: int, byte: int, nbytes: int, stream: int) -> tuple[int]:
        if stream != STREAM or not self.holds(self.device, address, nbytes):
            return (INVALID,)
        self.put(lambda: ctypes.memset(address, byte, nbytes))
        return (0,)

    def cudaMemcpyAsync(
        self, to: int, source: int, nbytes: int, kind: int, stream: int
    ) -> tuple[int]:
        down = kind == self.cudaMemcpyKind.cudaMemcpyDeviceToHost
        is_there = self.holds(self.host if down else self.device, to, nbytes) and self.holds(
            self.device if down else self.host, source, nbytes
        )
        if stream != STREAM or not is_there:
            return (INVALID,)
        self.num_to_host += down
        self.num_to_device += not down
        self.bytes_to_host += nbytes * down
        self.put(lambda: ctypes.memmove(to, source, nbytes))
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        if self.recorded is not None:
            return (CAPTURING,)
        queue, self._queue = self._queue, []
        for work in queue:
            work()
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        if self.recorded is not None or stream != STREAM:
            return (CAPTURING,)
        self.recorded = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        graph, self.recorded = self.recorded, None
        return (INVALID, None) if graph is None else (0, graph)

    def cudaGraphInstantiate(self, graph: list[Any], flags: int) -> tuple[int, Any]:
        self.num_captured += 1
        self.executables.append(list(graph))
        return 0, self.executables[-1]

    def cudaGraphDestroy(self, graph: list[Any]) -> tuple[int]:
        graph.clear()  # the executable has its own
        return (0,)

    def cudaGraphExecDestroy(self, executable: list[Any]) -> tuple[int]:
        self.executables = [each for each in self.executables if each is not executable]
        return (0,)

    def cudaGraphLaunch(self, executable: list[Any], stream: int) -> tuple[int]:
        if stream != STREAM or not any(each is executable for each in self.executables):
            return (INVALID,)
        self.num_launched += 1
        for work in executable:
            self.put(work)
        return (0,)

    def _allocate(self, memory: dict[int, Any], nbytes: int) -> tuple[int, int]:
        if self.recorded is not None:
            return CAPTURING, 0
        block = (ctypes.c_byte * nbytes)()
        address = ctypes.addressof(block)
        ctypes.memset(address, 0xAB, nbytes)
        memory[address] = block
        return 0, address


def view(address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_byte * nbytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class Engine:
    """A fake engine, deserialised from a plan of `graph`."""

    device_memory_size_v2 = 1000

    def __init__(self, path: Path, graph: Graph, plan: Plan, runtime: Runtime) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.graph, self.plan, self.runtime = graph, plan, runtime
        self.specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        self.num_io_tensors = len(self.specs)
        self.num_optimization_profiles = len(plan.profiles)
        self.is_capturable = True

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        names = {numpy_name: name for name, numpy_name in DTYPES.items()}
        return SimpleNamespace(name=names[self.specs[name].dtype])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = self.plan.profiles[profile]
        return [
            shape_of(self.specs[name], {axis: three[i] for axis, three in sizes.items()})
            for i in range(3)
        ]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removesuffix(".out") if name.startswith("kv.") else None

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(
        self, strategy: str | None = None, *, runtime_config: IRuntimeConfig | None = None
    ) -> Context:
        if runtime_config is not None:  # TensorRT-RTX
            assert strategy is None, "one signature or the other"
            strategy = runtime_config.strategy
        assert strategy == "user managed", "a built-in allocation cannot be captured"
        assert self.runtime.recorded is None, "made while capturing"
        return Context(self, runtime_config)


class IRuntimeCache:
    """A fake cache of compiled kernels, one for each set of shapes."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def serialize(self) -> memoryview:
        return memoryview(b"kernels\n" + "\n".join(sorted(self.kernels)).encode())

    def deserialize(self, blob: bytes) -> bool:
        first, *kernels = blob.decode().split("\n")
        if first == "kernels":
            self.kernels = set(kernels)
        return first == "kernels"


class IRuntimeConfig:
    """A fake configuration of contexts; it takes no other attributes than the real one."""

    __slots__ = (
        "cache",
        "cuda_graph_strategy",
        "dynamic_shapes_kernel_specialization_strategy",
        "strategy",
    )

    def __init__(self) -> None:
        self.cache: IRuntimeCache | None = None
        self.strategy = "static"
        self.cuda_graph_strategy = "disabled"
        self.dynamic_shapes_kernel_specialization_strategy = "lazy"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self.cache = cache
        return True


class Context:
    """An execution context; a graph captured from it holds until it is changed."""

    def __init__(self, engine: Engine, config: IRuntimeConfig | None) -> None:
        self.engine = engine
        self._config = config
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._profile: int | None = None
        self._has_memory = False
        self._version = 0  # counts changes
        self._warm_version: int | None = None  # at the last enqueue

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.is_capturable and stream == STREAM

    def set_device_memory(self, address: int, nbytes: int) -> None:
        assert nbytes >= self.engine.device_memory_size_v2, nbytes
        assert self.engine.runtime.holds(self.engine.runtime.device, address, nbytes)
        self._has_memory = True
        self._version += 1

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        self._version += 1
        return stream == STREAM and profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._profile is None:
            return False
        least, _, largest = self.engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = tuple(shape)
        self._version += 1
        return len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, largest, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        self._version += 1
        return name in self.engine.specs

    def execute_async_v3(self, stream: int) -> bool:
        engine, runtime = self.engine, self.engine.runtime
        shapes, addresses, version = dict(self._shapes), dict(self._addresses), self._version
        assert set(addresses) == set(engine.specs), "a tensor without an address"
        assert self._has_memory, "no device memory"
        assert stream == STREAM
        for spec in engine.graph.inputs:
            if spec.name.startswith("kv."):
                assert addresses[spec.name] == addresses[f"{spec.name}.out"], "not in place"
                shapes[spec.name] = tuple(int(size) for size in spec.shape)
            assert spec.name in shapes, f"no shape for {spec.name}"
        if runtime.recorded is not None:
            assert self._warm_version == version, "captured before an enqueue of these shapes"
        if self._config is not None:
            self._compile(self._config, shapes)
        runtime.num_enqueued += runtime.recorded is None
        self._warm_version = version
        names = [output.name for output in engine.session.get_outputs()]

        def work() -> None:
            assert self._version == version, "the context was changed after it was captured"
            feeds = {}
            for spec in engine.graph.inputs:
                array = view(addresses[spec.name], shapes[spec.name], spec.dtype)
                assert runtime.holds(runtime.device, addresses[spec.name], array.nbytes), spec
                feeds[spec.name] = array.copy()
            for name, array in zip(names, engine.session.run(names, feeds), strict=True):
                assert runtime.holds(runtime.device, addresses[name], array.nbytes), name
                view(addresses[name], array.shape, str(array.dtype))[:] = array

        runtime.put(work)
        return True

    def _compile(self, config: IRuntimeConfig, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compiles the kernels of these shapes, if that is not done yet."""
        runtime, cache = self.engine.runtime, config.cache
        if runtime.recorded is not None:
            assert config.cuda_graph_strategy == "disabled", "a capture in a capture"
            assert config.dynamic_shapes_kernel_specialization_strategy == "eager", (
                "captured general kernels"
            )
        assert cache is not None
        kernel = f"{self._profile} {sorted(shapes.items())}"
        runtime.num_compiled += kernel not in cache.kernels
        cache.kernels.add(kernel)


def tensorrt() -> TensorRT:
    """Returns what import_tensorrt would have found."""
    module = SimpleNamespace(
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        CudaGraphStrategy=SimpleNamespace(DISABLED="disabled"),
        ComputeCapability=SimpleNamespace(__members__={"NONE": 0, "SM80": 1, "SM89": 2}),
    )
    return TensorRT(module, FLAVOUR, VERSION, SimpleNamespace(errors=[]))


def cuda(capability: str | None = CAPABILITY) -> tuple[Cuda, Runtime]:
    """Returns our wrapper and the fake under it."""
    runtime = Runtime(capability)
    return Cuda(runtime), runtime


def step_feeds(cache: Cache, tokens: list[int], parents: list[int]) -> dict[str, np.ndarray]:
    """Returns the feeds of a target for a tree of tokens, all of whose logits are wanted."""
    feeds = cache.place(np.array(parents, np.int64))
    feeds["input_ids"] = np.array(tokens, np.int64)[None]
    feeds["logit_rows"] = np.arange(len(tokens), dtype=np.int64)
    return feeds
