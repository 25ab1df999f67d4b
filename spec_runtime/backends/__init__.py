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


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    threads: int | None = None,
    share: Backend | None = None,
) -> Backend:
    """The backend for one graph of a bundle, on the KV buffers of `share` that have the names of
    its own. ValueError: a file this machine's runtime cannot load."""
    from spec_runtime.backends.ort import OrtBackend

    probe = bundle.manifest.graphs.get("probe")
    if probe is not None and graph is bundle.manifest.graphs["target"]:
        _require_exact_int8(OrtBackend(bundle.path / probe.file, probe, 1, 1))
    assert share is None or isinstance(share, OrtBackend), share
    return OrtBackend(bundle.path / graph.file, graph, capacity, threads, share)


def _require_exact_int8(probe: Backend) -> None:
    """Refuse a CPU whose u8·s8 products saturate: every int8 result would be silently wrong."""
    x = np.full((1, 64), 255, np.uint8)
    got, expected = int(probe.run({"x": x}, ["y"])["y"][0, 0]), (255 - 128) * 127 * 64
    if got != expected:
        raise ValueError(
            f"this CPU's int8 products saturate (got {got}, expected {expected}): build the "
            "bundle with --precision int8 --reduce-range, or with another precision"
        )
