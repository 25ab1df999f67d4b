"""Copies between the host and ONNX Runtime's values on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.errors import DeviceLostError

# ONNX Runtime's names of the types that are fetched.
TYPES = {
    **{"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"},
    **{"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"},
}


class Copies:
    """Says when what was sent and run is done: on the CPU at once, where nothing is copied."""

    def settle(self) -> None:
        """Waits until everything that was sent and run is done."""


class StreamCopies(Copies):
    """Copies through pinned memory, on one stream with all sessions that share buffers.

    The stream keeps copies and runs in order without waiting; the host waits once, for what it
    reads.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.num_waits = 0
        self.is_idle = True

    @property
    def settings(self) -> dict[str, str]:
        """Returns provider options for the sessions that compute on these values."""
        return {"user_compute_stream": str(self.cuda.stream)}

    def require_device(self) -> None:
        """Raises DeviceLostError if no call can succeed any more."""
        try:
            self.cuda.wait()
        except DeviceLostError:
            raise
        except RuntimeError:  # the stream is captured
            pass

    def host(self, nbytes: int) -> np.ndarray:
        """Returns memory u8[nbytes] to send from."""
        return self.cuda.pinned(nbytes).view(np.uint8)

    def upload(self, memory: np.ndarray, value: Any) -> Upload:
        """Returns what copies `memory`, which came from `host`, to the value of the same size."""
        return Upload(self, memory, value)

    def download(self, values: Sequence[Any]) -> Download:
        """Returns what copies these values to the host."""
        return Download(self, values)

    def settle(self) -> None:
        if not self.is_idle:
            self.cuda.wait()
            self.num_waits += 1
            self.is_idle = True


class Upload:
    """Copies `memory` u8[nbytes] on the host to one value of that size, whenever it is started.

    The copy is put on the stream; it reads `memory` until somebody waits for the stream.
    """

    def __init__(self, copies: StreamCopies, memory: np.ndarray, value: Any) -> None:
        self.memory, self._copies = memory, copies
        self._value = value  # whose memory has to live as long
        self._copy = value.data_ptr(), memory.ctypes.data, memory.nbytes
        self._begun = -1  # how often had been waited when the last copy was put on the stream

    def claim(self) -> None:
        """Waits until the last copy is done; `memory` may be written then."""
        if self._begun == self._copies.num_waits:
            self._copies.settle()

    def start(self) -> None:
        copies = self._copies
        copies.cuda.to_device(*self._copy)
        copies.is_idle = False
        self._begun = copies.num_waits


class Download:
    """Copies the same values to pinned memory of its own, whenever it is started and read."""

    def __init__(self, copies: StreamCopies, values: Sequence[Any]) -> None:
        self._copies = copies
        self._values = values  # whose memory has to live as long
        self._arrays = [_landing(copies, value) for value in values]
        self._each = [
            (array.ctypes.data, value.data_ptr(), array.nbytes)
            for array, value in zip(self._arrays, values, strict=True)
        ]

    def start(self) -> None:
        """Puts the copies on the stream."""
        for copy in self._each:
            self._copies.cuda.to_host(*copy)
            self._copies.is_idle = False

    def read(self) -> Sequence[np.ndarray]:
        """Waits for the copies; returns the values' content, in arrays that the next ones
        overwrite."""
        if self._each:
            self._copies.settle()
        return self._arrays


def _landing(copies: StreamCopies, value: Any) -> np.ndarray:
    """Returns pinned memory for a value, as an array of its type and shape."""
    dtype, shape = np.dtype(TYPES[value.data_type()]), value.shape()
    count = int(np.prod(shape))
    memory = copies.host(max(count, 1) * dtype.itemsize)
    return memory.view(dtype)[:count].reshape(shape)


def open_copies() -> StreamCopies:
    """Returns the copies of sessions on CUDA, on a new stream; raises UserError without CUDA's
    Python bindings or a GPU."""
    return StreamCopies(Cuda.open())
