"""Lays arrays side by side in one piece of memory, so that one copy moves several of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from spec_runtime.backends.shapes import shape_of
from spec_runtime.bundle.manifest import TensorSpec

ALIGNMENT = 256  # bytes; every array begins at a multiple, as an allocation of its own would


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
        """Returns the fewest pieces (first byte, last byte + 1) that hold the first bytes of these
        arrays, without any other array. `wanted` says how many bytes of each.

        Example: of arrays "a", "b" and "c" at bytes 0, 256 and 512, 5 bytes of each are one piece
        (0, 517); those of "a" and "c" only are (0, 5) and (512, 517).
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


class PackedFeeds:
    """Feeds of one shape each in `memory` u8[nbytes], which `allocate` made.

    `first` says by name at which byte each begins, here and in a copy on a device, and `arrays` are
    views to write them by.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        sizes: Mapping[str, int],
        allocate: Callable[[int], np.ndarray],
    ) -> None:
        places = {spec.name: (shape_of(spec, sizes), np.dtype(spec.dtype)) for spec in specs}
        num_bytes = {
            name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in places.items()
        }
        layout = Layout.of(num_bytes)
        self.first, self.memory = layout.first, allocate(layout.num_bytes)
        self.arrays = {
            name: self.memory[self.first[name] :][: num_bytes[name]].view(dtype).reshape(shape)
            for name, (shape, dtype) in places.items()
        }
