"""Calls the part of CUDA's runtime API that we use: memory, copies, one stream, captured graphs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np

from spec_runtime.backends.cuda.captures import free_later
from spec_runtime.errors import DeviceLostError, OutOfMemoryError, UserError
from spec_runtime.files.installed import install, program

NO_MEMORY = 2  # cudaErrorMemoryAllocation
OF_CAPTURES = range(900, 911)  # cudaErrorStreamCapture…, which end with the capture


class Cuda:
    """CUDA's runtime API on one stream of the first device.

    `api` is the module cuda.bindings.runtime. Raises UserError if there is no device. Every call
    raises OutOfMemoryError if there is no room, RuntimeError if it disturbs a capture, and
    DeviceLostError if it fails otherwise.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        error, count = api.cudaGetDeviceCount()
        if int(error) or not count:
            reason = f" ({self._explain(error)})" if int(error) else ""
            raise UserError(
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
        # A stream of our own: nothing can be captured on the default stream.
        self._stream = self._call("cudaStreamCreateWithFlags", api.cudaStreamNonBlocking)
        self.stream = int(self._stream)
        # Looked up once, for every run makes these calls.
        self._copy, self._synchronize = api.cudaMemcpyAsync, api.cudaStreamSynchronize
        self._to_device = api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = api.cudaMemcpyKind.cudaMemcpyDeviceToHost

    @property
    def free_bytes(self) -> int:
        """Returns how much of the device's memory nobody has."""
        return int(self._call("cudaMemGetInfo"))

    @classmethod
    def open(cls) -> Cuda:
        """Opens the real API. Raises UserError if it is not installed or there is no device."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise UserError(
                f"CUDA's Python bindings are not installed ({error}): run "
                f"{install('gpu')} or {program('pip')} install cuda-bindings"
            ) from None
        return cls(runtime)

    def malloc(self, nbytes: int) -> int:
        """Allocates device memory and returns its address."""
        return int(self._call("cudaMalloc", nbytes))

    def free(self, address: int) -> None:
        """Frees device memory, once no thread captures."""
        free_later(partial(self._call, "cudaFree", address))

    def pinned(self, nbytes: int) -> np.ndarray:
        """Returns pinned host memory i8[nbytes], freed with the last view of it."""
        address = int(self._call("cudaMallocHost", nbytes))
        memory = (ctypes.c_byte * nbytes).from_address(address)
        weakref.finalize(memory, free_later, partial(self._call, "cudaFreeHost", address))
        return np.ctypeslib.as_array(memory)

    def zero(self, address: int, nbytes: int) -> None:
        self._call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def to_device(self, device: int, host: int, nbytes: int) -> None:
        (error,) = self._copy(device, host, nbytes, self._to_device, self._stream)
        if int(error):
            self._fail("cudaMemcpyAsync", error)

    def to_host(self, host: int, device: int, nbytes: int) -> None:
        (error,) = self._copy(host, device, nbytes, self._to_host, self._stream)
        if int(error):
            self._fail("cudaMemcpyAsync", error)

    def wait(self) -> None:
        """Waits until everything on the stream is done."""
        (error,) = self._synchronize(self._stream)
        if int(error):
            self._fail("cudaStreamSynchronize", error)

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """Returns what `enqueue` puts on the stream as an executable graph, without running it."""
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
        free_later(partial(self._call, "cudaGraphExecDestroy", executable))

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._api, name)(*arguments)
        if int(error):
            self._fail(name, error)
        return values[0] if values else None

    def _fail(self, name: str, error: Any) -> NoReturn:
        message = f"{name}: {self._explain(error)}"
        if int(error) == NO_MEMORY:
            raise OutOfMemoryError("on the GPU", message)
        raise (RuntimeError if int(error) in OF_CAPTURES else DeviceLostError)(message)

    def _explain(self, error: Any) -> str:
        text = self._api.cudaGetErrorString(error)[1]
        return text.decode() if isinstance(text, bytes) else str(text)


@cache
def open_cuda() -> Cuda:
    """Returns the one whose stream all TensorRT graphs of this process share."""
    return Cuda.open()
