"""Runs one binding of an ONNX Runtime session on CUDA: as it is, or by a CUDA graph."""

from typing import Any

from spec_runtime.backends.cuda.copies import StreamCopies
from spec_runtime.backends.cuda.graph_cache import GraphRun
from spec_runtime.backends.session import NamingGraph, run_options


class BoundRun(GraphRun):
    """A binding that is run repeatedly, by one thread at a time, on the stream of `copies`.

    We capture it ourselves: ONNX Runtime keeps its own graphs by thread, in a mode that any other
    thread's allocation breaks, and cannot destroy one.
    """

    def __init__(
        self, session: Any, binding: Any, naming: NamingGraph, copies: StreamCopies
    ) -> None:
        super().__init__(copies.cuda)
        self._session, self._binding, self._naming = session, binding, naming
        self._copies = copies

    def enqueue(self) -> None:
        """See GraphRun.enqueue."""
        with self._naming:
            self._session.run_with_iobinding(self._binding, run_options())

    def close(self) -> None:
        """See GraphRun.close."""
        self._copies.settle()
