"""Imitates cuda.bindings.runtime over the stand-in's libcudart: the calls that spec_runtime makes.

A build makes this file the module cuda.bindings.runtime. As in the real module, every function
returns a tuple: the error, then what the call of C returns through pointers.
"""

import ctypes
import enum
from typing import Any

_cudart = ctypes.CDLL("libcudart.so.13")
_cudart.cudaGetErrorString.restype = ctypes.c_char_p

cudaStreamDefault = 0
cudaStreamNonBlocking = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901
    cudaErrorStreamCaptureImplicit = 906


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class cudaStreamCaptureMode(enum.IntEnum):
    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrMultiProcessorCount = 16
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


def _call(name: str, *arguments: Any) -> tuple[cudaError_t]:
    return (cudaError_t(getattr(_cudart, name)(*arguments)),)


def _call_for(result: Any, name: str, *arguments: Any) -> tuple[cudaError_t, int]:
    """Calls a function that returns something through a pointer, its first argument."""
    error = getattr(_cudart, name)(ctypes.byref(result), *arguments)
    return cudaError_t(error), result.value or 0


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(address))


# ---- the device, and errors ----


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    return _call_for(ctypes.c_int(), "cudaGetDeviceCount")


def cudaDeviceGetAttribute(attribute: cudaDeviceAttr, device: int) -> tuple[cudaError_t, int]:
    return _call_for(ctypes.c_int(), "cudaDeviceGetAttribute", int(attribute), device)


def cudaGetErrorString(error: int) -> tuple[cudaError_t, bytes]:
    return cudaError_t.cudaSuccess, _cudart.cudaGetErrorString(int(error))


# ---- memory ----


def cudaMemGetInfo() -> tuple[cudaError_t, int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    error = _cudart.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    return cudaError_t(error), free.value, total.value


def cudaMalloc(nbytes: int) -> tuple[cudaError_t, int]:
    return _call_for(ctypes.c_void_p(), "cudaMalloc", ctypes.c_size_t(nbytes))


def cudaFree(address: int) -> tuple[cudaError_t]:
    return _call("cudaFree", _pointer(address))


def cudaMallocHost(nbytes: int) -> tuple[cudaError_t, int]:
    return _call_for(ctypes.c_void_p(), "cudaMallocHost", ctypes.c_size_t(nbytes))


def cudaFreeHost(address: int) -> tuple[cudaError_t]:
    return _call("cudaFreeHost", _pointer(address))


def cudaMemcpy(to: int, source: int, nbytes: int, kind: cudaMemcpyKind) -> tuple[cudaError_t]:
    return _call("cudaMemcpy", _pointer(to), _pointer(source), ctypes.c_size_t(nbytes), int(kind))


def cudaMemcpyAsync(
    to: int, source: int, nbytes: int, kind: cudaMemcpyKind, stream: int
) -> tuple[cudaError_t]:
    return _call(
        "cudaMemcpyAsync",
        _pointer(to),
        _pointer(source),
        ctypes.c_size_t(nbytes),
        int(kind),
        _pointer(stream),
    )


def cudaMemsetAsync(address: int, value: int, nbytes: int, stream: int) -> tuple[cudaError_t]:
    return _call(
        "cudaMemsetAsync", _pointer(address), value, ctypes.c_size_t(nbytes), _pointer(stream)
    )


# ---- streams, events and graphs ----


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, int]:
    return _call_for(ctypes.c_void_p(), "cudaStreamCreateWithFlags", ctypes.c_uint(flags))


def cudaStreamSynchronize(stream: int) -> tuple[cudaError_t]:
    return _call("cudaStreamSynchronize", _pointer(stream))


def cudaStreamBeginCapture(stream: int, mode: cudaStreamCaptureMode) -> tuple[cudaError_t]:
    return _call("cudaStreamBeginCapture", _pointer(stream), int(mode))


def cudaStreamEndCapture(stream: int) -> tuple[cudaError_t, int]:
    graph = ctypes.c_void_p()
    error = _cudart.cudaStreamEndCapture(_pointer(stream), ctypes.byref(graph))
    return cudaError_t(error), graph.value or 0


def cudaGraphInstantiate(graph: int, flags: int) -> tuple[cudaError_t, int]:
    return _call_for(
        ctypes.c_void_p(), "cudaGraphInstantiate", _pointer(graph), ctypes.c_ulonglong(flags)
    )


def cudaGraphLaunch(executable: int, stream: int) -> tuple[cudaError_t]:
    return _call("cudaGraphLaunch", _pointer(executable), _pointer(stream))


def cudaGraphDestroy(graph: int) -> tuple[cudaError_t]:
    return _call("cudaGraphDestroy", _pointer(graph))


def cudaGraphExecDestroy(executable: int) -> tuple[cudaError_t]:
    return _call("cudaGraphExecDestroy", _pointer(executable))
