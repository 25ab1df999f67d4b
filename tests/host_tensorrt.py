"""Imitates TensorRT's runtime over `HostCuda`, for plans run only on a GPU.

TensorRT-RTX really parses graphs and builds plans without one (export/test_tensorrt_plans.py);
nothing but this stands in for the engines and contexts that our backend drives. An engine runs its
graph on ONNX Runtime, at the addresses and shapes that its context was given when the work was put
on the stream. What the real ones leave undefined is an error.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import onnxruntime as ort
from host_cuda import CAPABILITY, DEVICE, HostCuda, view

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.shapes import shape_of
from spec_runtime.backends.tensorrt.api import DTYPES, TensorRT
from spec_runtime.bundle.manifest import Graph

FLAVOUR, VERSION = "tensorrt_rtx", "1.7.1.116"
MODULE = SimpleNamespace(
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
    DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
    CudaGraphStrategy=SimpleNamespace(DISABLED="disabled"),
    ComputeCapability=SimpleNamespace(__members__={"NONE": 0, "SM80": 1, "SM89": 2}),
)


@cache
def _session(path: Path) -> ort.InferenceSession:
    """Opens a graph once, since nothing of a run is left in its session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])


class Engine:
    """An engine, deserialised from the plan of `graph`, whose file is at `path`."""

    device_memory_size_v2 = 1000

    def __init__(self, path: Path, graph: Graph, cuda: HostCuda) -> None:
        self.session = _session(path)
        self.graph, self.profiles, self.cuda = graph, graph.plans[0].profiles, cuda
        self.specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        self.num_io_tensors = len(self.specs)
        self.num_optimization_profiles = len(self.profiles)
        self.is_capturable = True

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        dtype = self.specs[name].dtype
        return SimpleNamespace(name=next(real for real, ours in DTYPES.items() if ours == dtype))

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = self.profiles[profile]
        spec = self.specs[name]
        return [shape_of(spec, {a: three[i] for a, three in sizes.items()}) for i in range(3)]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removesuffix(".out") if name.startswith("kv.") else None

    def create_runtime_config(self) -> "IRuntimeConfig":
        return IRuntimeConfig()

    def create_execution_context(self, *, runtime_config: "IRuntimeConfig") -> "Context":
        assert runtime_config.strategy == "user managed", "a built-in one cannot be captured"
        return Context(self, runtime_config)


class IRuntimeConfig:
    """A configuration of contexts."""

    def __init__(self) -> None:
        self.strategy = "static"
        self.cuda_graph_strategy = "whole graph"
        self.dynamic_shapes_kernel_specialization_strategy = "lazy"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class Context:
    """An execution context. A graph captured from it holds until it is changed."""

    def __init__(self, engine: Engine, config: IRuntimeConfig) -> None:
        self.engine, self._config = engine, config
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._profile: int | None = None
        self._has_memory = False

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.is_capturable

    def set_device_memory(self, address: int, num_bytes: int) -> None:
        assert num_bytes >= self.engine.device_memory_size_v2, num_bytes
        self.engine.cuda.require(DEVICE, address, num_bytes)
        self._has_memory = True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return profile < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._profile is None:
            return False
        least, _, most = self.engine.get_tensor_profile_shape(name, self._profile)
        self._shapes[name] = tuple(shape)
        return all(low <= n <= high for low, n, high in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return name in self.engine.specs

    def execute_async_v3(self, stream: int) -> bool:
        engine, cuda = self.engine, self.engine.cuda
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        assert set(addresses) == set(engine.specs), "a tensor without an address"
        assert self._has_memory, "no device memory"
        for spec in engine.graph.inputs:
            if spec.name.startswith("kv."):
                assert addresses[spec.name] == addresses[f"{spec.name}.out"], "not in place"
                shapes[spec.name] = tuple(int(size) for size in spec.shape)
        assert self._config.cuda_graph_strategy == "disabled", "a capture in a capture"
        strategy = self._config.dynamic_shapes_kernel_specialization_strategy
        assert strategy == "eager", "captures general kernels"
        cuda.counts["enqueued"] += cuda.recorded is None
        names = [output.name for output in engine.session.get_outputs()]

        def work() -> None:
            assert (self._shapes.items() <= shapes.items(), self._addresses) == (True, addresses)
            feeds = {}
            for spec in engine.graph.inputs:
                array = view(addresses[spec.name], shapes[spec.name], spec.dtype)
                cuda.require(DEVICE, addresses[spec.name], array.nbytes)
                feeds[spec.name] = array.copy()
            for name, array in zip(names, engine.session.run(names, feeds), strict=True):
                cuda.require(DEVICE, addresses[name], array.nbytes)
                view(addresses[name], array.shape, str(array.dtype))[:] = array

        cuda.put(stream, work)
        return True


def tensorrt() -> TensorRT:
    """Returns what import_tensorrt would have found."""
    return TensorRT(MODULE, FLAVOUR, VERSION, SimpleNamespace(errors=[]))


def cuda(capability: str | None = CAPABILITY) -> tuple[Cuda, HostCuda]:
    """Returns our wrapper of CUDA, and what is under it."""
    host = HostCuda(capability)
    return Cuda(host), host
