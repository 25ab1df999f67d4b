"""Imitates the part of ONNX Runtime that our CUDA backend uses, over host memory.

Whatever the real one leaves undefined, refuses or does silently wrong is an error here. Device
memory is full of junk when new, and gone when nobody holds it. A session computes on the CPU,
reading and writing at the addresses bound. On a stream of ours (fake_tensorrt.Runtime) work is done
only when it is waited for, so that nothing may be read or written too early. Capturing is as in
ONNX Runtime 1.31: two runs and a replay within one call, by graph id and thread. A replay with
other addresses or shapes, which the real one would ignore, is refused.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_tensorrt
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fake_tensorrt import view

from spec_runtime.backends import session
from spec_runtime.backends.cuda import backend as cuda
from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.copies import TYPES, StreamCopies

PROVIDER = "CUDAExecutionProvider"
HOST_INPUTS = ("lane_rows",)  # what kernels of CUDA read on the host: the sizes of a Split
# tests/runtime/test_first_contact.py compares it with what the real one says.
REFUSAL = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as "
    "requested by the user  as all compute graph nodes have not been partitioned to the "
    "CUDAExecutionProvider"
)


class Device:
    """The GPU: its memory, and counts of what was done on it."""

    def __init__(self) -> None:
        self.runtime = Runtime(self)
        self.blocks = self.runtime.device  # address -> memory
        self.bytes_to_host = self.num_to_device = self.num_waits = 0
        self.num_eager = self.num_captured = self.num_replayed = 0
        self.uncaptured: tuple[str, ...] = ()  # how files end whose graphs cannot be captured
        self.shapes: list[dict[str, tuple[int, ...]]] = []  # of the inputs, each time it computed
        self.settings: list[dict[str, str]] = []  # of each session
        self.written: list[Bound] = []  # by runs on a stream, until that is waited for

    def allocate(self, nbytes: int) -> int:
        block = (ctypes.c_byte * nbytes)()
        address = ctypes.addressof(block)
        ctypes.memset(address, 0xAB, nbytes)
        self.blocks[address] = block
        return address

    def is_written(self, bound: Bound) -> bool:
        """Returns whether a run that nobody has waited for writes there."""
        return any(
            each.address < bound.address + bound.nbytes
            and bound.address < each.address + each.nbytes
            for each in self.written
        )

    def require(self, bound: Bound) -> None:
        """Asserts that its memory is still on the device, if it belongs there."""
        if isinstance(bound, HostBound):
            return
        base, end = bound.address, bound.address + bound.nbytes
        if base not in self.blocks:  # a view from a block's middle
            base = max((b for b in self.blocks if b < bound.address), default=0)
        assert base in self.blocks, bound
        assert end <= base + len(self.blocks[base]), bound


class Runtime(fake_tensorrt.Runtime):
    """A fake of cuda.bindings over the device's memory, which counts copies and waits."""

    def __init__(self, counts: Device) -> None:
        super().__init__()
        self._counts = counts

    def cudaMemcpyAsync(
        self, to: int, source: int, nbytes: int, kind: int, stream: int
    ) -> tuple[int]:
        if kind == self.cudaMemcpyKind.cudaMemcpyDeviceToHost:
            self._counts.bytes_to_host += nbytes
        else:
            self._counts.num_to_device += 1
        return super().cudaMemcpyAsync(to, source, nbytes, kind, stream)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self._counts.num_waits += 1
        self._counts.written.clear()
        return super().cudaStreamSynchronize(stream)


class Bound(NamedTuple):
    """One piece of memory that a graph was given: address, shape and type."""

    address: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class HostBound(Bound):
    """An array on the host, which a kernel reads when its work is put on the stream."""


class OrtValue:
    """A tensor on the device; without `owner` it is a view of another's memory."""

    device: Device  # of the subclass that `module` makes

    def __init__(self, bound: Bound, is_owner: bool) -> None:
        self.bound, self._is_owner = bound, is_owner

    def __del__(self) -> None:
        if self._is_owner:
            self.device.blocks.pop(self.bound.address, None)

    @classmethod
    def ortvalue_from_shape_and_type(
        cls, shape: Sequence[int], element_type: Any, device_type: str, device_id: int
    ) -> OrtValue:
        assert (device_type, device_id) == ("cuda", 0)
        bound = Bound(0, tuple(shape), str(np.dtype(element_type)))
        return cls(bound._replace(address=cls.device.allocate(max(bound.nbytes, 1))), True)

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray, device_type: str, device_id: int) -> OrtValue:
        value = cls.ortvalue_from_shape_and_type(array.shape, array.dtype, device_type, device_id)
        value.update_inplace(array)
        return value

    def update_inplace(self, data: np.ndarray) -> None:
        assert data.flags.c_contiguous
        assert (data.shape, str(data.dtype)) == self.bound[1:], (data.shape, data.dtype, self.bound)
        self.device.require(self.bound)
        assert not self.device.runtime.is_busy, "it would not wait for our stream"
        self.device.num_to_device += 1
        view(*self.bound)[...] = data

    def numpy(self) -> np.ndarray:
        self.device.require(self.bound)
        assert not self.device.is_written(self.bound), "it would not wait for our stream"
        self.device.bytes_to_host += self.bound.nbytes
        return view(*self.bound).copy()

    def data_type(self) -> str:
        names = {name: kind for kind, name in TYPES.items()}
        return names[self.bound.dtype]

    def shape(self) -> list[int]:
        return list(self.bound.shape)

    def data_ptr(self) -> int:
        return self.bound.address


class SessionOptions(ort.SessionOptions):  # type: ignore[misc]
    """Real options, which keep the weights given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, OrtValue] = {}

    def add_initializer(self, name: str, value: OrtValue) -> None:
        assert not value._is_owner, "Buffer containing the initializer must be owned by the user."
        self.weights[name] = value


def _weights_of(path: str) -> dict[str, np.ndarray]:
    """Returns the weights of a graph that lie in other files."""
    weights = onnx.load(path, load_external_data=False).graph.initializer
    outside = [w for w in weights if w.data_location == onnx.TensorProto.EXTERNAL]
    folder = str(Path(path).parent)
    return {w.name: onnx.numpy_helper.to_array(w, folder) for w in outside}


class IOBinding:
    def __init__(self, session: InferenceSession) -> None:
        self.session = session
        self.inputs: dict[str, OrtValue] = {}
        self.outputs: dict[str, OrtValue] = {}

    def bind_ortvalue_input(self, name: str, value: OrtValue) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: OrtValue) -> None:
        self.outputs[name] = value

    def bind_input(self, name: str, *memory: Any) -> None:
        self.inputs[name] = self._view(*memory)

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        assert name in HOST_INPUTS, "it would be copied to the device now, and never again"
        bound = HostBound(array.ctypes.data, array.shape, str(array.dtype))
        self.inputs[name] = self.session.module.OrtValue(bound, False)

    def bind_output(self, name: str, *memory: Any) -> None:
        assert name in self.session.output_names, name
        self.outputs[name] = self._view(*memory)

    def _view(
        self,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> OrtValue:
        assert (device_type, device_id) == ("cuda", 0)
        if isinstance(element_type, int):
            element_type = onnx.helper.tensor_dtype_to_np_dtype(element_type)
        bound = Bound(buffer_ptr, tuple(shape), str(np.dtype(element_type)))
        value: OrtValue = self.session.module.OrtValue(bound, False)
        return value

    def get_outputs(self) -> list[OrtValue]:
        return list(self.outputs.values())

    @property
    def on_host(self) -> dict[str, bytes]:
        """Returns what the inputs on the host hold."""
        values = {n: v.bound for n, v in self.inputs.items() if isinstance(v.bound, HostBound)}
        return {name: view(*bound).tobytes() for name, bound in values.items()}

    @property
    def signature(self) -> tuple[dict[str, Bound], dict[str, Bound]]:
        return (
            {name: value.bound for name, value in self.inputs.items()},
            {name: value.bound for name, value in self.outputs.items()},
        )


class InferenceSession:
    module: Any  # of the subclass that `module` makes
    device: Device

    def __init__(
        self,
        path: str | bytes,
        options: SessionOptions | None = None,
        providers: Sequence[str] = (),
        provider_options: Sequence[dict[str, str]] = (),
        enable_fallback: int = 1,
    ) -> None:
        if isinstance(path, bytes):  # never run, see session.Viewer
            self.output_names = ["y"]
            return
        assert options is not None
        assert providers == [PROVIDER]
        assert not enable_fallback, "it would run on the CPU"
        self._settings = {"device_id": "0", "enable_cuda_graph": "0"} | provider_options[0]
        if self.takes_graphs and path.endswith(self.device.uncaptured):
            raise RuntimeError(REFUSAL)
        self.device.settings.append(provider_options[0])
        self._weights = options.weights
        for name, content in _weights_of(path).items():
            self.device.require(self._weights[name].bound)
            assert np.array_equal(view(*self._weights[name].bound), content), name
        self._real = ort.InferenceSession(str(Path(path)), options, ["CPUExecutionProvider"])
        self.output_names = [output.name for output in self._real.get_outputs()]
        self._graphs: dict[tuple[int, int], Any] = {}

    @property
    def takes_graphs(self) -> bool:
        return self._settings["enable_cuda_graph"] == "1"

    def get_inputs(self) -> Any:
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        return self._real.get_outputs()

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        return {PROVIDER: self._settings, "CPUExecutionProvider": {}}

    def io_binding(self) -> IOBinding:
        return IOBinding(self)

    def run_with_iobinding(self, binding: IOBinding, run_options: ort.RunOptions) -> None:
        assert binding.session is self
        graph_id = int(run_options.get_run_config_entry("gpu_graph_id"))
        assert graph_id != 0, "reserved"
        if not self.takes_graphs or graph_id == -1:
            self.device.num_eager += 1
            self._enqueue(binding.signature, run_options)
            return
        key = (threading.get_ident(), graph_id)
        if key not in self._graphs:
            self.device.num_captured += 1
            self._graphs[key] = binding.signature, binding.on_host
            assert self._waits(run_options), "not while it captures"
            for _ in range(2):
                self._enqueue(binding.signature, run_options)
        else:
            self.device.num_replayed += 1
        signature, on_host = self._graphs[key]
        assert signature == binding.signature, "a graph replayed on other buffers"
        assert on_host == binding.on_host, "captured with what was on the host then"
        self._enqueue(signature, run_options)

    def _waits(self, run_options: ort.RunOptions) -> bool:
        try:
            said = run_options.get_run_config_entry("disable_synchronize_execution_providers")
        except RuntimeError:  # the options have no such entry
            said = "0"
        return bool(said != "1")

    def _enqueue(
        self, bound: tuple[dict[str, Bound], dict[str, Bound]], run_options: ort.RunOptions
    ) -> None:
        if self._settings.get("user_compute_stream") != str(fake_tensorrt.STREAM):
            assert self._waits(run_options), "who shares no stream has to wait"
            self._compute(*bound)
            return
        self.device.written += bound[1].values()
        self.device.runtime.put(lambda: self._compute(*bound))
        if self._waits(run_options):
            self.device.runtime.cudaStreamSynchronize(fake_tensorrt.STREAM)

    def _compute(self, inputs: dict[str, Bound], outputs: dict[str, Bound]) -> None:
        assert set(inputs) == {value.name for value in self._real.get_inputs()}
        for bound in (*inputs.values(), *outputs.values()):
            self.device.require(bound)
        for value in self._weights.values():
            self.device.require(value.bound)
        self.device.shapes.append({name: bound.shape for name, bound in inputs.items()})
        feeds = {name: view(*bound).copy() for name, bound in inputs.items()}
        for name, array in zip(outputs, self._real.run(list(outputs), feeds), strict=True):
            assert (array.shape, str(array.dtype)) == outputs[name][1:], (name, outputs[name])
            view(*outputs[name])[...] = array


def stream_copies(device: Device) -> StreamCopies:
    return StreamCopies(Cuda(device.runtime))


def install(patch: pytest.MonkeyPatch) -> Device:
    """Puts the fake in the place of ONNX Runtime and of CUDA's libraries; returns its device."""
    session.saturates()  # which the real one finds out, once
    fake, device = module()
    patch.setattr(cuda, "open_copies", lambda: stream_copies(device))
    patch.setattr(session, "ort", fake)
    patch.setattr(session, "require_gpu", lambda: None)
    return device


def module() -> tuple[Any, Device]:
    """Returns what stands in for the module onnxruntime, and its fresh device."""
    device = Device()
    fake = SimpleNamespace(
        __version__=ort.__version__,
        SessionOptions=SessionOptions,
        ExecutionMode=ort.ExecutionMode,
        RunOptions=ort.RunOptions,
        set_default_logger_severity=lambda level: None,
        get_available_providers=lambda: [PROVIDER, "CPUExecutionProvider"],
    )
    fake.OrtValue = type("OrtValue", (OrtValue,), {"device": device})
    fake.InferenceSession = type(
        "InferenceSession", (InferenceSession,), {"device": device, "module": fake}
    )
    return fake, device
