"""Runs one binding of a session on CUDA: as it is, or captured as a CUDA graph and replayed."""

from __future__ import annotations

from typing import Any

from spec_runtime.backends.captures import capturing, no_capture
from spec_runtime.backends.session import NO_GRAPH, NamingGraph, run_options


class BoundRun:
    """A binding that is run again and again, by one thread: ONNX Runtime keeps graphs by thread.

    With `waits` a run returns when its work is done, otherwise when it is queued. `num_runs` counts
    the runs before the capture.
    """

    def __init__(self, session: Any, binding: Any, naming: NamingGraph, waits: bool) -> None:
        self.num_runs = 0
        self.is_captured = False
        self._session, self._binding, self._naming, self._waits = session, binding, naming, waits
        self._options = run_options(NO_GRAPH, waits)

    def run(self) -> None:
        """Replays the graph if there is one, otherwise runs as it is."""
        if self.is_captured and not self._waits:
            with self._naming:  # queues the graph, which is legal while other threads capture
                self._session.run_with_iobinding(self._binding, self._options)
            return
        with no_capture(), self._naming:
            self._session.run_with_iobinding(self._binding, self._options)
        self.num_runs += 1

    def capture(self, graph_id: int) -> None:
        """Captures the graph, which is replayed from then on; `graph_id` is new in the session.

        ONNX Runtime runs the binding several times in this call, the last time by the graph.
        """
        with capturing(), self._naming:
            self._session.run_with_iobinding(self._binding, run_options(graph_id))
        self._options = run_options(graph_id, self._waits)
        self.is_captured = True
