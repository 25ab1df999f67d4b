"""Lays out all feeds of a run in one piece of memory, so that one copy brings them to a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from spec_runtime.backends.shapes import shape_of
from spec_runtime.bundle.manifest import TensorSpec

ALIGNMENT = 256  # bytes; every feed begins at a multiple, as an allocation of its own would


class PackedFeeds:
    """Feeds of one shape each in `memory` u8[nbytes], which `allocate` made.

    `first` says by name at which byte each begins, here and in a copy on a device, and `arrays` are
    views to write them by. Example: a bool[5] and a float16[5] begin at bytes 0 and 256 of 512.
    """

    def __init__(
        self,
        specs: Iterable[TensorSpec],
        sizes: Mapping[str, int],
        allocate: Callable[[int], np.ndarray],
    ) -> None:
        self.first: dict[str, int] = {}
        shapes = {spec.name: (shape_of(spec, sizes), np.dtype(spec.dtype)) for spec in specs}
        end = 0
        for name, (shape, dtype) in shapes.items():
            self.first[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self.memory = allocate(max(end, 1))
        self.arrays = {
            name: self.memory[self.first[name] :][: math.prod(shape) * dtype.itemsize]
            .view(dtype)
            .reshape(shape)
            for name, (shape, dtype) in shapes.items()
        }
