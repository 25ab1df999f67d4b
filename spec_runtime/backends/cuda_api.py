"""CUDA's runtime API, as far as we use it, and the ways between host and device.

Knows addresses and streams; nothing of graphs, tensors' names or tokens.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

log = logging.getLogger("spec_runtime")


class Cuda:
    """The few calls of CUDA's runtime API we need, on one stream of the first device.

    api: cuda.bindings.runtime. ValueError: there is no device. RuntimeError: a call failed.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        error, count = api.cudaGetDeviceCount()
        if int(error) or not count:
            reason = f" ({self._explain(error)})" if int(error) else ""
            raise ValueError(
                f"got no CUDA device{reason}, expected an NVIDIA GPU and its driver: install "
                "them, or choose --backend onnxruntime"
            )
        kinds = api.cudaDeviceAttr
        major, minor = (
            self._call("cudaDeviceGetAttribute", kind, 0)
            for kind in (
                kinds.cudaDevAttrComputeCapabilityMajor,
                kinds.cudaDevAttrComputeCapabilityMinor,
            )
        )
        self.compute_capability = f"{major}.{minor}"
        # not the default stream, on which nothing can be captured
        self._stream = self._call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        self.stream = int(self._stream)

    @classmethod
    def open(cls) -> Cuda:
        """On the real API. ValueError: it is not installed, or there is no device."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise ValueError(
                f"CUDA's Python bindings are not installed ({error}): run "
                "pip install 'specsplit[tensorrt]' or pip install cuda-bindings"
            ) from None
        return cls(runtime)

    def malloc(self, nbytes: int) -> int:
        """The address of device memory."""
        return int(self._call("cudaMalloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def pinned(self, nbytes: int) -> np.ndarray:
        """Pinned host memory i8[nbytes], freed with the last view of it."""
        address = int(self._call("cudaMallocHost", nbytes))
        memory = (ctypes.c_byte * nbytes).from_address(address)
        weakref.finalize(memory, self._call, "cudaFreeHost", address)
        return np.ctypeslib.as_array(memory)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def to_device(self, device: int, host: int, nbytes: int) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", device, host, nbytes, kind, self._stream)

    def to_host(self, host: int, device: int, nbytes: int) -> None:
        kind = self._api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host, device, nbytes, kind, self._stream)

    def wait(self) -> None:
        """Until everything on the stream is done."""
        self._call("cudaStreamSynchronize", self._stream)

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """What `enqueue` puts on the stream, as an executable graph; it is not run."""
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)
        try:
            enqueue()
        finally:
            graph = self._call("cudaStreamEndCapture", self._stream)
        executable = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        return executable

    def launch(self, executable: Any) -> None:
        self._call("cudaGraphLaunch", executable, self._stream)

    def destroy(self, executable: Any) -> None:
        self._call("cudaGraphExecDestroy", executable)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._api, name)(*arguments)
        if int(error):
            raise RuntimeError(f"{name}: {self._explain(error)}")
        return values[0] if values else None

    def _explain(self, error: Any) -> str:
        text = self._api.cudaGetErrorString(error)[1]
        return text.decode() if isinstance(text, bytes) else str(text)


@cache
def open_cuda() -> Cuda:
    """One for the whole process: all graphs run on its stream."""
    return Cuda.open()


# ------------------------------------------------------------------------------- copies

# of what is fetched
TYPES = {
    **{"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"},
    **{"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"},
}


class Copies:
    """Between the host and ONNX Runtime's values on a device by its own calls, each of which waits
    until it is done."""

    @property
    def settings(self) -> dict[str, str]:
        """Provider options of the sessions that compute on these values."""
        return {}

    @property
    def waits(self) -> bool:
        """Whether a run has to be waited for where it ends."""
        return True

    def host(self, nbytes: int) -> np.ndarray:
        """Memory u8[nbytes] to send from."""
        return np.zeros(nbytes, np.uint8)

    def send(self, memory: np.ndarray, value: Any) -> int:
        """Fills the value [nbytes] with all of it; returns what to `claim` it by."""
        value.update_inplace(memory)
        return 0

    def claim(self, ticket: int) -> None:
        """Before memory is written again that was sent."""

    def fetch(self, values: Sequence[Any], landing: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Their content, until `landing` is passed again: room that the caller keeps for us."""
        return [value.numpy() for value in values]

    def settle(self) -> None:
        """Until all is done that was sent and run."""


class StreamCopies(Copies):
    """By way of pinned memory, on one stream with all runs of all sessions that share buffers: what
    is sent, run and fetched is in order without waiting; the host waits once, for what it reads."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._num_waits = 0
        self._is_idle = True

    @property
    def settings(self) -> dict[str, str]:
        return {"user_compute_stream": str(self._cuda.stream)}

    @property
    def waits(self) -> bool:
        return False

    def host(self, nbytes: int) -> np.ndarray:
        return self._cuda.pinned(nbytes).view(np.uint8)

    def send(self, memory: np.ndarray, value: Any) -> int:
        self._cuda.to_device(value.data_ptr(), memory.ctypes.data, memory.nbytes)
        self._is_idle = False
        return self._num_waits

    def claim(self, ticket: int) -> None:
        if ticket == self._num_waits:
            self.settle()

    def fetch(self, values: Sequence[Any], landing: dict[int, np.ndarray]) -> list[np.ndarray]:
        found = []
        for value in values:
            address = value.data_ptr()
            if address not in landing:
                dtype = TYPES[value.data_type()]
                count = int(np.prod(value.shape()))
                memory = self.host(max(count, 1) * np.dtype(dtype).itemsize)
                landing[address] = memory.view(dtype)[:count].reshape(value.shape())
            array = landing[address]
            self._cuda.to_host(array.ctypes.data, address, array.nbytes)
            found.append(array)
        if found:
            self._is_idle = False
            self.settle()
        return found

    def settle(self) -> None:
        if not self._is_idle:
            self._cuda.wait()
            self._num_waits += 1
            self._is_idle = True


def open_copies(device: str) -> Copies:
    """For sessions on a device: on a stream of their own if CUDA's Python bindings are there."""
    if device == "cuda":
        try:
            return StreamCopies(Cuda.open())
        except (ValueError, RuntimeError) as error:  # if there is no GPU, the session says so
            log.debug("no stream is shared: %s", error)
    return Copies()
