"""Opens ONNX Runtime sessions and makes the buffers that they read and write in place.

Every import of onnxruntime goes through this file, so that it never sends telemetry unasked.
"""

import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spec_runtime.backends.base import Backend
from spec_runtime.backends.cuda.captures import capturing, free_later
from spec_runtime.backends.cuda.copies import Copies, StreamCopies
from spec_runtime.backends.cuda.libraries import require_gpu
from spec_runtime.backends.shapes import KV, is_cache
from spec_runtime.backends.shared_sessions import shared_session
from spec_runtime.bundle.manifest import BANK, BundleError, Graph, TensorSpec, written_name
from spec_runtime.bundle.memory import buffer_shape
from spec_runtime.errors import OutOfMemoryError, UserError
from spec_runtime.files.installed import install, program
from spec_runtime.files.machine import default_threads
from spec_runtime.files.mapping import brief
from spec_runtime.kernels.library import instructions, library
from spec_runtime.kernels.rewrite import with_operators

# At import, ONNX Runtime 1.29 and later would make a device id and queue events for Microsoft under
# the user's cache folder. A value that the user has set, such as 0, is kept.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

try:
    import onnxruntime as ort
except ImportError as error:
    raise UserError(f"onnxruntime is not installed: {install('cpu')}") from error


PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# ONNX Runtime's names of the types that a manifest may name
ORT_TYPES = {
    **{"float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"},
    **{f"{sign}int{n}": f"tensor({sign}int{n})" for sign in ("", "u") for n in (4, 8, 16, 32, 64)},
    "bool": "tensor(bool)",
}
EXACT = {"use_tf32": "0"}  # computes float32 products in float32, which fp32's promise needs
# Provider settings by a graph's attention. For Attention-24 with a mask, the memory-efficient
# kernel would first copy all key/value rows once per query head; 16 is AttentionBackend::MATH, with
# only the unfused kernels.
CUDA_SETTINGS = {"full_buffer": {"sdpa_kernel": "16"}}
# Older int8 bundles share a zero point, which ONNX Runtime cannot convert twice.
SHARED_ZERO_POINT = " on this CPU without VNNI, build the bundle again"
NO_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "bad allocation")  # the same
REFUSED_CAPTURE = "cannot use the graph capture feature"  # in ONNX Runtime's words
BFLOAT16 = 16  # in onnx.TensorProto; numpy has no such type
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
NO_GRAPH = "-1"  # the graph id of runs that ONNX Runtime neither captures nor replays

log = logging.getLogger("spec_runtime")


# ------------------------------------------------------------------------------- sessions


@dataclass(frozen=True)
class SessionOptions:
    """Says how a session runs: where, on how many threads, and with which provider settings.

    `has_cuda_graphs` asks for CUDA graphs, which need every node on the GPU; a graph that has
    others runs without. `settings` are added to those that every session
    on the device has. `weights` are used in place of those in the graph's files, by
    name (see weights.DeviceWeights).
    """

    threads: int
    device: str = "cpu"
    has_cuda_graphs: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)

    @property
    def provider(self) -> str:
        return PROVIDERS[self.device]

    @property
    def provider_settings(self) -> dict[str, str]:
        """Returns all settings of the session's provider."""
        if self.device != "cuda":
            return dict(self.settings)
        capture = {"enable_cuda_graph": str(int(self.has_cuda_graphs))}
        return EXACT | capture | dict(self.settings)


def open_session(path: Path, graph: Graph, options: SessionOptions) -> Any:
    """Opens the ONNX file of `graph`.

    Sessions on the CPU are shared, see shared_sessions.py.

    Runs without CUDA graphs, and warns, if ONNX Runtime refuses them. Raises
    UserError if the provider, a library or a GPU is missing, or if the file's inputs and outputs
    differ from the manifest's.
    """
    provider = options.provider
    prepare(options.device)
    if options.device == "cuda":
        settings = CUDA_SETTINGS.get(graph.attention, {}) | dict(options.settings)
        options = replace(options, settings=settings)
    try:
        session = _open_shared(path, options)
    except Exception as error:  # ONNX Runtime raises its own kinds, none of them public
        if options.has_cuda_graphs and REFUSED_CAPTURE in str(error):
            log.warning("%s runs without CUDA graphs: %s", path.name, brief(error))
            return open_session(path, graph, replace(options, has_cuda_graphs=False))
        require_no_memory_error(f"to load {path.name}", error)
        raise BundleError(
            f"ONNX Runtime {ort.__version__} cannot load {path.name}"
            f"{SHARED_ZERO_POINT if 'AddInitializedOrtValue' in str(error) else ''}: {brief(error)}"
        ) from error
    if session.get_providers()[0] != provider:  # it falls back on the CPU by itself
        raise UserError(
            f"onnxruntime {ort.__version__} did not load its {provider}, though CUDA 13's "
            "libraries and a GPU are here: it may be built for another version of CUDA; run "
            f"{install('gpu')} in a fresh environment, or choose another --backend"
        )
    _check_signature(session, graph, path)
    return session


def prepare(device: str) -> None:
    """Makes ONNX Runtime ready for sessions and values on the device.

    Raises UserError if this ONNX Runtime is not for the device, a library or
    the GPU is missing, or the environment asks for native operators that are not here.
    """
    if device == "cpu":
        instructions()
    if PROVIDERS[device] not in ort.get_available_providers():
        raise UserError(
            f"onnxruntime {ort.__version__} here has no {PROVIDERS[device]}: put onnxruntime-gpu "
            f"in its place ({program('pip')} uninstall onnxruntime; {install('gpu')}), or choose "
            "another --backend"
        )
    if device == "cuda":
        require_gpu()
        # With cuDNN installed, ONNX Runtime would try cuDNN's attention first, whose plans are
        # built on the way, also while a graph is captured. A value set by the user is kept.
        os.environ.setdefault("ORT_ENABLE_CUDNN_FLASH_ATTENTION", "0")
        _quieten()


@cache
def _quieten() -> None:
    """Leaves ONNX Runtime's warnings out from now on; errors stay.

    Each ScatterND would warn of rows that are written twice, on a log that no session's level
    reaches. The level cannot be read, so it is set once: a program that sets one of its own
    afterwards keeps that.
    """
    ort.set_default_logger_severity(3)


def _open_shared(path: Path, options: SessionOptions) -> Any:
    if options.device != "cpu" or options.weights or options.settings:
        return _open(path, options)

    native = instructions()

    def open_new() -> Any:
        if native is not None:
            try:
                model = with_operators(path, options.threads)
                if model is not None:
                    session = _open(path, options, model=model.data)
                    session.has_exact_rows = model.has_exact_rows
                    return session
            except Exception as error:  # ONNX Runtime's own kinds
                log.warning("%s runs without native operators: %s", path.name, brief(error))
        return _open(path, options)

    return shared_session(path, (options.threads, native), open_new)


def _open(path: Path, options: SessionOptions, model: bytes | None = None) -> Any:
    """Opens the ONNX file at `path`, or `model` made of it, which has native operators."""
    chosen = ort.SessionOptions()
    if model is not None:
        chosen.register_custom_ops_library(str(library()))
        chosen.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    chosen.intra_op_num_threads = options.threads
    chosen.inter_op_num_threads = 1
    chosen.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    chosen.enable_mem_pattern = False  # shapes change every step
    chosen.log_severity_level = 4  # errors come as exceptions, with the same text
    # Target and drafter take turns: threads that go on spinning would eat the other's cores.
    chosen.add_session_config_entry("session.force_spinning_stop", "1")
    # A longer spin gains nothing where no other process is busy, and costs a third where one is.
    chosen.add_session_config_entry("session.intra_op.spin_duration_us", "20")
    if options.threads > default_threads():  # a spinning one has a CPU that another waits for
        chosen.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # ONNX Runtime also has a format of its own, in which operators would go unchecked.
    chosen.add_session_config_entry("session.load_model_format", "ONNX")
    _keep_products_exact(chosen)
    for name, value in options.weights.items():
        chosen.add_initializer(name, value)
    # Without ONNX Runtime's own fallback, which would print and hide the reason.
    with capturing() if options.device == "cuda" else nullcontext():  # it waits for all streams
        return ort.InferenceSession(
            str(path) if model is None else model,
            chosen,
            [options.provider],
            provider_options=[options.provider_settings],
            enable_fallback=0,
        )


# A graph of one MatMulInteger, x u8[M, K] · w i8[K, N] → y i32[M, N], as ONNX writes it.
_PRODUCT = (
    b'\x08\x08:>\n\x18\n\x01x\n\x01w\x12\x01y"\rMatMulInteger\x12\x01gZ\t\n\x01x\x12\x04\n\x02\x08'
    b"\x02Z\t\n\x01w\x12\x04\n\x02\x08\x03b\t\n\x01y\x12\x04\n\x02\x08\x06B\x04\n\x00\x10\x15"
)


@cache
def saturates() -> bool:
    """Returns whether this CPU adds pairs of u8·i8 products in 16 bits, where large ones are cut
    off, as AVX2 does without VNNI."""
    session = ort.InferenceSession(_PRODUCT, providers=[PROVIDERS["cpu"]])
    largest = {"x": np.full((1, 2), 255, np.uint8), "w": np.full((2, 1), 127, np.int8)}
    return bool(session.run(None, largest)[0].item() != 2 * 255 * 127)


def _keep_products_exact(chosen: Any) -> None:
    """Has int8 weights turned into u8 ones where u8·i8 products saturate: u8·u8 ones never do.

    Where they do not, the setting would only cost speed.
    """
    if saturates():
        chosen.add_session_config_entry("session.x64quantprecision", "1")


def _check_signature(session: Any, graph: Graph, path: Path) -> None:
    """Raises UserError unless the session's inputs and outputs are the manifest's: their names,
    types and shapes. An output's size may be open on either side, as ONNX Runtime infers some."""
    for kind, got, expected, is_input in (
        ("inputs", session.get_inputs(), graph.inputs, True),
        ("outputs", session.get_outputs(), graph.outputs, False),
    ):
        names, specs = {value.name for value in got}, {spec.name: spec for spec in expected}
        if names != set(specs):
            raise UserError(
                f"{path.name} has {kind} {sorted(names)!r:.300}, the manifest says "
                f"{sorted(specs)!r:.300}: build the bundle again"
            )
        for value in got:
            spec = specs[value.name]
            fits = len(value.shape) == len(spec.shape) and all(
                size == there
                if isinstance(size, int) and isinstance(there, int)
                else not is_input or isinstance(size, int) == isinstance(there, int)
                for size, there in zip(spec.shape, value.shape, strict=True)
            )
            if value.type != ORT_TYPES.get(spec.dtype) or not fits:
                raise UserError(
                    f"{path.name} has {value.name} as {value.type} of shape {value.shape}, the "
                    f"manifest says {spec.dtype} of shape {list(spec.shape)}: build the bundle "
                    "again"
                )


class NamingGraph:
    """Turns what ONNX Runtime raises in a run into a BundleError that names the graph, or into an
    OutOfMemoryError; into a DeviceLostError where the device of `copies` is lost.

    A graph may fail on feeds that its signature allows: it adds what does not fit, or finds no
    memory. Its own kinds of error are not public. Used by `with` around any number of runs.
    """

    def __init__(self, file: str, copies: StreamCopies | None = None) -> None:
        self._file, self._copies = file, copies

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            if self._copies is not None:
                self._copies.require_device()
            require_no_memory_error(f"to run {self._file}", error)
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot run {self._file}: "
                f"{brief(error)}; build the bundle again"
            ) from error


def require_no_memory_error(what: str, error: Exception) -> None:
    """Raises OutOfMemoryError if this one says that memory ended; ONNX Runtime has no kind for
    it."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        raise OutOfMemoryError(what, brief(error, 200)) from error


def takes_cuda_graphs(session: Any) -> bool:
    """Returns whether all nodes are on the GPU, so that runs can be captured, and it is wanted."""
    options = session.get_provider_options().get(PROVIDERS["cuda"], {})
    return bool(options.get("enable_cuda_graph") == "1")


@cache
def run_options() -> Any:
    """Returns the options of a run that returns when its work is queued."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", NO_GRAPH)
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


# ------------------------------------------------------------------------------- buffers


def empty_value(shape: Sequence[int], dtype: str, device: str) -> Any:
    """Returns an OrtValue whose content is whatever is in memory."""
    kind: Any = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    try:
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, device, 0)
    except Exception as error:  # ONNX Runtime's own kinds
        require_no_memory_error(f"for an array of {list(shape)} values", error)
        raise


def zero_value(shape: Sequence[int], dtype: str, device: str) -> Any:
    """Returns an OrtValue of zeros, in memory of its own."""
    if dtype != "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), device, 0)
    value = empty_value(shape, dtype, device)
    zero = np.zeros(shape, np.uint16)
    value.update_inplace(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(zero, BFLOAT16))
    return value


# A graph of one Identity from x to y, as ONNX writes it.
_IDENTITY = (
    b'\x08\n:+\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\t\n\x01x\x12\x04\n\x02\x08\x01b\t\n'
    b"\x01y\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x15"
)


class Viewer:
    """Makes OrtValues over memory that others own, by the binding of a session that never runs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._binding = ort.InferenceSession(_IDENTITY, providers=[PROVIDERS["cpu"]]).io_binding()

    def view(self, address: int, shape: Sequence[int], element_type: int | np.dtype) -> Any:
        """Returns a tensor of this shape at `address`.

        `element_type` is numpy's, or a number of ONNX's enumeration TensorProto.DataType.
        """
        self._binding.bind_output("y", self._device, 0, element_type, list(shape), address)
        (value,) = self._binding.get_outputs()
        return value


# A graph that gathers rows, as ONNX writes it: x i32[G, S, W], i i64[S] → y = x[:, i]. Identity
# puts them where x was, once all are gathered.
_GATHER = (
    b'\x08\n:V\n\x1e\n\x01x\n\x01i\x12\x01g"\x06Gather*\x0b\n\x04axis\x18\x01\xa0\x01\x02\n\x10'
    b'\n\x01g\x12\x01y"\x08Identity\x12\x01gZ\t\n\x01x\x12\x04\n\x02\x08\x06Z\t\n\x01i\x12\x04'
    b"\n\x02\x08\x07b\t\n\x01y\x12\x04\n\x02\x08\x06B\x02\x10\x15"
)


class RowMoves:
    """Moves rows of buffers [..., S, W] on their device, in the order of its stream."""

    def __init__(self, device: str, copies: Copies) -> None:
        settings = copies.settings if isinstance(copies, StreamCopies) else {}
        chosen = ort.SessionOptions()
        chosen.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        with capturing() if device == "cuda" else nullcontext():
            self._session = ort.InferenceSession(
                _GATHER, chosen, [PROVIDERS[device]], provider_options=[settings]
            )
        self._device, self._copies, self._viewer = device, copies, Viewer(device)
        self._order: Any = None  # what the last move on the stream reads

    def move(self, buffers: Sequence[Any], order_S: np.ndarray) -> None:
        """Has slot s hold what was in slot `order_S[s]`, in each of these buffers."""
        self._order = ort.OrtValue.ortvalue_from_numpy(order_S, self._device, 0)
        for value in buffers:
            *outer, S, _ = value.shape()
            G = int(np.prod(outer))
            words = value.tensor_size_in_bytes() // (4 * G * S)
            rows = self._viewer.view(value.data_ptr(), (G, S, words), np.dtype(np.int32))
            binding = self._session.io_binding()
            binding.bind_ortvalue_input("x", rows)
            binding.bind_ortvalue_input("i", self._order)
            binding.bind_ortvalue_output("y", rows)
            self._session.run_with_iobinding(binding, run_options())
        if isinstance(self._copies, StreamCopies):
            self._copies.is_idle = False

    def close(self) -> None:
        """Lets the session and its memory go, once all moves are done."""
        self._copies.settle()
        del self._session, self._order


def bind_buffers(session: Any, buffers: Mapping[str, Any]) -> Any:
    """Returns a new binding with every KV buffer and bank in place.

    Each is bound as an input and, where the graph writes it, as the output `written_name` too.
    """
    binding = session.io_binding()
    outputs = {value.name for value in session.get_outputs()}
    written = {name: value for name, value in buffers.items() if written_name(name) in outputs}
    for name, value in buffers.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in written.items():
        binding.bind_ortvalue_output(written_name(name), value)
    bound = zip(binding.get_outputs(), written.values(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in bound), "a buffer is not bound in place"
    return binding


class Lender(Protocol):
    """Lends buffers, see OrtBackend: one, or several lanes together."""

    @property
    def buffers(self) -> Mapping[str, Any]: ...

    @property
    def copies(self) -> Copies: ...


class OrtBackend(ABC):
    """A session with its KV buffers [1, G, capacity, Dh] and banks [R, W], which it lends.

    `buffers` holds them as OrtValues by the names of the graph's inputs. They start at zero, for
    0 · NaN would poison a row. Sessions that borrow some must use these `copies` too: on CUDA they
    are on one stream then. A graph that appends has an `append_mover`, which is `move_rows`.
    """

    form: str
    capacity: int
    buffers: Mapping[str, Any]
    copies: Copies

    def take_buffers(
        self, graph: Graph, device: str, share: Lender | None, banks: Lender | None
    ) -> None:
        """Makes or borrows the buffers of its graph, see `open_buffers`."""
        self.append_mover = self.move_rows if graph.attention == "append" else None
        self.buffers = open_buffers(graph, self.capacity, device, share, banks)
        self._device = device
        self._moves: RowMoves | None = None
        lent = tuple(prefix for prefix, by in ((KV, share), (BANK, banks)) if by is not None)
        self._own = [
            self.buffers[spec.name]
            for spec in graph.inputs
            if is_cache(spec) and spec.shape[-2] == "S" and not spec.name.startswith(lent)
        ]

    def move_rows(self, slot_T: np.ndarray) -> None:
        """Brings the rows in these slots to slots 0 … T - 1, in the buffers and banks of its own;
        what other rows hold is left open."""
        if self._moves is None:
            self._moves = RowMoves(self._device, self.copies)
            weakref.finalize(self, free_later, self._moves.close).atexit = False
        order_S = np.arange(self.capacity)
        order_S[: len(slot_T)] = slot_T
        self._moves.move(self._own, order_S)

    @property
    def is_warm(self) -> bool:
        """Says whether the last run took no longer than others like it will."""
        return True

    @abstractmethod
    def run(self, feeds: dict[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """See Backend.run."""

    def borrow(self, buffers: Mapping[str, Any]) -> None:
        """Reads and writes these buffers from now on. The mapping has to live as long as the
        backend, which keeps what it binds by the mapping's identity."""
        self.buffers = buffers


def as_lender(backend: Backend) -> OrtBackend:
    """Returns the backend as one that lends its buffers; only those on ONNX Runtime do."""
    assert isinstance(backend, OrtBackend), backend
    return backend


def open_buffers(
    graph: Graph, capacity: int, device: str, share: Lender | None, banks: Lender | None
) -> dict[str, Any]:
    """Returns the graph's KV buffers and banks by name.

    KV buffers that `share` has by the same name are borrowed from it, and banks from `banks`; the
    others are made.
    """
    lent: dict[str, Any] = {}
    for prefix, lender in ((KV, share), (BANK, banks)):
        if lender is not None:
            lent |= {n: value for n, value in lender.buffers.items() if n.startswith(prefix)}
    buffers: dict[str, Any] = {}
    for spec in filter(is_cache, graph.inputs):
        shape = list(buffer_shape(spec, capacity))
        value = lent[spec.name] if spec.name in lent else _zeros(shape, spec, device)
        is_alike = value.shape() == shape and value.data_type() == ORT_TYPES[spec.dtype]
        if not is_alike:
            raise UserError(
                f"{graph.file}: got buffer {spec.name} as {spec.dtype} of shape {shape}, expected "
                f"{value.data_type()} of shape {value.shape()}, as it is shared; build the bundle "
                "again"
            )
        buffers[spec.name] = value
    return buffers


def _zeros(shape: list[int], spec: TensorSpec, device: str) -> Any:
    """Returns a new buffer of zeros; raises UserError if there is no memory for it."""
    try:
        return zero_value(shape, spec.dtype, device)
    except Exception as error:  # numpy's MemoryError and ValueError, ONNX Runtime's own kinds
        raise UserError(
            f"got no memory for buffer {spec.name} of shape {shape}: "
            f"{brief(error, 200)}; build with a smaller --max-length"
        ) from error
