"""Runs one binding of an ONNX Runtime session on CUDA: as it is, or by a CUDA graph."""

import itertools
from typing import Any

from spec_runtime.backends.cuda.copies import Copies
from spec_runtime.backends.cuda.graph_cache import GraphRun
from spec_runtime.backends.session import NO_GRAPH, NamingGraph, run_options

_graph_ids = itertools.count(1)  # 0 is ONNX Runtime's own


class BoundRun(GraphRun):
    """A binding that is run repeatedly, by one thread, on the stream of `copies`."""

    def __init__(self, session: Any, binding: Any, naming: NamingGraph, copies: Copies) -> None:
        self._session, self._binding, self._naming = session, binding, naming
        self._copies = copies
        self._options = run_options(NO_GRAPH, waits=False)

    def enqueue(self) -> None:
        """See GraphRun.enqueue. On CUDA the work is put on the stream; nobody waits for it here."""
        with self._naming:
            self._session.run_with_iobinding(self._binding, self._options)

    def capture(self) -> None:
        """See GraphRun.capture. ONNX Runtime runs the binding twice, then once by the graph."""
        graph_id = next(_graph_ids)
        with self._naming:
            self._session.run_with_iobinding(self._binding, run_options(graph_id))
        self._options = run_options(graph_id, waits=False)

    replay = enqueue

    def close(self) -> None:
        """See GraphRun.close."""
        self._copies.settle()
