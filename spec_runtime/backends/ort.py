"""ONNX Runtime: everything is bound, KV rows are never copied.

Each KV buffer is one OrtValue, bound as a graph input and as the output of the node that writes it,
so that a step writes in place. On CUDA it stays on the device, and a run copies its feeds there and
its outputs back. Knows sessions and buffers; knows nothing of what the rows mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.bundle import Graph
from spec_runtime.threads import default_threads

try:
    import onnxruntime as ort
except ImportError as error:
    raise ValueError("onnxruntime is not installed: pip install 'specsplit[cpu]'") from error


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OrtBackend:
    """One session with its KV buffers, [1, G, capacity, Dh] each, zero-initialised (0 · NaN would
    poison a row). Buffers that `share` has by the same name are not made but shared with it.
    `device`: cpu or cuda."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        capacity: int,
        threads: int | None = None,
        share: OrtBackend | None = None,
        device: str = "cpu",
    ) -> None:
        self.form, self.capacity = graph.form, capacity
        self._device = device
        self._session = _open_session(path, threads or default_threads(), PROVIDERS[device])
        self._specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        _check_signature(self._session, graph, path)
        self._cache_names = [spec.name for spec in graph.inputs if spec.name.startswith("kv.")]
        self._feed_names = [spec.name for spec in graph.inputs if not spec.name.startswith("kv.")]
        lent: dict[str, Any] = {} if share is None else share._caches
        self._caches: dict[str, Any] = {
            name: lent[name] if name in lent else self._zeros(name) for name in self._cache_names
        }
        for name, cache in self._caches.items():
            assert cache.shape() == self._cache_shape(name), (name, cache.shape())
        self._bindings: dict[tuple[str, ...], Any] = {}
        self._buffers: dict[str, np.ndarray] = {}

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run; the arrays returned are views of buffers that the next run writes
        again."""
        binding = self._binding(tuple(outputs))
        sizes: dict[str, int] = {}
        held = []  # ONNX Runtime reads these arrays' memory during the run
        for name in self._feed_names:
            array = np.ascontiguousarray(feeds[name])
            held.append(array)
            binding.bind_cpu_input(name, array)
            for dim, size in zip(self._specs[name].shape, array.shape, strict=True):
                if isinstance(dim, str):
                    sizes[dim] = size
        results = {}
        for name in outputs:
            results[name] = array = self._buffer(name, sizes)
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return results

    def _zeros(self, name: str) -> Any:
        array = np.zeros(self._cache_shape(name), dtype=self._specs[name].dtype)
        return ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)

    def _cache_shape(self, name: str) -> list[int]:
        return [self.capacity if dim == "S" else int(dim) for dim in self._specs[name].shape]

    def _binding(self, outputs: tuple[str, ...]) -> Any:
        """A binding with every KV buffer in place; one per set of outputs, so that unwanted ones
        are not computed."""
        if outputs not in self._bindings:
            binding = self._session.io_binding()
            for name, cache in self._caches.items():
                binding.bind_ortvalue_input(name, cache)
                binding.bind_ortvalue_output(f"{name}.out", cache)
            bound = binding.get_outputs()
            same = [
                a.data_ptr() == b.data_ptr()
                for a, b in zip(bound, self._caches.values(), strict=True)
            ]
            assert all(same), "a KV buffer is not bound in place"
            self._bindings[outputs] = binding
        return self._bindings[outputs]

    def _buffer(self, name: str, sizes: dict[str, int]) -> np.ndarray:
        """A view of an output buffer that grows to the largest shape asked for."""
        spec = self._specs[name]
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        count = int(np.prod(shape))
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < count:
            buffer = self._buffers[name] = np.empty(count, dtype=spec.dtype)
        return buffer[:count].reshape(shape)


def _open_session(path: Path, threads: int, provider: str) -> Any:
    if provider not in ort.get_available_providers():
        raise ValueError(
            f"onnxruntime {ort.__version__} here has no {provider}: put onnxruntime-gpu in its "
            "place (pip uninstall onnxruntime; pip install 'specsplit[gpu]'), or choose another "
            "--backend"
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False  # shapes change every step
    options.log_severity_level = 3
    # target and drafter take turns: threads that go on spinning would eat the other's cores
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = ort.InferenceSession(str(path), options, providers=[provider])
    except Exception as error:  # the runtime raises its own kinds, none of them public
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"ONNX Runtime {ort.__version__} cannot load {path.name}: {reason}"
        ) from error
    if session.get_providers()[0] != provider:  # it falls back on the CPU by itself
        raise ValueError(
            f"onnxruntime {ort.__version__} found no usable NVIDIA GPU: check the driver and CUDA "
            "libraries, or choose another --backend"
        )
    return session


def _check_signature(session: Any, graph: Graph, path: Path) -> None:
    for kind, got, expected in (
        ("inputs", session.get_inputs(), graph.inputs),
        ("outputs", session.get_outputs(), graph.outputs),
    ):
        names, wanted = {value.name for value in got}, {spec.name for spec in expected}
        if names != wanted:
            raise ValueError(
                f"{path.name} has {kind} {sorted(names)}, the manifest says "
                f"{sorted(wanted)}: build the bundle again"
            )
