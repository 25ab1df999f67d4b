"""Copies between the host and ONNX Runtime's values on a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_runtime.backends.cuda_api import Cuda

# ONNX Runtime's names of the types that are fetched.
TYPES = {
    **{"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(double)": "float64"},
    **{"tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(bool)": "bool"},
}

log = logging.getLogger("spec_runtime")


class Copies:
    """Copies by ONNX Runtime's own calls, each of which waits until it is done.

    On the CPU nothing is copied: values and arrays are the same memory.
    """

    @property
    def settings(self) -> dict[str, str]:
        """Returns provider options for the sessions that compute on these values."""
        return {}

    @property
    def waits(self) -> bool:
        """Returns whether a run must wait for its own end."""
        return True

    def host(self, nbytes: int) -> np.ndarray:
        """Returns memory u8[nbytes] to send from."""
        return np.zeros(nbytes, np.uint8)

    def send(self, memory: np.ndarray, value: Any) -> int:
        """Starts the copy of `memory` u8[nbytes] to the value of the same size.

        Pass the returned ticket to `claim` before reusing `memory`.
        """
        value.update_inplace(memory)
        return 0

    def claim(self, ticket: int) -> None:
        """Waits until the copy that returned this ticket is done; its memory may be written."""

    def fetch(self, values: Sequence[Any], landing: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Returns the values' content as arrays on the host.

        `landing` is a dictionary that the caller keeps for us: it holds the arrays' memory, which
        the next fetch with the same dictionary overwrites.
        """
        return [value.numpy() for value in values]

    def settle(self) -> None:
        """Waits until everything that was sent and run is done."""


class StreamCopies(Copies):
    """Copies through pinned memory, on one stream with all sessions that share buffers.

    The stream keeps copies and runs in order without waiting; the host waits once, for what it
    reads.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self._num_waits = 0
        self._is_idle = True

    @property
    def settings(self) -> dict[str, str]:
        return {"user_compute_stream": str(self.cuda.stream)}

    @property
    def waits(self) -> bool:
        return False

    def host(self, nbytes: int) -> np.ndarray:
        return self.cuda.pinned(nbytes).view(np.uint8)

    def send(self, memory: np.ndarray, value: Any) -> int:
        self.cuda.to_device(value.data_ptr(), memory.ctypes.data, memory.nbytes)
        self._is_idle = False
        return self._num_waits

    def claim(self, ticket: int) -> None:
        if ticket == self._num_waits:
            self.settle()

    def fetch(self, values: Sequence[Any], landing: dict[int, np.ndarray]) -> list[np.ndarray]:
        arrays = []
        for value in values:
            address = value.data_ptr()
            if address not in landing:
                dtype = TYPES[value.data_type()]
                count = int(np.prod(value.shape()))
                memory = self.host(max(count, 1) * np.dtype(dtype).itemsize)
                landing[address] = memory.view(dtype)[:count].reshape(value.shape())
            array = landing[address]
            self.cuda.to_host(array.ctypes.data, address, array.nbytes)
            arrays.append(array)
        if arrays:
            self._is_idle = False
            self.settle()
        return arrays

    def settle(self) -> None:
        if not self._is_idle:
            self.cuda.wait()
            self._num_waits += 1
            self._is_idle = True


def open_copies() -> Copies:
    """Returns the copies of a session on CUDA: on a new stream if CUDA's Python bindings are
    installed, otherwise by ONNX Runtime's own calls."""
    try:
        return StreamCopies(Cuda.open())
    except (ValueError, RuntimeError) as error:  # without a GPU the session says so
        log.debug("no stream is shared: %s", error)
        return Copies()
