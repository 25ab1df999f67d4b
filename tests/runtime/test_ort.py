"""Tests CpuBackend on hand-made graphs: writing in place, what is returned, what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from host_cuda import HostCuda
from onnx_text import model_of
from small import small_manifest

from spec_runtime import backends
from spec_runtime.backends import session
from spec_runtime.backends.cpu.backend import CpuBackend
from spec_runtime.backends.cuda import backend as cuda
from spec_runtime.backends.cuda.api import Cuda
from spec_runtime.backends.cuda.backend import CudaBackend
from spec_runtime.backends.cuda.copies import StreamCopies
from spec_runtime.bundle.manifest import Bundle, Graph, TensorSpec
from spec_runtime.errors import UserError

onnx = pytest.importorskip("onnx")

DH, S = 3, 8  # width and number of cache rows


# `kv.0.k.out` is the cache with `rows` written at `slots` of its one head, `doubled` is 2 · rows,
# and `total` the sum over the cache's slots, which needs the written cache.
SMALL = """
small (int64[N] slots, float[N, 3] rows, float[1, 1, S, 3] "kv.0.k")
    => (float[N, 3] doubled, float total, float[1, 1, S, 3] "kv.0.k.out")
    <int64[2] front = {0, 1}, int64[2] column = {-1, 1}, float two = {2.0}>
{
    flat = Squeeze("kv.0.k", front)
    index = Reshape(slots, column)
    written = ScatterND(flat, index, rows)
    "kv.0.k.out" = Unsqueeze(written, front)
    doubled = Mul(rows, two)
    total = ReduceSum<keepdims = 0>("kv.0.k.out")
}
"""


def write_graph(folder: Path) -> Path:
    """Writes the graph SMALL and returns its path."""
    path = folder / "small.onnx"
    onnx.save(model_of(SMALL), path)
    return path


CACHE = ("float32", (1, 1, "S", DH))
GRAPH = Graph(
    "small.onnx",
    "slots",
    (
        TensorSpec("slots", "int64", ("N",)),
        TensorSpec("rows", "float32", ("N", DH)),
        TensorSpec("kv.0.k", *CACHE),
    ),
    (
        TensorSpec("doubled", "float32", ("N", DH)),
        TensorSpec("total", "float32", ()),
        TensorSpec("kv.0.k.out", *CACHE),
    ),
)


@pytest.fixture
def backend(tmp_path: Path) -> CpuBackend:
    return CpuBackend(write_graph(tmp_path), GRAPH, S, threads=1)


def feeds(*slots: int, value: float = 1.0) -> dict[str, np.ndarray]:
    rows = np.full((len(slots), DH), value, np.float32)
    return {"slots": np.array(slots, np.int64), "rows": rows}


def cache_rows(backend: CpuBackend) -> list[float]:
    return [float(row[0]) for row in backend.buffers["kv.0.k"].numpy()[0, 0]]


def test_the_cache_starts_at_zero_and_is_written_in_place(backend: CpuBackend) -> None:
    assert (backend.form, backend.capacity) == ("slots", S)
    assert cache_rows(backend) == [0.0] * S
    address = backend.buffers["kv.0.k"].data_ptr()
    backend.run(feeds(1, 4), ["total"])
    backend.run(feeds(2, value=5.0), [])  # nothing wanted: written all the same
    backend.run(feeds(4, value=7.0), ["doubled"])
    assert cache_rows(backend) == [0, 1, 5, 0, 7, 0, 0, 0]
    assert backend.buffers["kv.0.k"].data_ptr() == address
    assert backend.run(feeds(0, value=0.0), ["total"])["total"] == 3 * (1 + 5 + 7)


def test_only_wanted_outputs_come_back(backend: CpuBackend) -> None:
    assert set(backend.run(feeds(0), ["doubled"])) == {"doubled"}
    assert set(backend.run(feeds(0), [])) == set()
    both = backend.run(feeds(0, 3, value=2.0), ["total", "doubled"])
    assert list(both) == ["total", "doubled"]
    assert both["doubled"].shape == (2, DH)
    assert (both["doubled"] == 4).all()


def test_output_buffers_are_used_again(backend: CpuBackend) -> None:
    """They grow to the largest shape asked for; a result is valid until the next run."""
    large = backend.run(feeds(0, 1, 2), ["doubled"])["doubled"]
    small = backend.run(feeds(0, value=3.0), ["doubled"])["doubled"]
    assert np.shares_memory(large, small)
    assert small.tolist() == [[6.0] * DH]
    larger = backend.run(feeds(0, 1, 2, 3, 4, value=4.0), ["doubled"])["doubled"]
    assert larger.shape == (5, DH)
    assert (larger == 8).all()


def test_inputs_need_not_be_contiguous(backend: CpuBackend) -> None:
    wide = np.arange(12, dtype=np.float32).reshape(2, 6)
    given = {"slots": np.array([5, 9, 6, 9])[::2], "rows": wide[:, ::2]}
    assert backend.run(given, ["doubled"])["doubled"].tolist() == [[0, 4, 8], [12, 16, 20]]
    assert cache_rows(backend)[5:7] == [0, 6]


def test_rows_are_copied_out_and_back(backend: CpuBackend) -> None:
    backend.run(feeds(1, value=5.0), [])
    backend.run(feeds(4, value=7.0), [])
    rows = backend.read_rows(np.array([4, 1, 0]))
    assert {name: row.shape for name, row in rows.items()} == {"kv.0.k": (1, 3, DH * 4)}
    backend.run(feeds(1, 4, value=0.0), [])
    backend.write_rows(np.array([6, 2]), rows)  # the first two of the three
    assert cache_rows(backend) == [0, 0, 5, 0, 0, 0, 7, 0]
    assert backend.read_rows(np.zeros(0, np.int64))["kv.0.k"].shape == (1, 0, DH * 4)


def test_two_backends_have_their_own_caches(tmp_path: Path, backend: CpuBackend) -> None:
    other = CpuBackend(tmp_path / "small.onnx", GRAPH, 4, threads=1)
    other.run(feeds(3), [])
    assert cache_rows(other) == [0, 0, 0, 1]
    assert cache_rows(backend) == [0] * S


@pytest.mark.parametrize(
    ("kind", "message"),
    [("inputs", "has inputs .*'rows'.* the manifest says"), ("outputs", "has outputs .*'doubled'")],
)
def test_another_signature_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    specs = [spec for spec in getattr(GRAPH, kind) if spec.name not in ("rows", "doubled")]
    changed: dict[str, Any] = {kind: (*specs, TensorSpec("more", "float32", ("N",)))}
    wrong = dataclasses.replace(GRAPH, **changed)
    with pytest.raises(ValueError, match=message) as error:
        CpuBackend(write_graph(tmp_path), wrong, S)
    assert "build the bundle again" in str(error.value)


def test_a_file_that_is_no_graph_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    path.write_bytes(b"not a graph\n" * 9)
    with pytest.raises(UserError, match=r"ONNX Runtime .* cannot load small\.onnx"):
        CpuBackend(path, GRAPH, S)


# Two products of integers, whose pairs pass 16 bits at the extremes.
PRODUCTS = """
products (uint8[N, 2] x) => (float[N, 1] one, float[N, 1] two)
    <int8[2, 1] w = {127, 127}, int8[2, 1] v = {-127, -127}, float step = {1.0},
     uint8 middle = {128}, int8 zero = {0}>
{
    one = com.microsoft.MatMulIntegerToFloat(x, w, step, step, middle ZERO)
    two = com.microsoft.MatMulIntegerToFloat(x, v, step, step, middle ZERO)
}
"""
PRODUCTS_GRAPH = Graph(
    "products.onnx",
    "stateless",
    (TensorSpec("x", "uint8", ("N", 2)),),
    (TensorSpec("one", "float32", ("N", 1)), TensorSpec("two", "float32", ("N", 1))),
)


@pytest.mark.parametrize("does_saturate", [True, None])
def test_int8_products_are_exact_on_every_cpu(
    does_saturate: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if this CPU saturated, and as it is."""
    if does_saturate is not None:
        monkeypatch.setattr(session, "saturates", lambda: does_saturate)
    path = tmp_path / "products.onnx"
    onnx.save(model_of(PRODUCTS.replace("ZERO", "")), path)
    opened = CpuBackend(path, PRODUCTS_GRAPH, 1, threads=1)
    got = opened.run({"x": np.array([[255, 255], [0, 0]], np.uint8)}, ["one", "two"])
    assert got["one"].ravel().tolist() == [2 * 127 * 127, -2 * 128 * 127]
    assert got["two"].ravel().tolist() == [-2 * 127 * 127, 2 * 128 * 127]


def test_an_older_int8_bundle_is_refused_where_products_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "saturates", lambda: True)
    path = tmp_path / "products.onnx"
    onnx.save(model_of(PRODUCTS.replace("ZERO", ", zero")), path)
    with pytest.raises(ValueError, match=r"on this CPU without VNNI, build the bundle again"):
        CpuBackend(path, PRODUCTS_GRAPH, 1, threads=1)


# ---- CUDA, where there is none ----


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_cuda_without_a_gpu_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other faults of an installation are in test_first_contact.py."""
    path, available = write_graph(tmp_path), ort.get_available_providers()
    if "CUDAExecutionProvider" in available:
        pytest.skip("ONNX Runtime has CUDA here")
    with pytest.raises(UserError, match=r"no CUDAExecutionProvider: put onnxruntime-gpu in"):
        CudaBackend(path, GRAPH, S)
    # as onnxruntime-gpu does where its provider cannot be loaded: the session is on the CPU
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(session, "require_gpu", lambda: None)
    monkeypatch.setattr(cuda, "open_copies", lambda: StreamCopies(Cuda(HostCuda())))
    monkeypatch.setattr(ort, "set_default_logger_severity", lambda level: None)
    with pytest.raises(UserError, match=r"did not load its CUDAExecutionProvider, though"):
        CudaBackend(path, GRAPH, S)


WIDE = "target/target.onnx in float32 with attention {} with backend cuda, expected full_buffer"
MOVING = "target/target.onnx in the contiguous form with backend cuda, expected the slots form"


@pytest.mark.parametrize(
    ("precision", "changes", "got"),
    [
        ("int8", {}, "an int8 bundle with backend cuda, expected fp16, bf16, fp32 or fp8"),
        ("fp32", {}, WIDE.format("bias")),
        ("fp16", {"attention": "append"}, WIDE.format("append")),  # as drafters once were
        ("fp32", {"form": "contiguous"}, MOVING),
        ("fp16", {"form": "contiguous"}, MOVING),
        ("fp32", {"attention": "full_buffer"}, None),
        ("fp32", {"inputs": GRAPH.inputs[:2]}, None),
    ],
)
def test_cuda_takes_what_it_has_kernels_for(
    tmp_path: Path, precision: str, changes: dict[str, Any], got: str | None
) -> None:
    manifest = small_manifest()
    target = dataclasses.replace(manifest.target, precision=precision)
    (tmp_path / "target").mkdir()
    write_graph(tmp_path / "target").rename(tmp_path / "target" / "target.onnx")
    graph = dataclasses.replace(GRAPH, file="target/target.onnx", **changes)
    bundle = Bundle(
        tmp_path, dataclasses.replace(manifest, target=target, graphs={"target": graph})
    )
    if got is None and "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("ONNX Runtime has CUDA here")
    message = f"got {got}: build the bundle again with spec-export build --device cuda"
    with pytest.raises(UserError, match=message if got else "CUDAExecutionProvider"):
        backends.open_graph(bundle, graph, S, backends.Runtime("cuda"))
