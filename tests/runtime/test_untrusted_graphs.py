"""Graphs of strangers: their operators, weights, signatures and buffers are checked before use."""

import contextlib
import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import small_manifest

from spec_runtime import backends
from spec_runtime.backends.session import NamingGraph
from spec_runtime.bundle import memory
from spec_runtime.bundle.manifest import Bundle, BundleError, Graph, TensorSpec
from spec_runtime.bundle.onnx_file import read_outline
from spec_runtime.errors import OutOfMemoryError, UserError

onnx = pytest.importorskip("onnx")

CACHE = TensorSpec("kv.0.k", "float32", (1, 1, "S", 3))
GRAPH = Graph(
    "graph.onnx",
    "slots",
    (TensorSpec("x", "float32", ("N", 3)), CACHE),
    (TensorSpec("y", "float32", ("N", 3)),),
)


def model_of(*nodes: Any, initializers: Any = ()) -> Any:
    """Returns a model y = nodes(x), with a cache that nobody reads."""
    h, f32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = h.make_graph(
        list(nodes) or [h.make_node("Neg", ["x"], ["y"])],
        "graph",
        [
            h.make_tensor_value_info("x", f32, ["N", 3]),
            h.make_tensor_value_info("kv.0.k", f32, [1, 1, "S", 3]),
        ],
        [h.make_tensor_value_info("y", f32, ["N", 3])],
        list(initializers),
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 21)], ir_version=10)


def bundle_of(folder: Path, graph: Graph, model: Any) -> Bundle:
    onnx.save(model, folder / "graph.onnx")
    manifest = dataclasses.replace(
        small_manifest(), graphs={"target": graph}, drafters=(), files={"graph.onnx": "0" * 64}
    )
    return Bundle(folder, manifest)


def opened(folder: Path, graph: Graph = GRAPH, model: Any = None, capacity: int = 8) -> Any:
    bundle = bundle_of(folder, graph, model or model_of())
    return backends.open_graph(bundle, graph, capacity)


def refusal(message: str, folder: Path, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(UserError, match=message):
        opened(folder, *args, **kwargs)


def test_a_right_graph_runs(tmp_path: Path) -> None:
    (y,) = opened(tmp_path).run({"x": np.ones((2, 3), np.float32)}, ["y"]).values()
    assert y.tolist() == [[-1.0] * 3] * 2


# ---- operators


def test_an_endless_loop_is_refused(tmp_path: Path) -> None:
    h, types = onnx.helper, onnx.TensorProto
    body = h.make_graph(
        [h.make_node("Identity", ["going"], ["on"]), h.make_node("Identity", ["v"], ["w"])],
        "body",
        [
            h.make_tensor_value_info("i", types.INT64, []),
            h.make_tensor_value_info("going", types.BOOL, []),
            h.make_tensor_value_info("v", types.FLOAT, ["N", 3]),
        ],
        [
            h.make_tensor_value_info("on", types.BOOL, []),
            h.make_tensor_value_info("w", types.FLOAT, ["N", 3]),
        ],
    )
    true = onnx.numpy_helper.from_array(np.array(True), "true")
    loop = h.make_node("Loop", ["", "true", "x"], ["y"], body=body)
    model = model_of(loop, initializers=[true])
    onnx.save(model, tmp_path / "loop.onnx")
    assert read_outline(tmp_path / "loop.onnx").nested == {"Loop"}
    refusal("graph.onnx: got operators Loop, expected those that", tmp_path, model=model)


@pytest.mark.parametrize("domain", ["com.example", "com.microsoft"])
def test_operators_that_are_not_listed_are_refused(tmp_path: Path, domain: str) -> None:
    node = onnx.helper.make_node("BeamSearch", ["x"], ["y"], domain=domain)
    refusal(f"got operators {domain}.BeamSearch, exp", tmp_path, model=model_of(node))


def test_functions_of_a_models_own_are_refused(tmp_path: Path) -> None:
    h, model = onnx.helper, model_of()
    node = h.make_node("Neg", ["a"], ["b"])
    opset = [h.make_opsetid("", 21)]
    model.functions.append(h.make_function("own", "Neg", ["a"], ["b"], [node], opset))
    refusal("got operators functions of its own", tmp_path, model=model)


NO_ONNX = [b"", b"no protocol buffer", b"\x00" * 99, b"\xff" * 99, b"\x08\x01"]


@pytest.mark.parametrize("content", [*NO_ONNX, b"\x3a\xff\x01" + b"x" * 9])
def test_a_file_that_is_no_onnx_is_one_line(tmp_path: Path, content: bytes) -> None:
    bundle = bundle_of(tmp_path, GRAPH, model_of())
    (tmp_path / "graph.onnx").write_bytes(content)
    with pytest.raises(UserError):
        read_outline(tmp_path / "graph.onnx")
    with pytest.raises(BundleError, match=r"graph\.onnx is not an ONNX model: "):
        backends.open_graph(bundle, GRAPH, 8)


def test_every_beginning_of_a_file_is_read_or_refused(tmp_path: Path) -> None:
    whole = model_of().SerializeToString()
    file = tmp_path / "graph.onnx"
    for end in range(len(whole)):
        file.write_bytes(whole[:end])
        with contextlib.suppress(UserError):
            read_outline(file)


def test_large_tensors_are_stepped_over(tmp_path: Path) -> None:
    """Nothing of 200 MB is read."""
    weight = onnx.numpy_helper.from_array(np.zeros(50_000_000, np.float32), "weight")
    onnx.save(model_of(initializers=[weight]), tmp_path / "graph.onnx")
    tracemalloc.start()
    try:
        assert read_outline(tmp_path / "graph.onnx").operators == {"Neg"}
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# ---- external weights


def external(location: str) -> Any:
    """Returns a weight that lies in another file."""
    weight = onnx.numpy_helper.from_array(np.ones((1, 3), np.float32), "w")
    onnx.external_data_helper.set_external_data(weight, location, 0, 12)
    weight.ClearField("raw_data")
    return weight


@pytest.mark.parametrize(
    "location", ["stray.bin", "../outside.bin", "/etc/hostname", "*/_ORT_MEM_ADDR_/*"]
)
def test_weights_that_the_manifest_does_not_list_are_refused(tmp_path: Path, location: str) -> None:
    """Nobody has checked their hash."""
    (tmp_path / "stray.bin").write_bytes(np.ones(3, np.float32).tobytes())
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    inside = onnx.helper.make_node("Constant", [], ["w"], value=external(location))
    for model in (model_of(add, initializers=[external(location)]), model_of(inside, add)):
        refusal("graph.onnx: got weights in .*, expected a file that", tmp_path, model=model)


def test_listed_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(np.ones(3, np.float32).tobytes())
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    bundle = bundle_of(tmp_path, GRAPH, model_of(add, initializers=[external("w.bin")]))
    bundle.manifest.files["w.bin"] = "0" * 64
    backend = backends.open_graph(bundle, GRAPH, 8)
    assert backend.run({"x": np.ones((1, 3), np.float32)}, ["y"])["y"].tolist() == [[2.0] * 3]


# ---- signatures


def changed(**changes: Any) -> Graph:
    """Returns GRAPH with one tensor changed: x, kv or y."""
    x, cache, y = (
        dataclasses.replace(spec, **changes.get(name, {}))
        for name, spec in (("x", GRAPH.inputs[0]), ("kv", CACHE), ("y", GRAPH.outputs[0]))
    )
    return dataclasses.replace(GRAPH, inputs=(x, cache), outputs=(y,))


@pytest.mark.parametrize(
    "change",
    [
        {"x": {"dtype": "int64"}},
        {"x": {"dtype": "float16"}},
        {"x": {"shape": ("N", 4)}},
        {"x": {"shape": ("N",)}},
        {"x": {"shape": (1, 3)}},
        {"x": {"shape": ("N", "W")}},
        {"kv": {"shape": (1, 2, "S", 3)}},
        {"kv": {"dtype": "bfloat16"}},
        {"y": {"dtype": "int32"}},
        {"y": {"shape": ("N", 5)}},
        {"y": {"shape": ("N", 3, 1)}},
    ],
)
def test_a_signature_is_compared_by_type_and_shape(tmp_path: Path, change: Any) -> None:
    message = r"graph.onnx has .* as tensor\(float\) of shape .*, the manifest says "
    refusal(message, tmp_path, changed(**change))


def test_a_buffer_has_no_other_free_axis_than_its_slots(tmp_path: Path) -> None:
    refusal("buffer kv.0.k: got shape", tmp_path, changed(kv={"shape": (1, 1, "T", 3)}))


def test_an_output_has_the_axes_of_the_inputs(tmp_path: Path) -> None:
    backend = opened(tmp_path, changed(y={"shape": ("K", 3)}))
    with pytest.raises(ValueError, match=r"got output y of shape \['K', 3\], expected axes of the"):
        backend.run({"x": np.ones((1, 3), np.float32)}, ["y"])


def test_a_graph_of_another_role_is_one_line(tmp_path: Path) -> None:
    backend = opened(tmp_path)
    feeds = {"x": np.ones((1, 3), np.float32)}
    for given, outputs, message in (
        ({"slots": feeds["x"]}, ["y"], r"wants inputs \['x'\] and has no outputs \[\]"),
        (feeds, ["logits"], r"wants inputs \[\] and has no outputs \['logits'\]"),
        ({"x": np.ones((1, 3))}, ["y"], "got input x of type float32, expected float64"),
        ({"x": np.ones((1, 4), np.float32)}, ["y"], r"got x of shape \[1, 4\], expected"),
        ({"x": np.ones(3, np.float32)}, ["y"], r"got x of shape \[3\], expected"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.run(given, outputs)


def test_a_graph_that_fails_in_its_run_is_one_line(tmp_path: Path) -> None:
    three = onnx.numpy_helper.from_array(np.zeros((3, 3), np.float32), "three")
    add = onnx.helper.make_node("Add", ["x", "three"], ["y"])
    backend = opened(tmp_path, model=model_of(add, initializers=[three]))
    with pytest.raises(UserError, match=r"cannot run graph\.onnx: .*build the bundle again"):
        backend.run({"x": np.ones((2, 3), np.float32)}, ["y"])


# ---- memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
        RuntimeError("Failed to allocate memory for requested buffer of size 8"),
    ],
)
def test_memory_that_ends_is_said_with_what_to_do(error: Exception) -> None:
    with (
        pytest.raises(OutOfMemoryError, match=r"got no memory to run a\.onnx .*--parallel"),
        NamingGraph("a.onnx"),
    ):
        raise error


def test_buffers_larger_than_the_memory_are_refused(tmp_path: Path) -> None:
    message = r"graph.onnx: its buffers for 1099511627776 tokens take \d+.\d GB, expected at most"
    refusal(message, tmp_path, capacity=2**40)


def test_the_estimate_counts_buffers_and_masks() -> None:
    rest = memory.buffer_bytes(dataclasses.replace(GRAPH, inputs=()), 1000)
    assert memory.buffer_bytes(GRAPH, 1000) - rest == 1000 * 3 * 4
    half = changed(kv={"dtype": "bfloat16"})
    assert memory.buffer_bytes(half, 1000) - rest == 1000 * 3 * 2


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "memory.max"
    without = memory.machine_bytes()
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (file,))
    file.write_text("max\n")
    assert memory.machine_bytes() >= without
    file.write_text("4096\n")
    assert memory.machine_bytes() == 4096
    refusal("its buffers for 64 tokens take 0.0 GB", tmp_path, capacity=64)
