"""Backends run one graph and own its KV buffers; they know nothing of tokens or trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec_runtime.bundle import Bundle, Graph


class Backend(Protocol):
    """One graph, ready to run; owns its KV buffers, of `capacity` slots."""

    form: str
    capacity: int

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Runs once and returns these outputs; the arrays may be overwritten by the next run."""


def open_graph(bundle: Bundle, graph: Graph, capacity: int, threads: int | None = None) -> Backend:
    """The backend for one graph of a bundle. ValueError: a file this machine's runtime cannot load."""
    from spec_runtime.backends.ort import OrtBackend

    return OrtBackend(bundle.path / graph.file, graph, capacity, threads)
