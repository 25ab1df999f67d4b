"""Backends run one graph and own its KV buffers; they know nothing of tokens or trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spec_runtime.bundle import Bundle, Graph

# of a Bundle; "cuda" is ONNX Runtime's, "eager" without CUDA graphs
BACKENDS = ("onnxruntime", "cuda", "tensorrt", "tensorrt_eager")


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
    """The bundle's backend over one of its graphs, on the KV buffers of `share` that have the names
    of its own. ValueError: a file this machine's runtime cannot load."""
    if bundle.backend.startswith("tensorrt"):
        from spec_runtime.backends.tensorrt import open_plan

        assert share is None, "contiguous caches cannot be shared"
        return open_plan(bundle, graph, capacity, is_captured=bundle.backend == "tensorrt")
    from spec_runtime.backends.ort import OrtBackend

    assert share is None or isinstance(share, OrtBackend), share
    if bundle.backend == "cuda":
        _require_cuda_kernels(bundle.manifest.target.precision, graph.form)
        return OrtBackend(bundle.path / graph.file, graph, capacity, threads, share, "cuda")
    probe = bundle.manifest.graphs.get("probe")
    if probe is not None and graph is bundle.manifest.graphs["target"]:
        _require_exact_int8(OrtBackend(bundle.path / probe.file, probe, 1, 1))
    return OrtBackend(bundle.path / graph.file, graph, capacity, threads, share)


def _require_cuda_kernels(precision: str, form: str) -> None:
    """Refuse what ONNX Runtime's CUDA provider has no kernel for, or would run on the CPU."""
    if precision in ("int8", "int4"):
        expected = "fp16, bf16 or fp32"
    elif precision == "fp32" and form == "slots":  # GroupQueryAttention is half precision there
        expected = "the contiguous form (build --form contiguous), or fp16 or bf16"
    else:
        return
    raise ValueError(
        f"got an {precision} bundle in the {form} form with backend cuda, expected {expected}"
    )


def _require_exact_int8(probe: Backend) -> None:
    """Refuse a CPU whose u8·s8 products saturate: every int8 result would be silently wrong."""
    x = np.full((1, 64), 255, np.uint8)
    got, expected = int(probe.run({"x": x}, ["y"])["y"][0, 0]), (255 - 128) * 127 * 64
    if got != expected:
        raise ValueError(
            f"this CPU's int8 products saturate (got {got}, expected {expected}): build the "
            "bundle with --precision int8 --reduce-range, or with another precision"
        )
