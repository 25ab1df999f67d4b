"""Tests int8, int4 and fp8 weights: error bounds, exactness where possible, independent rows.

Tolerance where both sides have the same integers: 2e-6 of the largest value (float32 scales
multiplied in another order).
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graphs import Runner
from tiny_backbone import backbone_of, chain, random_tokens, tiny

from spec_export.graphs.edit import MS
from spec_export.graphs.four_bits import pack_zero_points, unpack_zero_points
from spec_export.graphs.half import narrow
from spec_export.graphs.quantize import (
    BLOCK,
    FP8_BLOCK,
    FP8_PRODUCT,
    _from_s8_rows,
    _s8_rows,
    dequantised,
    quantize,
)
from spec_export.graphs.rounding import Rounding
from spec_export.graphs.slots import to_slots
from spec_export.graphs.trace import export_backbone

K, N, V = 64, 96, 100
SAME_INTEGERS = 2e-6
rng = np.random.default_rng(0)
WEIGHT_KN = rng.normal(size=(K, N)).astype(np.float32)
HEAD_VK = rng.normal(size=(V, K)).astype(np.float32)
TABLE_VK = rng.normal(size=(V, K)).astype(np.float32)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Gives each test its own numbers, whichever tests ran before it."""
    rng.bit_generator.state = np.random.default_rng(1).bit_generator.state


def small_graph(
    weight: np.ndarray = WEIGHT_KN, head: np.ndarray = HEAD_VK, table: np.ndarray = TABLE_VK
) -> ir.Model:
    """Makes y [1,N,·] = x · weight, logits = flat · headᵀ, row = table[ids], as the slots form."""

    def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    def weights(name: str, array: np.ndarray) -> ir.Value:
        initializer = value(name, ir.DataType.FLOAT, *array.shape)
        initializer.const_value = ir.tensor(array, name=name)
        return initializer

    w, h, t = weights("weight", weight), weights("head", head), weights("table", table)
    x = value("x", ir.DataType.FLOAT, 1, "N", weight.shape[0])
    flat = value("flat", ir.DataType.FLOAT, "N", head.shape[1])
    ids = value("ids", ir.DataType.INT64, 1, "N")
    y = value("y", ir.DataType.FLOAT, 1, "N", weight.shape[1])
    logits = value("logits", ir.DataType.FLOAT, "N", head.shape[0])
    row = value("row", ir.DataType.FLOAT, 1, "N", table.shape[1])
    nodes = [
        ir.Node("", "MatMul", [x, w], outputs=[y]),
        ir.Node("", "Gemm", [flat, h], [ir.AttrInt64("transB", 1)], outputs=[logits]),
        ir.Node("", "Gather", [t, ids], outputs=[row]),
    ]
    graph = ir.Graph(
        [x, flat, ids],
        [y, logits, row],
        nodes=nodes,
        initializers=[w, h, t],
        opset_imports={"": 24},
        name="small",
    )
    return ir.Model(graph, ir_version=11)


class Small:
    """Quantises and runs a `small_graph`."""

    def __init__(self, model: ir.Model) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.x64quantprecision", "1")  # as the runtime has it
        self.session = ort.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.K, self.D = (self.session.get_inputs()[i].shape[-1] for i in range(2))

    def products(self, x_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns y [N, ·] and logits [N, V]."""
        feeds = {"x": x_NK[None], "flat": x_NK, "ids": np.zeros((1, 1), np.int64)}
        y, logits = self.session.run(["y", "logits"], feeds)
        return y[0], logits

    def rows(self, ids: np.ndarray) -> np.ndarray:
        feeds = {
            "x": np.zeros((1, 1, self.K), np.float32),
            "flat": np.zeros((1, self.D), np.float32),
            "ids": ids[None],
        }
        return self.session.run(["row"], feeds)[0][0]


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# ---- int8 ----


def int8_reference(x_NK: np.ndarray, weight_KN: np.ndarray, largest: int = 127) -> np.ndarray:
    """Computes what quantize.py's docstring says, with exact integers."""
    x_scale = np.abs(x_NK).max(1, keepdims=True) / 127
    w_scale = np.abs(weight_KN).max(0) / largest
    x_q, w_q = np.rint(x_NK / x_scale), np.rint(weight_KN / w_scale)
    assert np.abs(w_q).max() == largest
    return (x_q.astype(np.int64) @ w_q.astype(np.int64)) * x_scale * w_scale


@pytest.mark.parametrize("reduce_range", [False, True])
def test_int8_products(reduce_range: bool) -> None:
    model = quantize(small_graph(), "int8", reduce_range)
    assert kinds(model)["MatMulIntegerToFloat"] == 2
    small = Small(model)
    x_NK = rng.normal(size=(7, K)).astype(np.float32)
    for got, weight in zip(small.products(x_NK), (WEIGHT_KN, HEAD_VK.T), strict=True):
        close(got, int8_reference(x_NK, weight, 63 if reduce_range else 127), SAME_INTEGERS)
        # half a step of either factor, times the other, K times
        x_step = np.abs(x_NK).max(1, keepdims=True) / 127
        w_step = np.abs(weight).max(0) / (63 if reduce_range else 127)
        bound = x_step / 2 * np.abs(weight).sum(0) + w_step / 2 * np.abs(x_NK).sum(1, keepdims=True)
        assert (np.abs(got - x_NK @ weight) <= bound + K * x_step * w_step / 4).all()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_products_bias_is_kept(precision: str) -> None:
    bias_V, x_NK = rng.normal(size=V).astype(np.float32), np.ones((2, K), np.float32)
    model = small_graph()
    bias = ir.Value(name="bias", const_value=ir.tensor(bias_V, name="bias"))
    model.graph.register_initializer(bias)
    gemm = next(node for node in model.graph if node.op_type == "Gemm")
    gemm.resize_inputs(3)
    gemm.replace_input_with(2, bias)
    _, plain = Small(quantize(small_graph(), precision)).products(x_NK)
    _, biased = Small(quantize(model, precision)).products(x_NK)
    close(biased - plain, np.tile(bias_V, (2, 1)), 1e-4)


def test_int8_rows_do_not_depend_on_each_other() -> None:
    """A row is bitwise the same alone, among seven others, and among far larger ones."""
    small = Small(quantize(small_graph(), "int8"))
    x_NK = rng.normal(size=(8, K)).astype(np.float32)
    alone = [small.products(row[None]) for row in x_NK]
    loud = x_NK.copy()
    loud[5] *= 30
    for batch, unchanged in ((x_NK, range(8)), (loud, [0, 1, 2, 3, 4, 6, 7])):
        for name, together in enumerate(small.products(batch)):
            for i in unchanged:
                assert np.array_equal(together[i], alone[i][name][0])


def test_int8_of_a_zero_row_is_zero() -> None:
    x_NK = rng.normal(size=(3, K)).astype(np.float32)
    x_NK[1] = 0
    for got in Small(quantize(small_graph(), "int8")).products(x_NK):
        assert not got[1].any()
        assert got[0].any()
        assert np.isfinite(got).all()


# ---- int4 ----


def read_weights(small: Small) -> tuple[np.ndarray, np.ndarray]:
    """Returns the graph's weights; a row 127·e_k is exact in accuracy level 4's int8 blocks."""
    y, logits = small.products(127 * np.eye(K, dtype=np.float32))
    return y / 127, logits / 127


def test_int4_weights_are_within_their_steps() -> None:
    model = quantize(small_graph(), "int4")
    assert kinds(model)["MatMulNBits"] == 2
    weight, head = read_weights(Small(model))
    blocks = WEIGHT_KN.reshape(K // BLOCK, BLOCK, N)
    step = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
    error = np.abs(weight - WEIGHT_KN).reshape(blocks.shape)
    assert (error <= 2 * step + 1e-5).all()  # at the ends, where a range was shrunk
    assert np.square(error).mean() < 1.1 * np.square(step).mean() / 12  # as rounding has it
    assert error.max() > step.min() / 8, "not quantised at all?"
    head_blocks = HEAD_VK.reshape(V, K // BLOCK, BLOCK)
    head_step = np.abs(head_blocks).max(-1, keepdims=True) / 127
    head_error = np.abs(head.T - HEAD_VK).reshape(head_blocks.shape)
    assert (head_error <= head_step / 2 + 1e-5).all()


def test_int4_is_exact_on_the_grid_of_q4_1() -> None:
    """Weights are w = d·q + m, q from 0 to 15, as in GGUF's Q4_1; the head has Q8_0's d·q."""
    shape = (K // BLOCK, 1, N)
    d, m = rng.uniform(0.01, 0.2, shape), rng.normal(size=shape)
    q = rng.integers(0, 16, (K // BLOCK, BLOCK, N))
    q[:, 0], q[:, 1] = 0, 15  # a block uses its whole range, as a quantiser leaves it
    grid = (d * q + m).reshape(K, N).astype(np.float32)
    head_q = rng.integers(-127, 128, (V, K // BLOCK, BLOCK))
    head_q[..., 0] = 127
    head_grid = (rng.uniform(0.001, 0.1, (V, K // BLOCK, 1)) * head_q).reshape(V, K)
    weight, head = read_weights(
        Small(quantize(small_graph(grid, head_grid.astype(np.float32)), "int4"))
    )
    close(weight, grid, SAME_INTEGERS)
    close(head, head_grid.T, SAME_INTEGERS)


def test_int4_products_differ_by_the_rounding_of_x_only() -> None:
    """Accuracy level 4 rounds x to int8 blocks, by half of max|x| / 127; weights are exact."""
    q = rng.integers(0, 16, (K // BLOCK, BLOCK, N))
    q[:, 0], q[:, 1] = 0, 15
    d, m = 0.125, -1.0
    grid = (d * q + m).reshape(K, N).astype(np.float32)
    x_NK = rng.normal(size=(5, K)).astype(np.float32)
    y, _ = Small(quantize(small_graph(grid), "int4")).products(x_NK)
    step = np.abs(x_NK.reshape(5, K // BLOCK, BLOCK)).max(-1) / 127  # [5, B]
    bound = (step / 2) @ np.abs(d * q).sum(1)  # the minimum's part is float
    assert (np.abs(y - x_NK @ grid) <= bound + 1e-4).all()


def test_int4_rows_do_not_depend_on_each_other() -> None:
    """The order of float sums may differ between one row and eight, hence 2e-6 relative."""
    small = Small(quantize(small_graph(), "int4"))
    x_NK = rng.normal(size=(8, K)).astype(np.float32)
    x_NK[5] *= 30
    for name, together in enumerate(small.products(x_NK)):
        for i in range(8):
            close(together[i], small.products(x_NK[i : i + 1])[name][0], SAME_INTEGERS)


# ---- fp8 ----

BYTE = np.arange(127)  # the last one of e4m3 is no number
E4M3 = np.where(BYTE < 8, BYTE / 8 * 2.0**-6, (1 + BYTE % 8 / 8) * 2.0 ** (BYTE // 8 - 7))


def quantised_fp8(weight: np.ndarray, head: np.ndarray, rounding: Rounding) -> ir.Model:
    return quantize(narrow(small_graph(weight, head), "fp8"), "fp8", rounding=rounding)


def fp8_products(model: ir.Model) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the weights and the scales, each weight's own, of a graph's products."""
    found = []
    for node in [node for node in model.graph if node.op_type == FP8_PRODUCT]:
        assert node.attributes["block_size"].as_int() == FP8_BLOCK
        q, scale = (node.inputs[i].const_value.numpy() for i in (1, 2))  # type: ignore[union-attr]
        assert (str(q.dtype), scale.dtype) == ("float8_e4m3fn", np.float32)
        assert scale.shape == (len(q), -(-q.shape[1] // FP8_BLOCK))
        found.append((q.astype(np.float32), scale.repeat(FP8_BLOCK, 1)[:, : q.shape[1]]))
    return found


def test_fp8_weights_are_the_nearest_numbers() -> None:
    """Of blocks of 128 in each row, the last of which may be shorter."""
    weight, head = (rng.normal(size=shape).astype(np.float32) for shape in ((192, N), (V, 192)))
    model = quantised_fp8(weight, head, Rounding())
    onnx.checker.check_model(ir.to_proto(model))
    with pytest.raises(Exception, match=f"of operator .{FP8_PRODUCT}"):
        Small(model)  # a CPU has no kernel
    x_NK = rng.normal(size=(5, 192)).astype(np.float32)
    products = fp8_products(model)
    found = Small(dequantised(model)).products(x_NK)
    for (q, scale), rows, got in zip(products, (weight.T, head), found, strict=True):
        places = np.abs(np.abs(rows / scale)[..., None] - E4M3).argmin(-1)
        assert np.array_equal(q, np.sign(rows) * E4M3[places])
        assert 0.01 < np.linalg.norm(q * scale - rows) / np.linalg.norm(rows) < 0.03
        close(got, x_NK @ (q * scale).T, 2e-3)


@pytest.mark.parametrize("tile", [(128, 128), (1, 256), (256, 256)])
def test_fp8_checkpoints_are_held_as_they_are(tile: tuple[int, int]) -> None:
    """Whatever numbers a row of a tile has: small ones only, one mantissa or all."""
    scale = np.kron(rng.uniform(1e-4, 1e-2, (256 // tile[0], 256 // tile[1])), np.ones(tile))
    q = E4M3[rng.integers(0, 127, (256, 256))] * rng.choice([-1, 1], (256, 256))
    q[::3] *= np.abs(q[::3]) < 0.02
    q[1::3] = np.where(rng.random((85, 256)) < 0.5, 240, 3.5)
    rows = (q.astype(np.float32) * scale.astype(np.float32)).astype(np.float32)
    rounding = Rounding()
    model = quantised_fp8(rows.T.copy(), rows, rounding)
    for held, own in fp8_products(model):
        assert (np.abs(held * own - rows) <= 3e-7 * np.abs(rows)).all()
    assert rounding.facts() == {"matrices": 1, "exact": 1, "added_error": 0.0}


# ---- embedding, and what stays in float ----


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 1, 5)])
@pytest.mark.parametrize("is_known", [True, False])
def test_rows_of_an_embedding_lie_as_its_ids_do(shape: tuple[int, ...], is_known: bool) -> None:
    """Rewrites before forget the shapes of values inside a graph."""
    model = small_graph()
    (gather,) = (node for node in model.graph if node.op_type == "Gather")
    ids, row = model.graph.inputs[2], model.graph.outputs[2]
    ids.shape = ir.Shape(shape)
    row.shape = ir.Shape([*shape, K])
    if not is_known:
        inner = ir.node("Identity", [ids])
        model.graph.insert_before(gather, inner)
        gather.replace_input_with(1, inner.outputs[0])
    asked = np.arange(np.prod(shape)).reshape(shape)
    found = Small(quantize(model, "int8")).session.run(
        ["row"],
        {"x": np.zeros((1, 1, K), np.float32), "flat": np.zeros((1, K), np.float32), "ids": asked},
    )[0]
    assert found.shape == (*shape, K)
    assert np.abs(found - TABLE_VK[asked]).max() < 0.02 * np.abs(TABLE_VK).max()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_embedding_has_a_scale_per_block(precision: str) -> None:
    small, ids = Small(quantize(small_graph(), precision)), np.array([3, 99, 0, 3])
    blocks = TABLE_VK[ids].reshape(4, K // BLOCK, BLOCK)
    step = np.abs(blocks).max(-1, keepdims=True) / 127
    error = np.abs(small.rows(ids).reshape(blocks.shape) - blocks)
    assert (error <= step / 2 * 1.0001).all()
    assert error.max() > 0
    q = rng.integers(-127, 128, (V, K // BLOCK, BLOCK))
    q[..., 0] = -127
    d = rng.uniform(0.001, 0.1, (V, K // BLOCK, 1))
    grid = (d * q).reshape(V, K).astype(np.float32)  # GGUF's Q8_0
    exact = Small(quantize(small_graph(table=grid), precision)).rows(ids)
    close(exact, grid[ids], SAME_INTEGERS)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_shapes_that_do_not_divide_and_small_ones_stay_in_float(precision: str) -> None:
    odd = small_graph(
        rng.normal(size=(72, 64)).astype(np.float32),
        rng.normal(size=(64, 72)).astype(np.float32),
        rng.normal(size=(64, 72)).astype(np.float32),
    )
    assert kinds(quantize(odd, precision)) == Counter(["MatMul", "Gemm", "Gather"])
    little = small_graph(WEIGHT_KN[:, :63], HEAD_VK[:63], TABLE_VK[:63])
    assert kinds(quantize(little, precision)) == Counter(["MatMul", "Gemm", "Gather"])


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_float_precisions_change_nothing(precision: str) -> None:
    assert kinds(quantize(small_graph(), precision)) == Counter(["MatMul", "Gemm", "Gather"])


# ---- a whole target ----

LAYERS = 2


@pytest.fixture(scope="module")
def slots_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a tied Qwen3 in float32, which has every kind of product, and one table."""
    hf_model = tiny("qwen3", num_hidden_layers=LAYERS, vocab_size=V, tie_word_embeddings=True)
    runner_folder = tmp_path_factory.mktemp("target")
    model = to_slots(export_backbone(backbone_of(hf_model)))
    ir.save(model, runner_folder / "float.onnx")
    return runner_folder / "float.onnx"


def target_runner(slots_file: Path, precision: str, folder: Path) -> tuple[ir.Model, Runner]:
    model = quantize(ir.load(slots_file), precision)
    return model, Runner(model, folder)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_tied_target_keeps_no_float_matrix(
    precision: str, slots_file: Path, tmp_path: Path
) -> None:
    model, runner = target_runner(slots_file, precision, tmp_path / precision)
    found = kinds(model)
    name = "MatMulIntegerToFloat" if precision == "int8" else "MatMulNBits"
    assert found[name] == 4 * LAYERS + 1
    assert found["Gemm"] == 0
    big = [
        value.name
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT
        and value.shape is not None
        and int(np.prod(value.shape.numpy())) >= 4096
    ]
    assert big == []
    assert model.opset_imports[MS] == 1
    # and it is still the same model: half of the logits' spread would be a random one
    _, exact = target_runner(slots_file, "fp32", tmp_path / "fp32")
    tokens = random_tokens(20, seed=6)
    expected, got = (r.step(tokens, chain(20))["logits"] for r in (exact, runner))
    assert np.isfinite(got).all()
    error = np.sqrt(np.mean((got - expected) ** 2)) / expected.std()
    assert error < {"int8": 0.05, "int4": 0.4}[precision]


def test_an_int8_node_does_not_depend_on_its_siblings(slots_file: Path, tmp_path: Path) -> None:
    """Products are bitwise equal; attention sums in another order, which may move a rounding.

    Hence the bound: a thousandth of the logits' range, while one scale for all rows moves them by
    percents.
    """
    _, runner = target_runner(slots_file, "int8", tmp_path)
    runner.step(random_tokens(9, seed=7), chain(9))
    runner.cache.commit(range(9))
    parents = [0, 0, 0, 1, 1, 2, 3, 3]
    tokens: Any = random_tokens(8, seed=8)
    whole = runner.step(tokens, parents)["logits"]
    spread = whole.max() - whole.min()
    for path in ([0], [0, 1], [0, 2, 5], [0, 1, 3, 7]):
        alone = runner.step([tokens[i] for i in path], chain(len(path)))["logits"]
        assert np.abs(whole[path] - alone).max() <= 1e-3 * spread, path


# ---- what a checkpoint has quantised already ----


def eight_bits(num_steps: int) -> np.ndarray:
    """Makes rows of whole multiples of one number each, the largest of them −`num_steps` of it."""
    q_NK = rng.integers(-num_steps, num_steps, (N, K))
    q_NK[:, 5] = -num_steps
    return (q_NK * rng.uniform(0.01, 0.02, (N, 1)).astype(np.float16)).astype(np.float32)


@pytest.mark.parametrize("num_steps", [128, 127, 100, 7])
def test_int8_keeps_rows_of_eight_bits_as_they_are(num_steps: int) -> None:
    rows_NK, rounding = eight_bits(num_steps), Rounding()
    model = quantize(small_graph(weight=rows_NK.T.copy()), "int8", rounding=rounding)
    x_NK = rng.integers(-127, 128, (5, K)).astype(np.float32)
    x_NK[:, 0] = 127  # so that the activations are exact too
    y, _ = Small(model).products(x_NK)
    close(y, x_NK.astype(np.float64) @ rows_NK.T, SAME_INTEGERS)
    assert rounding.facts() == {"matrices": 1, "exact": 1, "added_error": 0.0}


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_rounding_adds_is_noted(precision: str) -> None:
    rounding = Rounding()
    ir.to_proto(quantize(small_graph(), precision, rounding=rounding))  # writes the weights
    facts = rounding.facts()
    assert facts is not None
    if precision == "int8":
        restored = _from_s8_rows(_s8_rows(WEIGHT_KN.T, 127))
    else:
        restored = unpack_zero_points(pack_zero_points(WEIGHT_KN.T, BLOCK))
    expected = np.linalg.norm(restored - WEIGHT_KN.T) / np.linalg.norm(WEIGHT_KN)
    assert (facts["matrices"], facts["exact"]) == (1, 0)
    assert facts["added_error"] == pytest.approx(expected)
    assert 0.001 < expected < 0.1


def test_nothing_is_noted_where_nothing_is_quantised() -> None:
    rounding = Rounding()
    quantize(small_graph(), "fp32", rounding=rounding)
    assert rounding.facts() is None
