"""Estimates what a graph's buffers take, and refuses what this machine cannot hold."""

import os
from pathlib import Path

import numpy as np

from spec_runtime.bundle.manifest import BundleError, Graph, TensorSpec

CACHE_PREFIXES = ("kv.", "bank.")
# A slot of a cache costs this many bytes in addition to its rows: its places, and one byte in each
# of the 256 rows of the mask that a prompt is read with.
_SLOT_BYTES = 256 + 32
_MEMORY_INFO, _OWN_MEMORY = Path("/proc/meminfo"), Path("/proc/self/statm")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def buffer_shape(spec: TensorSpec, capacity: int) -> tuple[int, ...]:
    """Returns the shape of a KV buffer or bank with `capacity` slots.

    A buffer has at most one free axis. Raises BundleError unless that is named "S".
    """
    if any(size != "S" for size in spec.shape if isinstance(size, str)):
        raise BundleError(
            f"buffer {spec.name}: got shape {list(spec.shape)!r:.80}, expected sizes and at most "
            "'S' for the slots; build the bundle again"
        )
    return tuple(capacity if isinstance(size, str) else size for size in spec.shape)


def buffer_bytes(graph: Graph, capacity: int) -> int:
    """Returns the bytes that the graph's KV buffers, its banks and their mask take."""
    total = _SLOT_BYTES * capacity
    for spec in graph.inputs:
        if spec.name.startswith(CACHE_PREFIXES):
            count = 1
            for size in buffer_shape(spec, capacity):
                count *= size
            total += count * (2 if spec.dtype == "bfloat16" else np.dtype(spec.dtype).itemsize)
    return total


def machine_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in _CGROUP_LIMITS:
        try:
            limit = file.read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():  # otherwise "max"
            total = min(total, int(limit))
    return total


def available_bytes() -> int:
    """Returns the memory that this process has or could still get without swapping, as Linux counts
    it; elsewhere all that it may use."""
    try:
        lines = _MEMORY_INFO.read_text().splitlines()
        own_pages = int(_OWN_MEMORY.read_text().split()[1])
    except OSError:
        return machine_bytes()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(free * 1024 + own_pages * os.sysconf("SC_PAGE_SIZE"), machine_bytes())


def require_memory(graph: Graph, capacity: int, there: int, where: str) -> None:
    """Raises BundleError if the graph's buffers do not fit into so many bytes."""
    needed = buffer_bytes(graph, capacity)
    if needed > there:
        raise BundleError(
            f"{graph.file}: its buffers for {capacity} tokens take {needed / 1e9:.1f} GB, expected "
            f"at most the {there / 1e9:.1f} GB of {where}; take a shorter --context, or build with "
            "a smaller --max-length"
        )
