"""Rows of an output that stays on the device until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Memory(Protocol):
    """Brings a device's memory to the host. `num_runs` counts the runs that write there."""

    num_runs: int

    def fetch(self, address: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Returns a copy of an array at this address on the device."""


class DeviceRows:
    """The first `num_rows` rows of an output [R, W], see base.Rows.

    `padded_shape` is [R, W]: the rows beyond `num_rows` were computed only to fill a shape.
    """

    def __init__(
        self, memory: Memory, address: int, padded_shape: Sequence[int], num_rows: int, dtype: str
    ) -> None:
        self.padded_shape = tuple(padded_shape)
        self.shape = (num_rows, *self.padded_shape[1:])
        self._memory, self._address, self._dtype = memory, address, np.dtype(dtype)
        self._num_runs = memory.num_runs
        self._row_W: dict[int, np.ndarray] = {}

    @property
    def address(self) -> int:
        """Address on the device where the rows begin, for another graph to read."""
        assert self._num_runs == self._memory.num_runs, "read after the backend's next run"
        return self._address

    def part(self, begin: int, num_rows: int) -> DeviceRows:
        """Returns `num_rows` of these rows, from `begin` on."""
        width = self.shape[1]
        address = self.address + begin * width * self._dtype.itemsize
        return DeviceRows(self._memory, address, (num_rows, width), num_rows, self._dtype.name)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, row: int) -> np.ndarray:
        """Returns one row [W]."""
        if row not in self._row_W:
            assert 0 <= row < len(self), (row, self.shape)
            first = self.address + int(row) * self.shape[1] * self._dtype.itemsize
            self._row_W[row] = self._memory.fetch(first, (1, self.shape[1]), self._dtype)[0]
        return self._row_W[row]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._memory.fetch(self.address, self.shape, self._dtype)
        return array if dtype is None else array.astype(dtype, copy=False)
