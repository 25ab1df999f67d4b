"""Computes shapes, sizes and widths that all backends need."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from spec_runtime.bundle.manifest import BANK, Graph, TensorSpec
from spec_runtime.errors import UserError

KV = "kv."  # before the names of KV buffers
MIN_MASK = 256  # the least width that masks are cut to; the next ones double


def is_cache(spec: TensorSpec) -> bool:
    """Returns whether it is a KV buffer or a bank (bundle.manifest.BANK) of a step."""
    return spec.name.startswith((KV, BANK))


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape with the free axes' sizes put in.

    >>> shape_of(TensorSpec("mask", "bool", (1, "N")), {"N": 5})
    (1, 5)
    """
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape)


def axis_sizes(graph: Graph, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the sizes of the free axes in these inputs' shapes.

    Raises UserError for a shape that the graph does not take. Example: input_ids [1, "N"] given
    as [1, 5] is {"N": 5}.
    """
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        if is_cache(spec):
            continue
        shape = tuple(shapes[spec.name])
        fits = len(shape) == len(spec.shape) and all(
            size == (sizes.setdefault(axis, size) if isinstance(axis, str) else axis)
            for axis, size in zip(spec.shape, shape, strict=False)
        )
        if not fits:
            raise UserError(
                f"got {spec.name} of shape {list(shape)}, expected {list(spec.shape)} with {sizes}"
            )
    return sizes


def require_feeds(
    graph: Graph, feeds: Mapping[str, np.ndarray], outputs: Sequence[str]
) -> dict[str, int]:
    """Returns the sizes of the free axes, once the graph takes these feeds and has these outputs.

    Raises UserError for a graph that wants other inputs or has no such output, as the manifest
    says. More feeds than inputs are fine: each form of a graph reads some of them.
    """
    wanted = {spec.name: spec for spec in graph.inputs if not is_cache(spec)}
    there = {spec.name for spec in graph.outputs}
    missing = sorted(wanted.keys() - feeds.keys()), sorted(set(outputs) - there)
    if any(missing):
        raise UserError(
            f"{graph.file}: got a graph that wants inputs {missing[0]!r:.100} and has no outputs "
            f"{missing[1]!r:.100}, expected inputs {sorted(feeds)!r:.200}; build the bundle again"
        )
    for name, spec in wanted.items():
        if feeds[name].dtype != spec.dtype:
            raise UserError(
                f"{graph.file}: got input {name} of type {spec.dtype}, expected "
                f"{feeds[name].dtype}; build the bundle again"
            )
    sizes = axis_sizes(graph, {name: feeds[name].shape for name in wanted})
    for spec in graph.outputs:
        open_axes = {axis for axis in spec.shape if isinstance(axis, str)} - sizes.keys()
        if spec.name in outputs and open_axes:
            raise UserError(
                f"{graph.file}: got output {spec.name} of shape {list(spec.shape)}, expected axes "
                f"of the inputs, {', '.join(sizes)}; build the bundle again"
            )
    return sizes


def num_bytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of an array whose free axes have these sizes."""
    return math.prod(shape_of(spec, sizes)) * item_bytes(spec.dtype)


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one value; numpy has no bfloat16."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def mask_width(num_slots: int, capacity: int) -> int:
    """Returns the least of 256, 512, 1024 … and the capacity that holds `num_slots`.

    >>> [mask_width(n, 2176) for n in (7, 257, 2049)]
    [256, 512, 2176]
    """
    width = MIN_MASK
    while width < num_slots:
        width *= 2
    return min(width, capacity)
