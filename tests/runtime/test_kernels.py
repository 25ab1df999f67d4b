"""Native operators: exact on each instruction set, rows that do not depend on each other, errors.

Each test runs on every instruction set that this CPU has, and names the others as skipped.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from spec_export.graphs.four_bits import pack_zero_points
from spec_runtime.backends import session
from spec_runtime.errors import UserError
from spec_runtime.kernels import compiling
from spec_runtime.kernels import library as kernels
from spec_runtime.kernels.rewrite import DOMAIN, NativeModel, with_operators

SETS = ("avx512-vnni", "avx-vnni", "avx2", "neon", "portable")
QUANTISED = ("minima", "zero points", "8 bits", "whole")
FORMS = (*QUANTISED, "float", "turned")
# K is no multiple of a vector, N of no tile; one N is large enough for ONNX Runtime's threads.
SHAPES = ((32, 1, 32), (48, 5, 16), (96, 17, 32), (320, 33, 64), (640, 50, 128), (576, 960, 32))
NEAR = 1e-6  # of the sum of the magnitudes of a result's terms


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces an instruction set, whose name it returns."""
    path = kernels.library()
    if path is None:
        pytest.skip("no C compiler here")
    if request.param not in kernels.instruction_sets(path):
        pytest.skip(f"this CPU has no {request.param}")
    monkeypatch.setenv(kernels.INSTRUCTIONS, request.param)
    return str(request.param)


class Product:
    """A random product of K values and N columns, and what it computes, exactly."""

    def __init__(self, form: str, K: int, N: int, block: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        rows_NK = draw.normal(size=(N, K)).astype(np.float32)
        blocks = K // block
        self.form, self.K, self.N, self.block = form, K, N, block
        self.bits = {"8 bits": 8, "whole": 0, "float": 32, "turned": 32}.get(form, 4)
        self.inputs: dict[str, np.ndarray] = {}
        self.q_NK: np.ndarray
        self.scale: np.ndarray
        self.zero_NB, self.minimum_NB = np.zeros((2, N, blocks))
        if self.bits == 32:
            self.inputs = {"weight": rows_NK if form == "turned" else rows_NK.T.copy()}
            return
        if form == "whole":
            q = draw.integers(-128, 128, (K, N)).astype(np.int8)
            self.q_NK, self.scale = q.T, draw.random(N, np.float32)
            self.inputs = {"weight": q, "scale": self.scale}
            return
        if form == "8 bits":
            bytes_NBK = draw.integers(0, 256, (N, blocks, block)).astype(np.uint8)
            self.q_NK = bytes_NBK.reshape(N, K).astype(np.int64) - 128
            self.scale = draw.random((N, blocks), np.float32)
            self.inputs = {"weight": bytes_NBK, "scale": self.scale}
            return
        if form == "minima":
            cut = rows_NK.reshape(N, blocks, block)
            low, scale = cut.min(-1), np.ptp(cut, -1) / 15
            places = np.rint((cut - low[..., None]) / scale[..., None]).astype(np.uint8)
            pairs = places[..., ::2] | places[..., 1::2] << 4
            self.scale, self.minimum_NB = scale, low
            self.inputs = {"weight": pairs, "scale": scale, "minimum": np.ascontiguousarray(low.T)}
        else:
            pairs, self.scale, zeros = pack_zero_points(rows_NK, block)
            self.zero_NB = np.stack((zeros & 15, zeros >> 4), -1).reshape(N, -1)[:, :blocks]
            self.inputs = {"weight": pairs, "scale": self.scale, "zero": zeros}
        self.q_NK = np.stack((pairs & 15, pairs >> 4), -1).reshape(N, K).astype(np.int64)

    def session(
        self,
        threads: int = 1,
        changed: dict[str, Any] | None = None,
        outputs: str = "y",
        **attributes: Any,
    ) -> Any:
        """Returns a session of this product, with inputs that were changed, or left out."""
        arrays: dict[str, Any] = dict.fromkeys(("weight", "scale", "zero", "minimum", "bias"))
        arrays |= dict.fromkeys(("norm", "added", "cos", "sin", "positions"))
        arrays |= self.inputs | (changed or {})
        present = {name: array for name, array in arrays.items() if array is not None}
        node = helper.make_node(
            "FewRows",
            ["x", *(name if name in present else "" for name in arrays)],
            outputs.split(","),
            domain=DOMAIN,
            bits=self.bits,
            turned=int(self.form == "turned"),
            threads=threads,
            **{"gated": 0, "heads": 0} | attributes,
        )
        return open_session([node], present, threads)

    def expected(self, x_MK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the exact results f64[M, N], and the magnitudes of their terms."""
        M, K, N = len(x_MK), self.K, self.N
        if self.bits == 32:
            w_KN = self.inputs["weight"].T if self.form == "turned" else self.inputs["weight"]
            x_MK, w_KN = x_MK.astype(np.float64), w_KN.astype(np.float64)
            return x_MK @ w_KN, np.abs(x_MK) @ np.abs(w_KN)
        if self.form == "whole":
            size = np.abs(x_MK).max(-1, keepdims=True)
            q_MK = np.rint(x_MK / size / np.float32(1 / 127)).astype(np.int64)
            sums = (q_MK @ self.q_NK.T).astype(np.float32)
            return sums * self.scale * size, np.zeros((M, N))
        step = min(self.block, 32)
        cut = x_MK.reshape(M, -1, step)
        size = np.abs(cut).max(-1, keepdims=True)
        q_MK = np.rint(cut * (np.float32(127) / size)).astype(np.int64).reshape(M, K)
        scale_MK = np.repeat((size / np.float32(127))[..., 0], step, -1).astype(np.float64)
        y, magnitude = np.zeros((2, M, N))
        for k in range(0, K, step):
            at, b = slice(k, k + step), k // self.block
            sums = q_MK[:, at] @ self.q_NK[:, at].T
            total = q_MK[:, at].sum(-1, keepdims=True)
            exact = sums - total * self.zero_NB[:, b]
            scale = scale_MK[:, k, None]
            y += scale * (self.scale[:, b] * exact + total * self.minimum_NB[:, b])
            magnitude += scale * (self.scale[:, b] * np.abs(sums) + np.abs(total))
        return y, magnitude


def open_session(
    nodes: list[Any],
    arrays: dict[str, np.ndarray],
    threads: int = 1,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
) -> Any:
    """Returns a session of a graph from `inputs` to `outputs`."""
    kinds = {"slots": TensorProto.INT64}
    given, made = (
        [helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), None) for n in names]
        for names in (inputs, outputs)
    )
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", given, made, weights)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(kernels.library()))
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def run(opened: Any, x: np.ndarray) -> np.ndarray:
    return np.asarray(opened.run(None, {"x": x})[0])


def rows(M: int, K: int, seed: int = 1) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return (draw.normal(size=(M, K)) * draw.exponential(size=(M, 1))).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "N", "block"), SHAPES)
def test_products_are_those_of_exact_integer_arithmetic(
    instructions: str, form: str, K: int, N: int, block: int
) -> None:
    product, x = Product(form, K, N, block), rows(7, K)
    y, (expected, magnitude) = run(product.session(2), x), product.expected(x)
    if form == "whole":
        np.testing.assert_array_equal(y, expected)
    else:
        assert np.abs(y - expected).max(initial=0) <= NEAR * magnitude.max()


@pytest.mark.parametrize("form", QUANTISED)
def test_the_largest_values_do_not_saturate(instructions: str, form: str) -> None:
    product = Product(form, 1024, 3, 32)
    most = {"weight": np.full_like(product.inputs["weight"], -128 if form == "whole" else 255)}
    product.inputs |= most
    product.q_NK = np.full((3, 1024), {"whole": -128, "8 bits": 127}.get(form, 15))
    x = np.full((2, 1024), 3, np.float32)
    y, (expected, _) = run(product.session(), x), product.expected(x)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_alone_and_beside_others(instructions: str, form: str) -> None:
    draw = np.random.default_rng(len(form))
    for seed in range(6):
        block = 32 << seed % 2
        K, N = block * int(draw.integers(1, 40)), int(draw.integers(1, 200))
        N += -N % 16 * (seed > 1)  # one row by itself then has a loop of its own
        product = Product(form, K, N, block, seed)
        alone, threads = product.session(1), product.session(3)
        x = rows(40, K, seed)
        expected = np.concatenate([run(alone, x[i : i + 1]) for i in range(40)])
        for M in (2, 3, 5, 8, int(draw.integers(9, 40)), 40):
            first = int(draw.integers(0, 41 - M))
            some = slice(first, first + M)
            np.testing.assert_array_equal(run(threads, x[some]), expected[some])


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_is_added_and_leading_sizes_are_kept(instructions: str, form: str) -> None:
    product, bias = Product(form, 64, 24, 32), rows(1, 24, 5)[0]
    x = rows(6, 64).reshape(2, 3, 64)
    plain, added = run(product.session(), x), run(product.session(1, {"bias": bias}), x)
    assert added.shape == (2, 3, 24)
    # The sums of f32[K, N] begin with the bias.
    np.testing.assert_allclose(added, plain + bias, rtol=0, atol=1e-5 * (form == "float"))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_stays_in_its_row(instructions: str, form: str) -> None:
    product, x = Product(form, 96, 20, 32), rows(5, 96)
    expected = run(product.session(), x)
    x[1, 40], x[2, 3], x[3] = np.nan, np.inf, 0
    y = run(product.session(), x)
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(y[3], 0)
    np.testing.assert_array_equal(y[[0, 4]], expected[[0, 4]])
    assert run(product.session(), x[:0]).shape == (0, 20)


def test_what_does_not_fit_is_an_error(instructions: str) -> None:
    product = Product("minima", 64, 8, 32)
    fitting = product.session()
    for x in (np.zeros((2, 63), np.float32), np.zeros((), np.float32)):
        with pytest.raises(Exception, match=r"FewRows.*got values a row \d+, expected 64"):
            run(fitting, x)
    for name, wrong, said in (
        ("weight", np.zeros((8, 2), np.uint8), "dimensions of weights 2, expected 3"),
        ("weight", np.zeros((8, 2, 12), np.uint8), "weights a block 24"),
        ("weight", np.zeros((0, 2, 16), np.uint8), "columns 0"),
        ("scale", np.zeros((8, 1), np.float32), "elements of an input: 8, expected 16"),
        ("minimum", np.zeros((1, 8), np.float32), "elements of an input: 8, expected 16"),
        ("zero", np.zeros((8, 2), np.uint8), "elements of an input: 16, expected 8"),
        ("weight", np.zeros((8, 2, 16), np.int8), "an initializer of type 3, expected 2"),
        ("scale", None, "scales: 0, expected 1"),
    ):
        with pytest.raises(Exception, match=said):
            product.session(1, {name: wrong})
    with pytest.raises(Exception, match="values a row 130048"):
        Product("whole", 130048, 1, 32).session()
    floats = Product("float", 64, 8, 32)
    for name, wrong_float, said in (
        ("weight", np.zeros((64, 8, 1), np.float32), "dimensions of weights 3, expected 2"),
        ("weight", np.zeros((0, 8), np.float32), "values a row 0"),
        ("scale", np.zeros(8, np.float32), "scales: 1, expected 0"),
        ("minimum", np.zeros(8, np.float32), "minima with bits 32"),
        ("bias", np.zeros(7, np.float32), "elements of an input: 7, expected 8"),
    ):
        with pytest.raises(Exception, match=said):
            floats.session(1, {name: wrong_float})
    with pytest.raises(Exception, match="threads 0, expected 1"):
        floats.session(0)
    norm: dict[str, Any] = {"norm": np.ones(64, np.float32), "epsilon": 1e-5}
    heads: dict[str, Any] = {"heads": 3, "queries": 4, "keys": 2, "positions": np.array([0, 4])}
    heads |= dict.fromkeys(("cos", "sin"), np.ones((5, 1), np.float32))
    for given, said in (
        (heads | {"outputs": "y,k"}, "no output of number 2"),
        (norm | {"added": np.ones((2, 64), np.float32), "outputs": "y"}, "no output of number 3"),
        (heads | {"sin": None}, "no input of number 9"),
        ({"norm": np.ones(63, np.float32)}, "elements of an input: 63, expected 64"),
        ({"added": np.ones((2, 64), np.float32)}, "norms: 0, expected 1"),
        (norm | {"gated": 1}, "norms: 1, expected 0"),
        (norm | {"added": np.ones(64, np.float32)}, "elements of an input: 64, expected 128"),
        ({"gated": 1}, "values a row 64, expected 128"),
        (heads | {"queries": 9}, "columns of queries and keys 11, expected 8"),
        (heads | {"queries": 2**63 - 1}, "columns of queries and keys"),
        (heads | {"heads": 4}, "heads 4, expected 6"),
        (heads | {"cos": np.ones((5, 2), np.float32)}, "pairs of columns 2, expected 1"),
        (heads | {"cos": np.ones(5, np.float32)}, "dimensions 1, expected 2"),
        (heads | {"sin": np.ones((4, 1), np.float32)}, "elements of an input: 4, expected 5"),
        (heads | {"positions": np.array([0, 5])}, "a position 5, expected 4"),
        (heads | {"positions": np.array([-1, 0])}, "a position -1, expected 4"),
        (heads | {"positions": np.array([1])}, "elements of an input: 1, expected 2"),
    ):
        arrays = {n: each for n, each in given.items() if not isinstance(each, int | float | str)}
        attributes: Any = {"outputs": "y,k,v,sum"} | {n: given[n] for n in given.keys() - arrays}
        with pytest.raises(Exception, match=said):
            run(floats.session(1, arrays, **attributes), np.ones((2, 64), np.float32))


def test_an_instruction_set_that_is_not_here_is_an_error(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.INSTRUCTIONS, "sse9")
    with pytest.raises(Exception, match="this CPU has not SPECSPLIT_INSTRUCTIONS"):
        Product("minima", 64, 8, 32).session()


def _graph(precision: str, with_minima: bool) -> Any:
    """Returns a graph of two products, y = x · A · B, as quantize.py makes it."""
    import onnx_ir as ir

    from spec_export.graphs.quantize import quantize

    draw = np.random.default_rng(3)
    arrays = {name: draw.normal(size=(128, 128)).astype(np.float32) for name in "AB"}
    if not with_minima:
        on_grid = draw.integers(-8, 8, (2, 128, 128)).astype(np.float32)
        arrays = dict(zip("AB", on_grid * np.float32(0.25), strict=True))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["M", 128]) for n in ("x", "y"))
    operator, inputs = "MatMul", ["a", "B"]
    attributes: dict[str, Any] = {}
    if precision == "fp32":
        operator, inputs = "Gemm", ["a", "B", "bias"]
        attributes = {"transB": 1, "alpha": 1.0, "beta": 1.0}
        arrays["bias"] = rows(1, 128)[0]
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["a"]),
        helper.make_node(operator, inputs, ["y"], **attributes),
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    if precision == "fp32":
        return model
    return ir.serde.serialize_model(quantize(ir.serde.deserialize_model(model), precision))


@pytest.mark.parametrize(
    ("precision", "with_minima"), [("fp32", True), ("int8", True), ("int4", True), ("int4", False)]
)
def test_a_graph_computes_the_same_with_the_operator(
    instructions: str, tmp_path: Path, precision: str, with_minima: bool
) -> None:
    path, x = tmp_path / "graph.onnx", rows(6, 128)
    onnx.save(_graph(precision, with_minima), path)
    model = with_operators(path)
    assert model is not None
    data, has_exact_rows = model
    assert has_exact_rows
    assert [node.op_type for node in onnx.load_from_string(data).graph.node] == ["FewRows"] * 2
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(kernels.library()))
    plain = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    native = ort.InferenceSession(data, options, ["CPUExecutionProvider"])
    expected, y = run(plain, x), run(native, x)
    if precision == "int8":  # both are exact
        np.testing.assert_array_equal(y, expected)
    elif precision == "fp32":
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    else:  # ONNX Runtime quantises rows in blocks of the weights' size, and rounds otherwise
        assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()


def _layer(precision: str) -> Any:
    """Returns a graph of a layer's products and what stands beside them, as exports write it."""
    import onnx_ir as ir

    from spec_export.graphs.quantize import quantize

    draw = np.random.default_rng(4)
    sizes = {"A": (64, 128), "B": (64, 320), "C": (160, 64), "cos": (20, 8), "sin": (20, 8)}
    arrays = {name: draw.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    arrays |= {"gamma": draw.random(64, np.float32) + np.float32(0.5)}
    arrays |= {"two": np.array([96, 32]), "parts": np.array([64, 32])}
    make, microsoft = helper.make_node, "com.microsoft"
    names = ["normed", "", "", "sum"]
    norm = "SkipSimplifiedLayerNormalization"
    nodes = [
        make(norm, ["x", "added", "gamma"], names, domain=microsoft, epsilon=1e-5),
        make("MatMul", ["normed", "A"], ["qkv"]),
        make("Split", ["qkv", "two"], ["qk", "v"], axis=-1),
        make("RotaryEmbedding", ["qk", "cos", "sin", "positions"], ["turned"], num_heads=6),
        make("Split", ["turned", "parts"], ["q", "k"], axis=-1),
        make("RMSNormalization", ["sum", "gamma"], ["again"], axis=-1, epsilon=1e-5),
        make("MatMul", ["again", "B"], ["both"]),
        make("Split", ["both"], ["gate", "up"], axis=-1, num_outputs=2),
        make("Sigmoid", ["gate"], ["sigmoid"]),
        make("Mul", ["gate", "sigmoid"], ["silu"]),
        make("Mul", ["silu", "up"], ["gated"]),
        make("MatMul", ["gated", "C"], ["y"]),
    ]
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "N", size]) for name in names]
        for size, names in ((64, ("x", "added")), (None, ("q", "k", "v", "y", "sum")))
    )
    given.append(helper.make_tensor_value_info("positions", TensorProto.INT64, [1, "N"]))
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", given, made, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(microsoft, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if precision == "fp32":
        return model
    return ir.serde.serialize_model(quantize(ir.serde.deserialize_model(model), precision))


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_norms_gates_and_rotations_become_products(
    instructions: str, tmp_path: Path, precision: str
) -> None:
    path, N = tmp_path / "graph.onnx", 9
    onnx.save(_layer(precision), path)
    model = with_operators(path, 2)
    assert model is not None
    nodes = onnx.load_from_string(model.data).graph.node
    assert [node.op_type for node in nodes] == ["FewRows"] * 3
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(kernels.library()))
    plain = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    native = ort.InferenceSession(model.data, options, ["CPUExecutionProvider"])
    fed = {name: rows(N, 64, seed)[None] for seed, name in enumerate(("x", "added"))}
    fed["positions"] = np.arange(N)[None] * 2
    expected, got = plain.run(None, fed), native.run(None, fed)
    for right, given in zip(expected, got, strict=True):
        near = 1e-5 if precision == "fp32" else 0.03
        np.testing.assert_allclose(given, right, rtol=0, atol=near * np.abs(right).max())
    for some in (slice(0, 1), slice(3, 8)):  # bit for bit, whatever rows are beside a row
        few = native.run(None, {name: array[:, some] for name, array in fed.items()})
        for part, whole in zip(few, got, strict=True):
            np.testing.assert_array_equal(part, whole[:, some])
    fed["x"][0, 2, 5] = np.nan
    odd = native.run(None, fed)
    assert all(np.isnan(each[0, 2]).any() for each in odd)
    for each, right in zip(odd, got, strict=True):
        np.testing.assert_array_equal(np.delete(each, 2, 1), np.delete(right, 2, 1))


def test_a_session_has_the_operator_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kernels.library() is None:
        pytest.skip("no C compiler here")
    made = Mock(side_effect=with_operators)
    monkeypatch.setattr(session, "with_operators", made)
    x = rows(3, 128)
    for value, precision in (("0", "int4"), ("", "int4"), ("1", "fp32"), ("1", "int8")):
        path = tmp_path / f"{precision}-{value}.onnx"
        onnx.save(_graph(precision, True), path)
        monkeypatch.setenv(kernels.WANTED, value)
        made.reset_mock()
        y = run(session._open_shared(path, session.SessionOptions(1)), x)
        assert made.call_count == (value != "0")
        assert y.shape == (3, 128)
    monkeypatch.setattr(session, "with_operators", lambda *_: NativeModel(b"no model", True))
    onnx.save(_graph("int4", False), tmp_path / "other.onnx")
    with caplog.at_level(logging.WARNING):
        other = session._open_shared(tmp_path / "other.onnx", session.SessionOptions(1))
    assert run(other, x).shape == (3, 128)
    assert ["runs without native operators" in message for message in caplog.messages] == [True]
    for name, said in ((kernels.WANTED, "0 or 1$"), (kernels.INSTRUCTIONS, ".*portable on")):
        with monkeypatch.context() as patch:
            patch.setenv(name, "yes")
            with pytest.raises(UserError, match=f"^got {name}='yes', expected {said}"):
                session.open_session(path, Mock(), session.SessionOptions(1))


def test_a_graph_without_products_stays_as_it_is(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "graph.onnx")
    assert with_operators(tmp_path / "graph.onnx") is None


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a copy of the sources that is taken for them, with an empty cache folder."""
    folder = tmp_path / "native"
    shutil.copytree(compiling.SOURCES, folder, ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (compiling, kernels):
        monkeypatch.setattr(module, "SOURCES", folder)
    return folder


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_library_is_built_once_for_its_sources(
    is_writable: bool, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def build(target: Path) -> None:
        with suppress(threading.BrokenBarrierError):  # nobody else builds meanwhile
            both.wait(0.1)
        target.touch()

    built, find = Mock(side_effect=build), kernels.library.__wrapped__
    monkeypatch.setattr(kernels.os, "access", lambda *_: is_writable)
    for name, mock in (("compiler", list), ("build", built), ("instruction_sets", Mock())):
        monkeypatch.setattr(kernels, name, mock)
    place = sources if is_writable else tmp_path / "specsplit" / "kernels"
    left = place / f"{compiling.UNFINISHED}abc"  # by a build that was killed
    left.mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: find() or tmp_path, range(2))
    assert (first.parent, second, find(), built.call_count) == (place, first, first, 1)
    assert not [path for path in place.iterdir() if "building" in path.name]
    (sources / "loops.h").write_text("other")
    assert find() not in (first, None)
    assert built.call_count == 2


def test_installations_ask_for_a_compiler_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(kernels.WANTED, raising=False)
    monkeypatch.setattr(compiling.sys, "platform", "linux")
    monkeypatch.setattr(compiling.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name == "ziglang")
    for has_one, asked, command in ((True, 0, "/cc"), (False, 1, "-target aarch64-linux-gnu.2.17")):
        monkeypatch.setattr(compiling.shutil, "which", lambda name, has=has_one: has and f"/{name}")
        assert len(compiling.required()) == asked
        assert " ".join(compiling.compiler()).endswith(command)
        assert compiling.is_portable() == (not has_one)
    monkeypatch.setenv(kernels.WANTED, "0")  # neither asked for nor built
    assert compiling.required() == []
    with pytest.raises(OSError, match="SPECSPLIT_KERNELS is 0"):
        compiling.compiler()


def test_without_a_compiler_one_line_says_so(
    sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (
        OSError("there is no C compiler"),
        subprocess.CalledProcessError(1, "cc", stderr="no\nheader"),
    ):
        monkeypatch.setattr(kernels, "build", Mock(side_effect=error))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert kernels.library.__wrapped__() is None
        assert len(caplog.messages) == 1
        assert "\n" not in caplog.messages[0]
        assert caplog.messages[0].startswith("the native operators are not used: ")


class Rows:
    """Random rows of queries, keys and values, which of them attend which, and what they get."""

    def __init__(self, H: int, G: int, D: int, N: int, S: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.H, self.G, self.D, self.scale, self.softcap = H, G, D, 0.0, 0.0
        self.query_NHD = draw.normal(size=(N, H, D)).astype(np.float32)
        self.cache_GSD = draw.normal(size=(2, G, S, D)).astype(np.float32)
        self.sees_NS = draw.random((N, S)) < 0.6
        self.sinks_H: np.ndarray | None = None

    def session(self, threads: int = 1, writes: bool = False, missing: str = "") -> Any:
        """Returns a session, whose node lacks the input or output `missing`."""
        has_sinks = self.sinks_H is not None
        names = ["q", "k", "v", "bias", *(["sinks"] if has_sinks else [])]
        inputs, outputs = names, ["y"]
        if writes:
            names = [*names, "new k", "new v", "slots"]
            inputs = [*names[:4], "sinks" if has_sinks else "", *names[-3:]]
            outputs += ["k.out", "v.out"]
        attributes: Any = {"num_heads": self.H, "scale": self.scale, "softcap": self.softcap}
        given, made = (["" if n == missing else n for n in each] for each in (inputs, outputs))
        node = helper.make_node("TreeAttention", given, made, domain=DOMAIN, **attributes)
        return open_session([node], {}, threads, names, [name for name in made if name])

    def inputs(self, order: np.ndarray, some: slice = slice(None)) -> dict[str, np.ndarray]:
        """Returns what the operator reads, where rows lie in this order of slots, and a slot after
        them that nobody sees is not finite."""
        key, value = np.pad(self.cache_GSD[:, None, :, order], ((0, 0),) * 3 + ((0, 1), (0, 0)))
        key[..., -1, :], value[..., -1, :] = np.nan, np.inf
        bias_NS = np.where(self.sees_NS[some, order], np.float32(0), np.float32(-1e9))
        flat = self.query_NHD[some].reshape(1, -1, self.H * self.D)
        given = {"q": flat, "k": key, "v": value, "bias": bias_NS[None, None]}
        return given if self.sinks_H is None else given | {"sinks": self.sinks_H}

    def expected(self) -> np.ndarray:
        """Returns the mixed values f64[1, N, H * D]."""
        rep, wide = self.H // self.G, self.cache_GSD.astype(np.float64)
        key, value = np.repeat(wide, rep, 1)
        scores = np.einsum("nhd,hsd->hns", self.query_NHD, key) * (self.scale or self.D**-0.5)
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores[:, ~self.sees_NS] = -np.inf
        sinks = -np.inf if self.sinks_H is None else self.sinks_H[:, None, None]
        top = np.maximum(scores.max(-1, keepdims=True), sinks)
        weight = np.exp(scores - top)
        weight /= weight.sum(-1, keepdims=True) + np.exp(sinks - top)
        return np.einsum("hns,hsd->nhd", weight, value).reshape(1, len(self.query_NHD), -1)


@pytest.mark.parametrize(
    ("H", "G", "D", "N", "S", "kind"),
    [
        (9, 3, 64, 3, 70, "plain"),
        (2, 2, 8, 1, 1, "plain"),
        (4, 1, 80, 40, 33, "scale"),
        (4, 2, 128, 5, 300, "softcap"),
        (4, 2, 24, 5, 40, "sinks"),
    ],
)
def test_attention_is_that_of_exact_arithmetic(
    instructions: str, H: int, G: int, D: int, N: int, S: int, kind: str
) -> None:
    given = Rows(H, G, D, N, S)
    given.sees_NS[:, 0] = True
    if kind == "sinks":
        given.sinks_H = np.linspace(-3, 9, H, dtype=np.float32)
    elif kind != "plain":
        setattr(given, kind, 0.3)
    y = given.session(2).run(None, given.inputs(np.arange(S)))[0]
    np.testing.assert_allclose(y, given.expected(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("D", [64, 24])
def test_attention_of_a_row_depends_on_no_slots_and_no_other_rows(
    instructions: str, D: int
) -> None:
    for seed in range(4):
        draw, given = np.random.default_rng(seed), Rows(6, 2, D, 9, 90, seed)
        given.softcap = seed % 2 * 2.0
        alone, threads = given.session(1), given.session(3)
        in_order = np.arange(90)
        expected = np.concatenate(
            [alone.run(None, given.inputs(in_order, slice(n, n + 1)))[0] for n in range(9)], 1
        )
        for first, end in ((0, 9), (2, 5), (8, 9)):
            mixed = threads.run(None, given.inputs(draw.permutation(90), slice(first, end)))[0]
            np.testing.assert_array_equal(mixed, expected[:, first:end])


@pytest.mark.parametrize("S", [380, 534, 600, 1024])
def test_terms_are_rounded_alike_in_all_slots(instructions: str, S: int) -> None:
    """The rows of a tile weigh about as much as floats can hold the sum of, or, with 1,024 slots,
    the fraction of every other term is a half but for the lowest bit of its weight."""
    draw, given = np.random.default_rng(S), Rows(2, 1, 8, 3, S)
    given.sees_NS[:] = True
    values_SD = given.cache_GSD[1, 0]
    values_SD[:, 0] = 1
    if S == 1024:
        given.query_NHD[:] = 0
        values_SD[:] = draw.integers(-199, 199, (S, 8)) * 2.0**-18
        values_SD[0] = np.eye(8)[0]  # the longest: weights are 2^17
    else:
        given.query_NHD *= 0.01
        given.cache_GSD[0, 0, 0] *= draw.integers(20, 200)
        values_SD[:, 1:] *= 0.01
    opened, order = given.session(), np.arange(S)
    expected = opened.run(None, given.inputs(order))[0]
    np.testing.assert_allclose(expected, given.expected(), rtol=0, atol=3e-6)
    for _ in range(6):
        mixed = opened.run(None, given.inputs(draw.permutation(order)))[0]
        np.testing.assert_array_equal(mixed, expected)


def test_attention_keeps_what_is_not_finite_in_its_row(instructions: str) -> None:
    given = Rows(2, 1, 16, 4, 20)
    given.sees_NS[:, 3] = [True, False, False, False]
    given.sees_NS[3] = False
    opened, order = given.session(), np.arange(20)
    expected = opened.run(None, given.inputs(order))[0]
    given.cache_GSD[1, 0, 3, 5] = np.nan
    given.query_NHD[1] = np.inf
    y = opened.run(None, given.inputs(order))[0]
    assert np.isnan(y[0, :2]).all()
    np.testing.assert_array_equal(y[0, 2], expected[0, 2])
    np.testing.assert_array_equal(y[0, 3], 0)  # it attends nothing
    assert opened.run(None, given.inputs(order, slice(0, 0)))[0].shape == (1, 0, 32)
    for sink in (np.nan, np.inf):
        given.sinks_H = np.array([0, sink], np.float32)
        y = given.session().run(None, given.inputs(order))[0]
        np.testing.assert_array_equal(np.isnan(y[0, 2]), np.arange(32) >= 16)


def test_a_million_slots_may_weigh_the_same(instructions: str) -> None:
    given = Rows(1, 1, 1, 1, 2**20)
    given.sees_NS[:], given.query_NHD[:], given.cache_GSD[1] = True, 0, 1
    assert given.session().run(None, given.inputs(np.arange(2**20)))[0] == 1


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_writes_new_rows_to_their_slots(instructions: str, has_sinks: bool) -> None:
    given = Rows(4, 2, 8, 3, 10)
    if has_sinks:
        given.sinks_H = np.ones(4, np.float32)
    fed, slots = given.inputs(np.arange(10)), np.array([7, 0, 4])
    expected = given.session().run(None, fed)[0]
    before = {name: fed[name].copy() for name in "kv"}
    for name in "kv":
        before[name][:, :, slots] = -1
    new = {f"new {n}": fed[n][:, :, slots].transpose(0, 2, 1, 3) for n in "kv"} | {"slots": slots}
    opened = given.session(writes=True)
    mixed, *caches = opened.run(None, fed | before | new)
    np.testing.assert_array_equal(mixed, expected)
    for name, cache in zip("kv", caches, strict=True):
        np.testing.assert_array_equal(cache, fed[name])
        assert (before[name][:, :, slots] == -1).all()
    bound = opened.io_binding()  # to the memory of the inputs
    values = {n: ort.OrtValue.ortvalue_from_numpy(before[n]) for n in "kv"}
    for name, array in (fed | new).items():
        if name in values:
            bound.bind_ortvalue_input(name, values[name])
            bound.bind_ortvalue_output(f"{name}.out", values[name])
        else:
            bound.bind_cpu_input(name, np.ascontiguousarray(array))
    bound.bind_output("y")
    opened.run_with_iobinding(bound)
    np.testing.assert_array_equal(bound.get_outputs()[-1].numpy(), expected)
    for name in "kv":
        np.testing.assert_array_equal(values[name].numpy(), fed[name])
    for wrong, said in (
        ({"slots": np.array([0, 11, 1])}, "a slot 11, expected 10"),
        ({"slots": np.array([0, -1, 1])}, "a slot -1, expected 10"),
        ({"slots": np.array([0, 1])}, "elements of an input: 2, expected 3"),
        ({"new v": np.zeros(47, np.float32)}, "elements of an input: 47, expected 48"),
    ):
        with pytest.raises(Exception, match=said):
            opened.run(None, fed | before | new | wrong)


def test_attention_of_what_does_not_fit_is_an_error(instructions: str) -> None:
    given = Rows(4, 2, 8, 3, 10)
    opened, fitting = given.session(), given.inputs(np.arange(10))
    for name, wrong, said in (
        ("q", np.zeros((1, 3, 31)), "values a row 31, expected 32"),
        ("q", np.zeros((3, 32)), "dimensions 2, expected 3"),
        ("k", np.zeros((1, 3, 11, 8)), "a size of an input: 2, expected 3"),
        ("v", np.zeros((1, 2, 12, 8)), "a size of an input: 12, expected 11"),
        ("bias", np.zeros((1, 1, 2, 10)), "a size of an input: 2, expected 3"),
        ("bias", np.zeros((1, 1, 3, 12)), "columns of a bias 12, expected 11"),
    ):
        with pytest.raises(Exception, match=said):
            opened.run(None, fitting | {name: wrong.astype(np.float32)})
    three = {"k": np.zeros((1, 3, 11, 8), np.float32), "v": np.zeros((1, 3, 11, 8), np.float32)}
    with pytest.raises(Exception, match="heads 4, expected 3"):
        opened.run(None, fitting | three)
    new = np.zeros((3, 2, 8), np.float32)
    fed = fitting | {"new k": new, "new v": new, "slots": np.arange(3)}
    for missing in ("new k", "new v", "slots", "k.out", "v.out"):
        with pytest.raises(Exception, match=r"no (in|out)put of number \d"):
            given.session(writes=True, missing=missing).run(None, fed)
    given.H = 2**62  # times 4 values a head, 2^64
    narrow = np.zeros((1, 1, 11, 4), np.float32)
    wide = given.session()
    with pytest.raises(Exception, match="values a row 0, expected 0"):
        wide.run(None, fitting | {"q": three["k"][:, :, 0, :0], "k": narrow, "v": narrow})
    given.H = 0
    with pytest.raises(Exception, match="heads 0"):
        given.session()
