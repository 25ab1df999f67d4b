"""Tests that weights lie on the device once, and that sessions take what is lent to them."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_cuda import DEVICE, HostCuda

from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.copies import StreamCopies
from spec_runtime.backends.cuda.weights import DeviceWeights
from spec_runtime.backends.layout import ALIGNMENT
from spec_runtime.backends.session import NamingGraph, SessionOptions, Viewer, open_session
from spec_runtime.bundle.manifest import BundleError, Graph, TensorSpec
from spec_runtime.bundle.onnx_file import ExternalWeight, read_outline
from spec_runtime.errors import DeviceLostError, OutOfMemoryError, UserError

onnx = pytest.importorskip("onnx")

FLOAT, HALF = 1, 10
CONTENT = np.arange(1000, dtype=np.float32)
# name, element type, shape, first byte and number of bytes in weights.bin
TABLE = ("table", FLOAT, (3, 2), 0, 24)
SCALE = ("scale", FLOAT, (1, 2), 24, 8)
OTHER = ("scale", FLOAT, (1, 2), 32, 8)


def write_graph(path: Path, *weights: tuple[Any, ...]) -> Path:
    """Writes a graph x * scale whose weights are in weights.bin beside it, made if missing."""
    h, tensors = onnx.helper, []
    for name, element_type, shape, offset, length in weights:
        tensor = onnx.TensorProto(name=name, data_type=element_type, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": "weights.bin", "offset": offset, "length": length}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    ends = [h.make_tensor_value_info(name, FLOAT, ["N", 2]) for name in "xy"]
    node = h.make_node("Mul", ["x", "scale"], ["y"])
    graph = h.make_graph([node], "g", ends[:1], ends[1:], initializer=tensors)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    if not (path.parent / "weights.bin").exists():
        (path.parent / "weights.bin").write_bytes(CONTENT.tobytes())
    return path


@pytest.fixture
def copies(device: HostCuda) -> StreamCopies:
    return StreamCopies(Cuda(device))


def num_bytes(device: HostCuda) -> int:
    return sum(len(block) for place, block in device.memory.values() if place == DEVICE)


def test_graphs_that_name_the_same_bytes_share_them(
    tmp_path: Path, device: HostCuda, copies: StreamCopies
) -> None:
    first = DeviceWeights(write_graph(tmp_path / "a.onnx", TABLE, SCALE), "cuda", copies)
    assert num_bytes(device) == 2 * ALIGNMENT
    renamed = ("draft.table", *TABLE[1:])
    second = DeviceWeights(write_graph(tmp_path / "b.onnx", renamed, OTHER), "cuda", copies)
    assert num_bytes(device) == 3 * ALIGNMENT, "the table is there twice"
    assert second.values["draft.table"].data_ptr() == first.values["table"].data_ptr()
    assert second.values["scale"].data_ptr() != first.values["scale"].data_ptr()
    del first
    gc.collect()
    assert second.values["draft.table"].numpy().tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second.values["scale"].numpy().tolist() == [[8, 9]]


def test_large_weights_are_sent_in_pieces(
    tmp_path: Path, device: HostCuda, copies: StreamCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_runtime.backends.cuda.weights.STAGING_BYTES", 1000)
    whole = ("scale", FLOAT, (500, 2), 0, 4000)
    weights = DeviceWeights(write_graph(tmp_path / "a.onnx", whole), "cuda", copies)
    assert np.array_equal(weights.values["scale"].numpy().ravel(), CONTENT)


def test_a_gpu_without_room_is_one_line(
    tmp_path: Path, device: HostCuda, copies: StreamCopies
) -> None:
    device.is_full = True
    line = r"^got no room on the GPU for 0 MB of weights \(.+\): end other programs there"
    with pytest.raises(UserError, match=line):
        DeviceWeights(write_graph(tmp_path / "a.onnx", SCALE), "cuda", copies)


def test_a_file_that_was_written_anew_is_read_anew(
    tmp_path: Path, device: HostCuda, copies: StreamCopies
) -> None:
    path = write_graph(tmp_path / "a.onnx", SCALE)
    old = DeviceWeights(path, "cuda", copies)
    (tmp_path / "weights.bin").write_bytes((CONTENT + 1).tobytes())
    os.utime(tmp_path / "weights.bin", ns=(1, 1))
    new = DeviceWeights(path, "cuda", copies)
    assert old.values["scale"].numpy().tolist() == [[6, 7]]
    assert new.values["scale"].numpy().tolist() == [[7, 8]]


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(("scale", FLOAT, (1, 2), 3996, 8), id="beyond the end"),
        pytest.param(("scale", FLOAT, (1, 2), 0, 4), id="too short for its shape"),
        pytest.param(("scale", HALF, (1, 2), 0, 8), id="too long for its type"),
        pytest.param(("scale", 21, (1, 2), 0, 8), id="of a type without a size"),
        pytest.param(("scale", FLOAT, (0, 2), 0, 0), id="empty"),
        pytest.param(("scale", FLOAT, (1, 2), -8, 8), id="before the beginning"),
    ],
)
def test_a_weight_that_is_not_where_it_says_is_left_to_onnx_runtime(
    tmp_path: Path, copies: StreamCopies, weight: tuple[Any, ...]
) -> None:
    assert not DeviceWeights(write_graph(tmp_path / "a.onnx", weight), "cuda", copies).values


def test_places_of_weights_are_read_as_they_were_written(tmp_path: Path) -> None:
    outline = read_outline(write_graph(tmp_path / "a.onnx", TABLE, SCALE))
    assert outline.weights == [
        ExternalWeight(*weight[:3], "weights.bin", *weight[3:]) for weight in (TABLE, SCALE)
    ]


def test_a_session_computes_with_the_weights_that_it_was_lent(tmp_path: Path) -> None:
    path = write_graph(tmp_path / "a.onnx", SCALE)
    lent = np.array([[10, 100]], np.float32)
    value = Viewer("cpu").view(lent.ctypes.data, lent.shape, FLOAT)
    ends = (TensorSpec("x", "float32", ("N", 2)),), (TensorSpec("y", "float32", ("N", 2)),)
    graph = Graph("a.onnx", "stateless", *ends)
    opened = open_session(path, graph, SessionOptions(1, weights={"scale": value}))
    (y,) = opened.run(None, {"x": np.array([[1, 2]], np.float32)})
    assert y.tolist() == [[10, 200]]


@pytest.mark.parametrize(
    ("number", "kind"), [(2, OutOfMemoryError), (900, RuntimeError), (700, DeviceLostError)]
)
def test_errors_are_told_apart_by_their_number(
    device: HostCuda, number: int, kind: type[Exception]
) -> None:
    """Only a lost device is found so by the run after it as well."""
    device.cudaStreamSynchronize = lambda stream: (number,)  # type: ignore[method-assign]
    copies = StreamCopies(Cuda(device))
    with pytest.raises(kind) as caught:
        copies.cuda.wait()
    assert type(caught.value) is kind
    expected = BundleError if number == 900 else kind
    with pytest.raises(expected), NamingGraph("a.onnx", copies):
        raise OSError("ONNX Runtime's own kind")
