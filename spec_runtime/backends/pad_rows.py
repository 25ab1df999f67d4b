"""More rows than a run needs, so that few shapes come, and come again: those of a CUDA graph, or of
an execution context. Knows the feeds of the forms (see kv.py and bundle.Graph); no engine.
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
    """The feeds with each axis of rows filled up to the next of WIDTHS, and the sizes then.

    Rows repeat the last one. In the slots form it is written to its slot again, with the same
    content; the contiguous form and attention "chain" write the new rows behind all others, where
    the next run writes. Nobody attends to them. sizes: of the feeds' free axes. most: limits of
    some. Unchanged where the cache is too full for it, or an axis longer than WIDTHS.

    Example, contiguous, 5 nodes and one moved row: src [9] and perm [0, 1, 2, 3, 4, 5] become, with
    8 nodes, src [9] and perm [0, 1, 2, 3, 4, 5, 6, 7, 8].
    """
    feeds, limits = dict(feeds), most or {}
    wider = {
        axis: _width(size, limits.get(axis, WIDTHS[-1])) if axis not in ("S", "A+N") else size
        for axis, size in sizes.items()
    }
    more = wider.get("N", 0) - sizes.get("N", 0)
    if graph.form == "contiguous":
        wider["A+N"] = wider["A"] + wider["N"]
        if int(feeds["write_index"][0]) + wider["A+N"] > capacity:
            return feeds, dict(sizes)
        feeds["perm"] = _wider_perm(feeds["perm"], sizes, wider)
    elif "seqlens_k" in feeds:
        # never fewer rows to read than there are new ones
        top = int(feeds["seqlens_k"][0])
        top = top + more if graph.attention == "chain" else max(top, wider["N"] - 1)
        if top >= capacity:
            return feeds, dict(sizes)
        feeds["seqlens_k"] = np.array([top], np.int32)
    for spec in graph.inputs:
        if spec.name in feeds:
            shape = [wider[axis] if isinstance(axis, str) else axis for axis in spec.shape]
            feeds[spec.name] = _repeat_last(feeds[spec.name], shape)
    return feeds, wider


def _width(num_rows: int, most: int) -> int:
    return next((width for width in WIDTHS if num_rows <= width <= most), num_rows)


def _wider_perm(perm: np.ndarray, sizes: Mapping[str, int], wider: Mapping[str, int]) -> np.ndarray:
    """The same rows in the same places, those that fill behind them."""
    A, wider_A = sizes["A"], wider["A"]
    moved = np.where(perm < A, perm, perm + wider_A - A)
    filling = [np.arange(A, wider_A), np.arange(wider_A + sizes["N"], wider["A+N"])]
    return np.concatenate([moved, *filling])


def _repeat_last(feed: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The feed with the last entry of each axis repeated up to this shape."""
    for axis, size in enumerate(shape):
        n = feed.shape[axis]
        if n < size:
            feed = feed.take(np.minimum(np.arange(size), n - 1), axis=axis)
    return feed
