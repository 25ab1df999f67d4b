"""Pads a batch to a few fixed widths so that CUDA graphs can be reused.

A CUDA graph, like a TensorRT execution context, holds for one shape. The feeds that are padded are
those of the graph forms, see bundle.manifest.Graph and loop/kv.py.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from spec_runtime.backends.shapes import is_cache, shape_of
from spec_runtime.bundle.manifest import Graph

WIDTHS = (1, 16, 64)  # up to 16 a GPU reads weights no slower than for one row
FP8_WIDTHS = (1, 8, 64)  # and those of 8 bits up to 8


class PaddedRows:
    """Writes feeds whose free axes have `sizes` into arrays whose axes are `wider`, at each call.

    A padding row repeats the last row, and no row attends to it. In the slots form it writes that
    row's slot again, with the same content, but behind it where the graph appends. A mask with more
    columns than its array is cut. The
    `arrays` are by the names of the graph's inputs. Example: [7, 8, 9] is written into an array of
    four as [7, 8, 9, 9].
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        wider: Mapping[str, int],
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        own = {axis: min(size, wider[axis]) for axis, size in sizes.items()}
        self._rows: dict[str, np.ndarray] = {}
        self._paddings: list[tuple[np.ndarray, np.ndarray]] = []  # each with what it repeats
        for spec in graph.inputs:
            if not is_cache(spec):
                array, shape = arrays[spec.name], shape_of(spec, own)
                self._rows[spec.name] = array[tuple(slice(size) for size in shape)]
                self._paddings += _paddings(array, shape)
        self._mask = self._rows.pop("mask", None)
        self._top = self._rows.pop("seqlens_k", None)
        self._more_rows = wider.get("N", 0) - sizes.get("N", 0)  # of those up to the top

    def write(self, feeds: Mapping[str, np.ndarray]) -> None:
        for name, rows in self._rows.items():
            rows[...] = feeds[name]
        if self._mask is not None:
            self._mask[...] = feeds["mask"][..., : self._mask.shape[-1]]
        if self._top is not None:
            self._top[0] = feeds["seqlens_k"].item() + self._more_rows
        for padding, last in self._paddings:
            padding[...] = last


def padded_sizes(
    graph: Graph,
    sizes: Mapping[str, int],
    capacity: int,
    most: Mapping[str, int] | None = None,
    precision: str = "",
) -> dict[str, int]:
    """Returns the sizes of the free axes with each axis of rows widened to one of WIDTHS, or of
    FP8_WIDTHS for weights of that precision.

    `most` limits some of them. An axis stays as it is if it is longer than all widths, and all stay
    if the cache has no room for the padded rows.
    """
    limits, widths = most or {}, widths_of(precision)
    wider = dict(sizes)
    for axis in sizes.keys() - {"S", "A+N"}:
        wider[axis] = padded_width(sizes[axis], limits.get(axis, widths[-1]), widths)
    if graph.form == "contiguous":
        wider["A+N"] = wider["A"] + wider["N"]
    has_room = graph.form == "stateless" or wider["N"] <= capacity
    return wider if has_room else dict(sizes)


def plan_padding(
    graph: Graph,
    feeds: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    capacity: int,
    most: Mapping[str, int] | None = None,
) -> tuple[Mapping[str, np.ndarray], Mapping[str, int], dict[str, int]]:
    """Returns feeds that PaddedRows can write, their sizes, and the sizes to pad them to.

    Only a perm changes: in the contiguous form padding rows are written after all other rows, where
    the next run writes. Nothing is padded if there is no room for them.

    Example in the contiguous form, with 5 nodes and one moved row: src [9] and perm
    [0, 1, 2, 3, 4, 5] become, with 16 nodes, src [9] and perm [0, 1, 2 … 16].
    """
    wider = padded_sizes(graph, sizes, capacity, most)
    if graph.form != "contiguous":
        return feeds, sizes, wider
    if int(feeds["write_index"][0]) + wider["A+N"] > capacity:
        return feeds, sizes, dict(sizes)
    perm = _wider_perm(feeds["perm"], sizes, wider)
    return {**feeds, "perm": perm}, {**sizes, "A+N": wider["A+N"]}, wider


def widths_of(precision: str) -> tuple[int, ...]:
    """Returns the numbers of rows that passes are padded to, by the weights' precision."""
    return FP8_WIDTHS if precision == "fp8" else WIDTHS


def padded_width(num_rows: int, most: int, widths: Sequence[int]) -> int:
    """Returns the least of `widths` from `num_rows` to `most`, or `num_rows` if there is none."""
    return next((width for width in widths if num_rows <= width <= most), num_rows)


def _wider_perm(perm: np.ndarray, sizes: Mapping[str, int], wider: Mapping[str, int]) -> np.ndarray:
    """Returns a perm that puts the same rows in the same places, and padding rows after them."""
    A, wider_A = sizes["A"], wider["A"]
    moved = np.where(perm < A, perm, perm + wider_A - A)
    padding = [np.arange(A, wider_A), np.arange(wider_A + sizes["N"], wider["A+N"])]
    return np.concatenate([moved, *padding])


def _paddings(array: np.ndarray, shape: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns what to fill, in this order, of an array whose first rows of this shape are written,
    each part with the entry that it repeats."""
    paddings = []
    for axis, size in enumerate(shape):
        if size < array.shape[axis]:
            # Axes before this one are full by now, those after it are filled next.
            before = (slice(None),) * axis
            last = array[(*before, slice(size - 1, size))]
            paddings.append((array[(*before, slice(size, None))], last))
    return paddings
