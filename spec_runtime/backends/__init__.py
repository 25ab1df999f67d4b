"""Backends run one graph and own its KV buffers; they know nothing of tokens or trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

from spec_runtime.bundle import Bundle, Graph

# of a Bundle; "cuda" is ONNX Runtime's, "eager" without CUDA graphs
BACKENDS = ("onnxruntime", "cuda", "cuda_eager", "tensorrt", "tensorrt_eager")


class Backend(Protocol):
    """One graph, ready to run; owns its KV buffers, of `capacity` slots."""

    form: str
    capacity: int

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Runs once and returns these outputs; the arrays may be overwritten by the next run."""


class Rows(Protocol):
    """An output [R, W] left on the device until the backend's next run: rows are copied to the host
    as they are read, all of them by `np.asarray`."""

    def __getitem__(self, row: int, /) -> np.ndarray: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class DeviceBackend(Backend, Protocol):
    """A backend whose outputs may stay on its device. bytes_to_host: copied from there so far."""

    @property
    def bytes_to_host(self) -> int: ...

    def has_output(self, name: str) -> bool: ...

    def run_keeping(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, Rows]]:
        """As `run`; besides, the outputs `kept` as rows on the device."""


def on_device(backend: Backend) -> DeviceBackend | None:
    """The backend, if its outputs can be kept on a device."""
    return cast(DeviceBackend, backend) if getattr(backend, "is_on_device", False) else None


def open_graph(
    bundle: Bundle,
    graph: Graph,
    capacity: int,
    threads: int | None = None,
    share: Backend | None = None,
    banks: Backend | None = None,
) -> Backend:
    """The bundle's backend over one of its graphs, on the KV buffers of `share` and the banks of
    `banks` that have the names of its own. ValueError: a file this machine's runtime cannot
    load."""
    if bundle.backend.startswith("tensorrt"):
        from spec_runtime.backends.tensorrt import open_plan

        assert share is None, "contiguous caches cannot be shared"
        return open_plan(bundle, graph, capacity, is_captured=bundle.backend == "tensorrt")
    from spec_runtime.backends.ort import OrtBackend

    assert share is None or isinstance(share, OrtBackend), share
    assert banks is None or isinstance(banks, OrtBackend), banks
    if bundle.backend.startswith("cuda"):
        _require_cuda_kernels(bundle.manifest.target.precision, graph)
        return OrtBackend(
            bundle.path / graph.file,
            graph,
            capacity,
            threads,
            share,
            "cuda",
            is_captured=bundle.backend == "cuda",
            banks=banks,
        )
    probe = bundle.manifest.graphs.get("probe")
    if probe is not None and graph is bundle.manifest.graphs["target"]:
        _require_exact_int8(OrtBackend(bundle.path / probe.file, probe, 1, 1))
    return OrtBackend(bundle.path / graph.file, graph, capacity, threads, share, banks=banks)


def _require_cuda_kernels(precision: str, graph: Graph) -> None:
    """Refuse what ONNX Runtime's CUDA provider has no kernel for, or would run on the CPU."""
    is_quantised = precision in ("int8", "int4")
    # GroupQueryAttention is half precision there
    is_wide = (
        graph.form == "slots"
        and graph.attention != "full_buffer"
        and any(spec.name.startswith("kv.") and spec.dtype == "float32" for spec in graph.inputs)
    )
    if is_quantised or is_wide:
        got = f"an {precision} bundle" if is_quantised else f"{graph.file} in float32, slots form"
        raise ValueError(
            f"got {got} with backend cuda, expected one made by spec-export build --device cuda"
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
