"""Lays a run's results side by side in one buffer, so that one copy brings several to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spec_runtime.backends.cuda_api import Cuda
from spec_runtime.backends.packed_feeds import ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """Says where each array begins in a buffer of `num_bytes`.

    Example: arrays "a" of 5 bytes and "b" of 10 begin at bytes 0 and 256 of 512.
    """

    first: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Layout:
        """Lays out arrays of these sizes in bytes, in their order."""
        first, end = {}, 0
        for name, size in sizes.items():
            first[name] = end
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(first, max(end, ALIGNMENT))

    def pieces(self, wanted: Mapping[str, int]) -> list[tuple[int, int]]:
        """Returns the fewest pieces (first byte, last byte + 1) that hold the first so many bytes
        of these arrays, without any other array.

        Example: of arrays "a", "b" and "c" at bytes 0, 256 and 512, 5 bytes of each are one piece
        (0, 517); those of "a" and "c" alone are (0, 5) and (512, 517).
        """
        pieces: list[tuple[int, int]] = []
        follows = False  # whether the array before is wanted, too
        for name, begin in self.first.items():
            if name in wanted:
                end = begin + wanted[name]
                if follows:
                    begin = pieces.pop()[0]
                pieces.append((begin, end))
            follows = name in wanted
        return pieces


class PinnedMemory:
    """Pinned host memory that grows to the most that was asked for."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._memory = np.empty(0, np.int8)

    def first(self, nbytes: int) -> np.ndarray:
        """Returns its first bytes i8[nbytes]; arrays returned before stay valid."""
        if nbytes > self._memory.size:
            self._memory = self._cuda.pinned(max(nbytes, 2 * self._memory.size))
        return self._memory[:nbytes]
