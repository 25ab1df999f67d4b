"""Puts CUDA's calls on the host's memory, and ONNX Runtime's real CPU provider under our CUDA code.

The stand-in in tests/cuda_standin runs the CUDA provider itself, but computes nothing. Here every
number is right, so that tests can compare answers. `HostCuda` has the calls of
cuda.bindings.runtime that we make. A stream does its work only when somebody waits for it, new
memory is full of junk and so is what was freed: who reads or writes at the wrong time gets other
tokens. `install` has sessions on CUDA compute on the CPU, in the order of that stream.
"""

import ctypes
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from spec_runtime.backends import session
from spec_runtime.backends.cuda import backend
from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.copies import StreamCopies
from spec_runtime.loop.kv import Cache
from spec_runtime.pace import warm_up

CAPABILITY = "8.9"
CAPTURING, FULL, NO_DEVICE = 900, 2, 35  # cudaError_t
JUNK = 0xAB
HOST, DEVICE = "host", "device"


class HostCuda:
    """The functions of cuda.bindings.runtime that we call; each returns (error, values…).

    `memory` holds what is allocated, by address: where it is, and the block. `counts` counts
    runs, moves of rows, captures, launches, and copies by direction with their bytes; `bound` has
    the shapes that
    ONNX Runtime was given, by input. Without a `capability` there is no GPU; `is_full` leaves no
    room on it.
    """

    cudaStreamNonBlocking = 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice="up", cudaMemcpyDeviceToHost="down")
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
    cudaDeviceAttr = SimpleNamespace(
        cudaDevAttrComputeCapabilityMajor=0, cudaDevAttrComputeCapabilityMinor=1
    )

    def __init__(self, capability: str | None = CAPABILITY) -> None:
        self.capability, self.is_full, self.free_bytes = capability, False, 1 << 40
        self.memory: dict[int, tuple[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.bound: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
        self.queues: defaultdict[int, list[Callable[[], object]]] = defaultdict(list)  # by stream
        self.recorded: list[Callable[[], object]] | None = None  # while capturing
        self.graphs: list[list[Callable[[], object]]] = []

    @property
    def is_busy(self) -> bool:
        """Returns whether a stream has work that nobody has waited for."""
        return any(self.queues.values())

    def put(self, stream: int, work: Callable[[], object]) -> None:
        """Puts work on a stream, or into the graph that is being captured."""
        (self.queues[stream] if self.recorded is None else self.recorded).append(work)

    def require(self, where: str, address: int, num_bytes: int) -> None:
        """Asserts that these bytes lie in one allocation there."""
        for base, (place, block) in self.memory.items():
            if place == where and base <= address and address + num_bytes <= base + len(block):
                return
        raise AssertionError(f"{num_bytes} bytes at {address} are not on the {where}")

    def cudaGetDeviceCount(self) -> tuple[int, int | None]:
        return (NO_DEVICE, None) if self.capability is None else (0, 1)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, {NO_DEVICE: b"CUDA driver version is insufficient"}.get(
            error, b"error %d" % error
        )

    def cudaDeviceGetAttribute(self, kind: int, device: int) -> tuple[int, int]:
        assert self.capability is not None
        return 0, int(self.capability.split(".")[kind])

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(name=b"NVIDIA GeForce RTX 4090")

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        self.queues[stream := len(self.queues) + 1] = []
        return 0, stream

    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        return 0, self.free_bytes, 1 << 40

    def cudaMalloc(self, num_bytes: int) -> tuple[int, int]:
        return self._allocate(DEVICE, num_bytes)

    def cudaMallocHost(self, num_bytes: int) -> tuple[int, int]:
        return self._allocate(HOST, num_bytes)

    def _allocate(self, where: str, num_bytes: int) -> tuple[int, int]:
        if self.recorded is not None or (self.is_full and where == DEVICE):
            return CAPTURING if self.recorded is not None else FULL, 0
        block = (ctypes.c_byte * num_bytes)()
        address = ctypes.addressof(block)
        ctypes.memset(address, JUNK, num_bytes)
        self.memory[address] = where, block
        return 0, address

    def cudaFree(self, address: int) -> tuple[int]:
        _, block = self.memory.pop(address)
        ctypes.memset(address, JUNK, len(block))
        return (0,)

    cudaFreeHost = cudaFree

    def cudaMemsetAsync(self, address: int, byte: int, num_bytes: int, stream: int) -> tuple[int]:
        self.require(DEVICE, address, num_bytes)
        self.put(stream, lambda: ctypes.memset(address, byte, num_bytes))
        return (0,)

    def cudaMemcpyAsync(
        self, to: int, source: int, num_bytes: int, kind: str, stream: int
    ) -> tuple[int]:
        self.require(HOST, source if kind == "up" else to, num_bytes)
        self.counts.update({kind: 1, f"bytes {kind}": num_bytes})
        self.put(stream, lambda: ctypes.memmove(to, source, num_bytes))
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        if self.recorded is not None:
            return (CAPTURING,)
        queue = self.queues[stream]
        while queue:
            queue.pop(0)()
        return (0,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.recorded = []
        return (0,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        graph, self.recorded = self.recorded, None
        return 0, graph

    def cudaGraphInstantiate(self, graph: list[Any], flags: int) -> tuple[int, Any]:
        self.counts["captured"] += 1
        self.graphs.append(list(graph))
        return 0, self.graphs[-1]

    def cudaGraphDestroy(self, graph: list[Any]) -> tuple[int]:
        graph.clear()  # the executable has its own
        return (0,)

    def cudaGraphExecDestroy(self, executable: list[Any]) -> tuple[int]:
        self.graphs = [each for each in self.graphs if each is not executable]
        return (0,)

    def cudaGraphLaunch(self, executable: list[Any], stream: int) -> tuple[int]:
        self.counts["launched"] += 1
        self.queues[stream] += executable
        return (0,)


def view(address: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Returns memory at an address as an array."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = (ctypes.c_byte * num_bytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def step_feeds(cache: Cache, tokens: list[int], parents: list[int]) -> dict[str, np.ndarray]:
    """Returns the feeds of a target for a tree of tokens, all of whose logits are wanted."""
    feeds = cache.place(np.array(parents, np.int64))
    feeds["input_ids"] = np.array(tokens, np.int64)[None]
    feeds["logit_rows"] = np.arange(len(tokens), dtype=np.int64)
    return feeds


# ---- ONNX Runtime ----


class HostSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that computes on the CPU, on the stream of `cuda` if it was opened for CUDA."""

    cuda: HostCuda  # of the subclass that `install` makes

    def __init__(
        self,
        model: Any,
        options: Any = None,
        providers: Any = None,
        provider_options: Any = None,
        **more: Any,
    ) -> None:
        self.settings: dict[str, str] | None = None
        self.kind = "moved" if isinstance(model, bytes) else "eager"  # session.RowMoves'
        if providers == [session.PROVIDERS["cuda"]]:
            self.settings = provider_options[0]
            providers, provider_options = [session.PROVIDERS["cpu"]], None
        super().__init__(model, options, providers, provider_options, **more)

    def get_providers(self) -> list[str]:
        return (
            super().get_providers()
            if self.settings is None
            else [*session.PROVIDERS.values()][::-1]
        )

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {session.PROVIDERS["cuda"]: self.settings or {}}

    def run_with_iobinding(self, binding: Any, run_options: Any = None) -> None:
        if self.settings is None:
            super().run_with_iobinding(binding, run_options)
            return
        assert run_options.get_run_config_entry("gpu_graph_id") == session.NO_GRAPH
        self.cuda.counts[self.kind] += self.cuda.recorded is None
        run = super().run_with_iobinding
        self.cuda.put(int(self.settings["user_compute_stream"]), lambda: run(binding, None))


def install(patch: pytest.MonkeyPatch) -> HostCuda:
    """Has the CUDA backend run here; returns what its streams and its memory are."""
    cuda = HostCuda()
    host = {"cuda": "cpu", "cpu": "cpu"}
    value, binding = ort.OrtValue, ort.IOBinding
    real = {name: getattr(value, name) for name in ("numpy", "update_inplace")}
    from_shape, from_numpy = value.ortvalue_from_shape_and_type, value.ortvalue_from_numpy
    bind_input, bind_output = binding.bind_input, binding.bind_output

    def shaped(shape: Any, kind: Any, device: str = "cpu", number: int = 0) -> Any:
        made = from_shape(shape, kind, host[device], number)
        ctypes.memset(made.data_ptr(), JUNK, made.tensor_size_in_bytes())
        return made

    def waiting(name: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            assert not cuda.is_busy, "it would not wait for our stream"
            if name == "numpy":
                cuda.counts["bytes down"] += self.tensor_size_in_bytes()
            return real[name](self, *arguments)

        return call

    def bind(
        self: Any, name: str, device: str, number: int, kind: Any, shape: Any, at: int
    ) -> None:
        if device == "cuda":
            cuda.bound[name].append(tuple(shape))
        bind_input(self, name, host[device], number, kind, shape, at)

    patch.setattr(value, "ortvalue_from_shape_and_type", staticmethod(shaped))
    patch.setattr(
        *(value, "ortvalue_from_numpy"),
        staticmethod(lambda array, device="cpu", number=0: from_numpy(array, host[device], number)),
    )
    for name in real:
        patch.setattr(value, name, waiting(name))
    patch.setattr(binding, "bind_input", bind)
    patch.setattr(
        *(binding, "bind_output"),
        lambda b, n, device="cpu", *m: bind_output(b, n, host[device], *m),
    )
    patch.setattr(ort, "InferenceSession", type("HostSession", (HostSession,), {"cuda": cuda}))
    patch.setattr(ort, "get_available_providers", lambda: [*session.PROVIDERS.values()])
    patch.setattr(session, "require_gpu", lambda: None)
    patch.setattr(warm_up, "capture_shapes", lambda engine: None)  # which takes its time
    patch.setattr(backend, "open_copies", lambda: StreamCopies(Cuda(cuda)))
    return cuda
