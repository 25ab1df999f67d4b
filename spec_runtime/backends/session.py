"""ONNX Runtime: everything is bound, KV rows are never copied.

Each KV buffer is one OrtValue, bound as a graph input and as the output of the node that writes it,
so that a step writes in place. On CUDA all buffers are on the device: a run copies its feeds there
in one piece and back what is asked for, and replays a CUDA graph for shapes that come again. Knows
sessions, buffers and the feeds that say where rows go; knows nothing of tokens.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.backends.cuda import Copies, open_copies
from spec_runtime.backends.pad_rows import WIDTHS, pad_rows
from spec_runtime.backends.tensorrt import MAX_STEPS, Recent, axis_sizes, is_cache, shape_of
from spec_runtime.backends.threads import default_threads
from spec_runtime.bundle import BANK, Graph, TensorSpec

try:
    import onnxruntime as ort
except ImportError as error:
    raise ValueError("onnxruntime is not installed: pip install 'specsplit[cpu]'") from error


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
EXACT = {"use_tf32": "0"}  # float32 products in float32, as fp32's promise is about them
# by a graph's attention. Attention-24 with a mask: the memory-efficient kernel would first copy all
# key/value rows once per query head; 16 is AttentionBackend::MATH, the unfused kernels alone
CUDA_SETTINGS = {"full_buffer": {"sdpa_kernel": "16"}}
BFLOAT16 = 16  # of onnx.TensorProto; numpy has none
RUNS_BEFORE_CAPTURE = 1  # of a shape: what comes twice comes often, as there are few
MAX_CAPTURED_ROWS = WIDTHS[-1]  # above, kernels take longer than their launches
ALIGNMENT = 256  # bytes, of a feed's address on a device: as its own allocation would be
MIN_MASK = 256  # of the widths that masks are cut to, doubling from here

log = logging.getLogger("spec_runtime")


class OrtBackend:
    """One session with its KV buffers, [1, G, capacity, Dh] each, and banks [R, W],
    zero-initialised (0 · NaN would poison a row). KV buffers that `share` has by the same name are
    not made but shared with it, banks with `banks`. `device`: cpu or cuda; `is_captured`: with CUDA
    graphs."""

    def __init__(
        self,
        path: Path,
        graph: Graph,
        capacity: int,
        threads: int | None = None,
        share: OrtBackend | None = None,
        device: str = "cpu",
        is_captured: bool = False,
        banks: OrtBackend | None = None,
    ) -> None:
        self.form, self.capacity = graph.form, capacity
        self._device = device
        partner = share if banks is None else banks
        # sessions that share buffers are on one stream
        self._copies: Copies = open_copies(device) if partner is None else partner._copies
        settings = dict(self._copies.settings)
        if device != "cpu":
            settings |= EXACT | CUDA_SETTINGS.get(graph.attention, {})
        self._session = _open_session(
            path, threads or default_threads(), PROVIDERS[device], is_captured, settings
        )
        self._specs = {spec.name: spec for spec in (*graph.inputs, *graph.outputs)}
        _check_signature(self._session, graph, path)
        self._feed_names = [spec.name for spec in graph.inputs if not is_cache(spec)]
        lenders = {"kv.": share, BANK: banks}
        lent = {
            name: cache
            for prefix, lender in lenders.items()
            for name, cache in (() if lender is None else lender._caches.items())
            if name.startswith(prefix)
        }
        self._caches: dict[str, Any] = {
            spec.name: lent[spec.name] if spec.name in lent else self._zeros(spec.name)
            for spec in filter(is_cache, graph.inputs)
        }
        for name, cache in self._caches.items():
            assert cache.shape() == self._cache_shape(name), (name, cache.shape())
        self._bindings: dict[tuple[str, ...], Any] = {}
        self._buffers: dict[str, np.ndarray] = {}
        self._runs: _DeviceRuns | None = None
        if device != "cpu":
            self._runs = _DeviceRuns(
                self._session, graph, capacity, self._caches, device, self._copies
            )
            # nothing may be on its way when memory goes
            weakref.finalize(self, self._copies.settle).atexit = False

    @property
    def is_on_device(self) -> bool:
        """Whether outputs can be kept there, see `run_keeping`."""
        return self._runs is not None

    @property
    def bytes_to_host(self) -> int:
        """Copied from the device so far."""
        return 0 if self._runs is None else self._runs.bytes_to_host

    def has_output(self, name: str) -> bool:
        return name in self._specs

    def run_keeping(
        self, feeds: dict[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, DeviceRows]]:
        """As `run`; besides, the outputs `kept` [R, W] as rows on the device."""
        assert self._runs is not None, "on the CPU nothing is kept elsewhere"
        return self._runs.run(feeds, outputs, kept)

    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run; the arrays returned are views of buffers that the next run writes
        again."""
        if self._runs is not None:
            return self._runs.run(feeds, outputs, ())[0]
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
        shape, dtype = self._cache_shape(name), self._specs[name].dtype
        if dtype != "bfloat16":
            return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), self._device, 0)
        zeros = np.zeros(shape, np.uint16)
        value = _empty(shape, dtype, self._device)
        value.update_inplace(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zeros, BFLOAT16))
        return value

    def _cache_shape(self, name: str) -> list[int]:
        return [self.capacity if dim == "S" else int(dim) for dim in self._specs[name].shape]

    def _binding(self, outputs: tuple[str, ...]) -> Any:
        """A binding with every KV buffer in place; one per set of outputs, so that unwanted ones
        are not computed."""
        if outputs not in self._bindings:
            self._bindings[outputs] = _bind_caches(self._session, self._caches)
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


def _bind_caches(session: Any, caches: Mapping[str, Any]) -> Any:
    """A new binding with every KV buffer and bank in place; a bank may be read alone."""
    binding = session.io_binding()
    outputs = {value.name for value in session.get_outputs()}
    written = {name: cache for name, cache in caches.items() if f"{name}.out" in outputs}
    for name, cache in caches.items():
        binding.bind_ortvalue_input(name, cache)
    for name, cache in written.items():
        binding.bind_ortvalue_output(f"{name}.out", cache)
    bound = zip(binding.get_outputs(), written.values(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in bound), "a buffer is not bound in place"
    return binding


def _empty(shape: Sequence[int], dtype: str, device: str) -> Any:
    """An OrtValue of whatever is in memory."""
    kind: Any = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, device, 0)


def copied(array: np.ndarray, device: str) -> Any:
    """An OrtValue of the same content; on the CPU, if it is contiguous, in the same memory."""
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), device, 0)


# ------------------------------------------------------------------------------- on a device


class DeviceRows:
    """The first `num_rows` rows of an output [R, W] left on the device. Rows are copied to the host
    when first read, all of them by `np.asarray`; valid until the next run of the backend it came
    from."""

    def __init__(self, value: Any, num_rows: int, spec: TensorSpec, runs: _DeviceRuns) -> None:
        self.shape = (num_rows, *value.shape()[1:])
        self._value, self._spec, self._runs = value, spec, runs
        self._num_runs = runs.num_runs
        self._row_W: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, row: int) -> np.ndarray:
        """One row [W]."""
        if row not in self._row_W:
            self._require_current()
            assert 0 <= row < len(self), (row, self.shape)
            self._row_W[row] = self._runs.fetch_row(self._value, self._spec, int(row))
        return self._row_W[row]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._require_current()
        array = self._runs.fetch(self._value)[: len(self)]
        return array if dtype is None else array.astype(dtype, copy=False)

    def _require_current(self) -> None:
        assert self._num_runs == self._runs.num_runs, "read after the backend's next run"


class _Packed:
    """All feeds of a step in one buffer on the device, each at an address of its own: one copy
    brings them there."""

    def __init__(self, feeds: Mapping[str, np.ndarray], device: str, copies: Copies) -> None:
        first, end = {}, 0
        for name, feed in feeds.items():
            first[name] = end
            end += -(-feed.nbytes // ALIGNMENT) * ALIGNMENT
        self._bytes = copies.host(max(end, 1))
        self._value = _empty(self._bytes.shape, "uint8", device)
        self._ticket = -1
        self._device, self._copies = device, copies
        self._feeds = {
            name: self._bytes[first[name] :][: feed.nbytes].view(feed.dtype).reshape(feed.shape)
            for name, feed in feeds.items()
        }
        self._first = first

    def bind(self, binding: Any) -> None:
        base = self._value.data_ptr()
        for name, feed in self._feeds.items():
            address = base + self._first[name]
            binding.bind_input(name, self._device, 0, feed.dtype, feed.shape, address)

    def update(self, feeds: Mapping[str, np.ndarray]) -> None:
        self._copies.claim(self._ticket)
        for name, feed in self._feeds.items():
            feed[...] = feeds[name]
        self._ticket = self._copies.send(self._bytes, self._value)


class _Step:
    """A binding with buffers of its own for one choice of outputs and one shape of each feed.
    Addresses and shapes never change, as a CUDA graph wants."""

    def __init__(self, binding: Any, feeds: _Packed, outputs: dict[str, Any]) -> None:
        self.binding, self.feeds, self.outputs = binding, feeds, outputs
        self.num_runs = 0
        self.landing: dict[int, np.ndarray] = {}
        feeds.bind(binding)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)


class _Here(threading.local):
    """What one thread has: ONNX Runtime keeps CUDA graphs by thread."""

    def __init__(self, copies: Copies) -> None:
        # no step goes whose memory is still on its way
        self.recent: Recent[_Step] = Recent(MAX_STEPS, lambda step: copies.settle())
        # with the options that replay it; never dropped, as ONNX Runtime cannot forget a graph
        self.captured: dict[Hashable, tuple[_Step, Any]] = {}


class _DeviceRuns:
    """The runs of one session with feeds, outputs and KV buffers on the device.

    A graph of the slots form gets its mask cut to a width that holds all rows in use, as CUDA's
    GroupQueryAttention works over the mask's width ("full_buffer" needs all of it, "chain" none).
    With CUDA graphs, shapes that come again are captured, MAX_STEPS of them at most; the others run
    as they are, in the same session and on the same stream, and share with the captured ones the KV
    buffers alone. So that they come again, rows are filled up, see pad_rows.py.
    """

    def __init__(
        self,
        session: Any,
        graph: Graph,
        capacity: int,
        caches: Mapping[str, Any],
        device: str,
        copies: Copies,
    ) -> None:
        self.num_runs = self.bytes_to_host = 0
        self._session, self._graph, self._capacity = session, graph, capacity
        self._caches, self._device = caches, device
        self._is_captured = takes_cuda_graphs(session)
        self._inputs = [spec.name for spec in graph.inputs if not is_cache(spec)]
        self._outputs = {spec.name: spec for spec in graph.outputs}
        self._copies = copies
        self._here = _Here(copies)
        self._ids = itertools.count(1)  # 0 is ONNX Runtime's own
        self._num_graphs = 0
        self._eager = _run_options(-1, copies.waits)
        self._peek = session.io_binding()  # never run: it makes views of rows

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Sequence[str], kept: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], dict[str, DeviceRows]]:
        """The outputs copied to the host, and those kept."""
        feeds = {name: feeds[name] for name in self._inputs}
        sizes = axis_sizes(self._graph, {name: feed.shape for name, feed in feeds.items()})
        wider = sizes
        if self._is_captured:
            feeds, wider = pad_rows(self._graph, feeds, sizes, self._capacity)
        if self._graph.form == "slots" and self._graph.attention == "bias":
            width = mask_width(int(feeds["seqlens_k"][0]) + 1, self._capacity)
            feeds["mask"] = feeds["mask"][..., :width]
            wider = wider | {"S": width}
        self.num_runs += 1
        step = self._run(feeds, wider, tuple(dict.fromkeys((*outputs, *kept))))
        values = step.outputs
        fetched = self._copies.fetch([values[name] for name in outputs], step.landing)
        self.bytes_to_host += sum(array.nbytes for array in fetched)
        specs = self._outputs
        count = {name: shape_of(specs[name], sizes)[0] for name in values}
        return (
            {n: array[: count[n]] for n, array in zip(outputs, fetched, strict=True)},
            {n: DeviceRows(values[n], count[n], specs[n], self) for n in kept},
        )

    def fetch(self, value: Any) -> np.ndarray:
        """All of an OrtValue, on the host."""
        self._copies.settle()
        array: np.ndarray = value.numpy()
        self.bytes_to_host += array.nbytes
        return array

    def fetch_row(self, value: Any, spec: TensorSpec, row: int) -> np.ndarray:
        """One row of an output [R, W]."""
        width, dtype = value.shape()[1], np.dtype(spec.dtype)
        address = value.data_ptr() + row * width * dtype.itemsize
        self._peek.bind_output(spec.name, self._device, 0, dtype, [1, width], address)
        (view,) = self._peek.get_outputs()
        return self.fetch(view)[0]

    def _run(
        self, feeds: dict[str, np.ndarray], sizes: Mapping[str, int], names: tuple[str, ...]
    ) -> _Step:
        key, here = (names, *sorted(sizes.items())), self._here
        if key in here.captured:
            step, options = here.captured[key]
            self._start(step, feeds, options)
            return step
        step = here.recent.get(key, lambda: self._new_step(feeds, names, sizes))
        self._start(step, feeds, self._eager)
        step.num_runs += 1
        rows = max((size for axis, size in sizes.items() if axis != "S"), default=1)
        if (
            self._is_captured
            and step.num_runs > RUNS_BEFORE_CAPTURE
            and rows <= MAX_CAPTURED_ROWS
            and self._num_graphs < MAX_STEPS
        ):
            # one call: warm-up runs, the capture and a first replay
            graph_id = next(self._ids)
            self._start(step, repeated(feeds), _run_options(graph_id))
            here.captured[key] = step, _run_options(graph_id, self._copies.waits)
            self._num_graphs += 1
        return step

    def _start(self, step: _Step, feeds: Mapping[str, np.ndarray], options: Any) -> None:
        step.feeds.update(feeds)
        self._session.run_with_iobinding(step.binding, options)

    def _new_step(
        self, feeds: Mapping[str, np.ndarray], names: Sequence[str], sizes: Mapping[str, int]
    ) -> _Step:
        binding = _bind_caches(self._session, self._caches)
        specs = [self._outputs[name] for name in names]
        return _Step(
            binding,
            _Packed(feeds, self._device, self._copies),
            {spec.name: _empty(shape_of(spec, sizes), spec.dtype, self._device) for spec in specs},
        )


def mask_width(num_slots: int, capacity: int) -> int:
    """The least of 256, 512, 1024 … and the capacity that holds so many slots."""
    width = MIN_MASK
    while width < num_slots:
        width *= 2
    return min(width, capacity)


def repeated(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Feeds whose run right after that of `feeds` gives the same and leaves all KV rows as they
    are, however often: ONNX Runtime runs a graph several times before it captures it.

    Rows that the contiguous form moves are where they were moved to by then. Slots are written
    with the same rows again.
    """
    if "src" not in feeds:
        return feeds
    landed = feeds["perm"].argsort()[: len(feeds["src"])]
    return feeds | {"src": feeds["write_index"] + landed}


def _run_options(graph_id: int, waits: bool = True) -> Any:
    """graph_id: -1 = neither capture nor replay. waits: a run returns when its work is done."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


# ------------------------------------------------------------------------------- opening


def _open_session(
    path: Path,
    threads: int,
    provider: str,
    is_captured: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Any:
    """`is_captured`: with CUDA graphs, if every node runs on the GPU; else a warning says why
    not. settings: the provider's other options."""
    if provider not in ort.get_available_providers():
        raise ValueError(
            f"onnxruntime {ort.__version__} here has no {provider}: put onnxruntime-gpu in its "
            "place (pip uninstall onnxruntime; pip install 'specsplit[gpu]'), or choose another "
            "--backend"
        )
    if provider == PROVIDERS["cuda"]:
        ort.preload_dlls()  # CUDA's libraries, if they came as wheels
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.enable_mem_pattern = False  # shapes change every step
    options.log_severity_level = 3
    # target and drafter take turns: threads that go on spinning would eat the other's cores
    options.add_session_config_entry("session.force_spinning_stop", "1")
    every = dict(settings or {}) | ({"enable_cuda_graph": "1"} if is_captured else {})
    try:
        # without fallback: it would print, and hide the reason
        session = ort.InferenceSession(
            str(path), options, [provider], provider_options=[every], enable_fallback=0
        )
    except Exception as error:  # the runtime raises its own kinds, none of them public
        reason = " ".join(str(error).split())[:300]
        if is_captured and "CUDA Graph" in reason:
            log.warning("%s runs without CUDA graphs: %s", path.name, reason)
            return _open_session(path, threads, provider, False, settings)
        raise ValueError(
            f"ONNX Runtime {ort.__version__} cannot load {path.name}: {reason}"
        ) from error
    if session.get_providers()[0] != provider:  # it falls back on the CPU by itself
        raise ValueError(
            f"onnxruntime {ort.__version__} found no usable NVIDIA GPU: check the driver and CUDA "
            "libraries, or choose another --backend"
        )
    return session


def takes_cuda_graphs(session: Any) -> bool:
    """Whether a run captures or replays one, unless its options say -1."""
    options = session.get_provider_options().get(PROVIDERS["cuda"], {})
    return bool(options.get("enable_cuda_graph") == "1")


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
