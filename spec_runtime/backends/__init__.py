"""Opens a bundle's graphs on the backend that was asked for.

Each backend is a module that `base.BACKENDS` names; see README.md for how to add one.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING

from spec_runtime.backends.base import (
    BACKENDS,
    Backend,
    BackendKind,
    DeviceBackend,
    GraphOpener,
    GraphRun,
    RowBackend,
    Rows,
    RowsReader,
    Runtime,
    run_at_once,
    run_each,
)
from spec_runtime.bundle.manifest import SAMPLING, Bundle, Graph

if TYPE_CHECKING:
    from spec_runtime.backends.lanes import LanePasses

__all__ = [
    "BACKENDS",
    "Backend",
    "BackendKind",
    "DeviceBackend",
    "GraphRun",
    "RowBackend",
    "Rows",
    "RowsReader",
    "Runtime",
    "open_graph",
    "open_lanes",
    "open_sampling",
    "run_at_once",
    "run_each",
]


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    runtime: Runtime | None = None,
    share: Backend | None = None,
    banks: Backend | None = None,
) -> Backend:
    """Opens one of a bundle's graphs with KV buffers of `capacity` slots.

    `runtime` None is the CPU with as many threads as this process may use. KV buffers are shared
    with `share`, and banks (see bundle.manifest.BANK) with `banks`, where the names agree. Raises
    UserError for a file that this machine's runtime cannot load.
    """
    runtime = runtime or Runtime()
    opener: GraphOpener = importlib.import_module(runtime.kind.module).open_graph
    return opener(bundle, graph, capacity, runtime, share, banks)


def open_sampling(bundle: Bundle, target: Backend, runtime: Runtime) -> RowsReader | None:
    """Returns the graph that finds the largest of the logits that `target` leaves on its device.

    Its session is opened by the first run. Returns None where logits come to the host anyway, or
    the bundle has no such graph.
    """
    graph = bundle.manifest.graphs.get(SAMPLING)
    if graph is None or (runtime.engine, runtime.device) != ("onnxruntime", "cuda"):
        return None
    # here: only this engine needs onnxruntime
    from spec_runtime.backends.cuda.sampling_graph import SamplingGraph
    from spec_runtime.backends.session import as_lender

    return SamplingGraph(bundle, graph, as_lender(target).copies, runtime)


def open_lanes(bundle: Bundle, runtime: Runtime) -> LanePasses | None:
    """Returns what runs one pass for several lanes, None where each runs by itself."""
    if runtime.engine != "onnxruntime":
        return None
    from spec_runtime.backends.lanes import LanePasses  # here: only this engine needs onnxruntime

    opener, run_drafts = importlib.import_module(runtime.kind.module).open_lanes, run_each
    closing = threading.Event()
    if runtime.device == "cpu":
        from spec_runtime.backends.cpu.joint_runs import JointRuns

        run_drafts = JointRuns(bundle, runtime, closing).run
    return LanePasses(bundle, runtime, opener, open_sampling, run_drafts, closing)
