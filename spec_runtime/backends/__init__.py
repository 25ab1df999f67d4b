"""Opens a bundle's graphs on the backend that was asked for.

Each backend is one file; see README.md for how to add one.
"""

from __future__ import annotations

import importlib

from spec_runtime.backends.base import (
    BACKENDS,
    Backend,
    BackendKind,
    DeviceBackend,
    Opener,
    Rows,
    Runtime,
)
from spec_runtime.bundle import Bundle, Graph

__all__ = [
    "BACKENDS",
    "DEFAULT_RUNTIME",
    "Backend",
    "BackendKind",
    "DeviceBackend",
    "Rows",
    "Runtime",
    "open_graph",
]

DEFAULT_RUNTIME = Runtime()


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime = DEFAULT_RUNTIME,
    share: Backend | None = None,
    banks: Backend | None = None,
) -> Backend:
    """Opens one of a bundle's graphs with KV buffers of `capacity` slots.

    KV buffers are shared with `share`, and banks (see bundle.BANK) with `banks`, where the names
    agree. Raises ValueError for a file that this machine's runtime cannot load.
    """
    opener: Opener = importlib.import_module(runtime.kind.module).open_graph
    return opener(bundle, graph, capacity, runtime, share, banks)
