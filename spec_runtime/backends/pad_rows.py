"""Pads a batch to a few fixed widths so that CUDA graphs can be reused.

A CUDA graph, like a TensorRT execution context, holds for one shape. The feeds that are padded are
those of the graph forms, see bundle.Graph and kv.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spec_runtime.bundle import Graph

WIDTHS = (1, 4, 8, 16, 24, 32, 48, 64)


def pad_rows(
    graph: Graph,
    feeds: Mapping[str, np.ndarray],
    sizes: Mapping[str, int],
    capacity: int,
    most: Mapping[str, int] | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Pads each axis of rows up to the next of WIDTHS; returns the feeds and their new sizes.

    `sizes` are those of the feeds' free axes, and `most` limits some of them. A padding row repeats
    the last row. In the slots form it writes that row's slot again, with the same content; in the
    contiguous form it is written behind all other rows, where the next run writes. No row attends
    to it. Feeds stay as they are if the cache has no room for the padding; an axis stays as it is
    if it is longer than all WIDTHS.

    Example in the contiguous form, with 5 nodes and one moved row: src [9] and perm
    [0, 1, 2, 3, 4, 5] become, with 8 nodes, src [9] and perm [0, 1, 2, 3, 4, 5, 6, 7, 8].
    """
    feeds, limits = dict(feeds), most or {}
    wider = {
        axis: padded_width(size, limits.get(axis, WIDTHS[-1])) if axis not in ("S", "A+N") else size
        for axis, size in sizes.items()
    }
    if graph.form == "contiguous":
        wider["A+N"] = wider["A"] + wider["N"]
        if int(feeds["write_index"][0]) + wider["A+N"] > capacity:
            return feeds, dict(sizes)
        feeds["perm"] = _wider_perm(feeds["perm"], sizes, wider)
    elif "seqlens_k" in feeds:
        # The rows to read are never fewer than the new ones.
        top = max(int(feeds["seqlens_k"][0]), wider["N"] - 1)
        if top >= capacity:
            return feeds, dict(sizes)
        feeds["seqlens_k"] = np.array([top], np.int32)
    for spec in graph.inputs:
        if spec.name in feeds:
            shape = [wider[axis] if isinstance(axis, str) else axis for axis in spec.shape]
            feeds[spec.name] = _repeat_last(feeds[spec.name], shape)
    return feeds, wider


def padded_width(num_rows: int, most: int) -> int:
    """Returns the least of WIDTHS that holds so many rows and is at most `most`, or `num_rows`."""
    return next((width for width in WIDTHS if num_rows <= width <= most), num_rows)


def _wider_perm(perm: np.ndarray, sizes: Mapping[str, int], wider: Mapping[str, int]) -> np.ndarray:
    """Returns a perm that puts the same rows in the same places, and padding rows behind them."""
    A, wider_A = sizes["A"], wider["A"]
    moved = np.where(perm < A, perm, perm + wider_A - A)
    padding = [np.arange(A, wider_A), np.arange(wider_A + sizes["N"], wider["A+N"])]
    return np.concatenate([moved, *padding])


def _repeat_last(feed: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns the feed with the last entry of each axis repeated up to this shape."""
    for axis, size in enumerate(shape):
        n = feed.shape[axis]
        if n < size:
            feed = feed.take(np.minimum(np.arange(size), n - 1), axis=axis)
    return feed
