"""Native operators: exact on each instruction set, rows that do not depend on each other, errors.

Each test runs on every instruction set that this CPU has, and names the others as skipped.
"""

from __future__ import annotations

import logging
import subprocess
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
from spec_runtime.kernels import library as kernels
from spec_runtime.kernels.rewrite import DOMAIN, with_few_rows

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

    def session(self, threads: int = 1, changed: dict[str, Any] | None = None) -> Any:
        """Returns a session of this product, with inputs that were changed, or left out."""
        arrays: dict[str, Any] = dict.fromkeys(("weight", "scale", "zero", "minimum", "bias"))
        arrays |= self.inputs | (changed or {})
        present = {name: array for name, array in arrays.items() if array is not None}
        node = helper.make_node(
            "FewRows",
            ["x", *(name if name in present else "" for name in arrays)],
            ["y"],
            domain=DOMAIN,
            bits=self.bits,
            turned=int(self.form == "turned"),
            threads=threads,
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


def open_session(nodes: list[Any], arrays: dict[str, np.ndarray], threads: int = 1) -> Any:
    """Returns a session of a graph from x to y."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", "y"))
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
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
    for seed in range(4):
        K, N = 32 * int(draw.integers(1, 40)), int(draw.integers(1, 200))
        product = Product(form, K, N, 32, seed)
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
    ("precision", "with_minima"),
    [("fp32", True), ("int8", True), ("int4", True), ("int4", False)],
)
def test_a_graph_computes_the_same_with_the_operator(
    instructions: str, tmp_path: Path, precision: str, with_minima: bool
) -> None:
    path, x = tmp_path / "graph.onnx", rows(6, 128)
    onnx.save(_graph(precision, with_minima), path)
    data = with_few_rows(path)
    assert data is not None
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


def test_a_session_has_the_operator_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kernels.library() is None:
        pytest.skip("no C compiler here")
    made = Mock(side_effect=with_few_rows)
    monkeypatch.setattr(session, "with_few_rows", made)
    monkeypatch.setattr(session, "saturates", lambda: False)
    x = rows(3, 128)
    for value, precision, asked in (
        ("0", "int4", []),
        ("1", "int4", [False]),
        ("1", "fp32", [False]),
        ("all", "int8", [True]),
        ("1", "int8", [False]),  # where ONNX Runtime's own are as quick
    ):
        path = tmp_path / f"{precision}-{value}.onnx"
        onnx.save(_graph(precision, True), path)
        monkeypatch.setenv(kernels.WANTED, value)
        made.reset_mock()
        y = run(session._open_shared(path, session.SessionOptions(1)), x)
        assert [call.args[2] for call in made.call_args_list] == asked
        assert y.shape == (3, 128)
    monkeypatch.setattr(session, "with_few_rows", lambda *_: b"no model")
    onnx.save(_graph("int4", False), tmp_path / "other.onnx")
    with caplog.at_level(logging.WARNING):
        other = session._open_shared(tmp_path / "other.onnx", session.SessionOptions(1))
    assert run(other, x).shape == (3, 128)
    assert ["runs without native operators" in message for message in caplog.messages] == [True]
    monkeypatch.setenv(kernels.WANTED, "yes")
    with pytest.raises(UserError, match="got SPECSPLIT_KERNELS='yes', expected 0, 1 or all"):
        session._open_shared(path, session.SessionOptions(1))


def test_a_graph_without_products_stays_as_it_is(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "g", [x], [y])
    onnx.save(helper.make_model(graph), tmp_path / "graph.onnx")
    assert with_few_rows(tmp_path / "graph.onnx") is None


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "NAME", "not-there.so")  # nor installed
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
