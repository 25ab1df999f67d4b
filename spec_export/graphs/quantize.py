"""Quantises the weights of a slots-form graph to int8 or int4, in ONNX Runtime's operators.

*int8*: every product is row-wise: q = u8(x / s) with zero point 128 and s = max|x| / 127 *of that
row*, so that a tree node's result does not depend on its siblings. Weights are s8 with one scale
per output column; the int32 accumulation is exact.
*int4*: weights are in blocks with zero points or minima, see `four_bits`: 4-bit checkpoints map
exactly. The LM head is in 8 bits, in blocks of 32.
Both keep the embedding in 8 bits with one scale per 32 values (GGUF's Q8_0 maps exactly). Experts
are quantised by `expert_weights`.
"""

from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import MS, GraphEditor, input_at, remove_dead
from spec_export.graphs.expert_weights import quantize_experts, routers
from spec_export.graphs.four_bits import (
    BLOCK,
    LOOKED_AT,
    Form,
    form_of,
    pack_minima,
    pack_zero_points,
    unpack_minima,
    unpack_zero_points,
)
from spec_export.graphs.packed import Arrays, Packed
from spec_export.graphs.rounding import Rounding, num_steps
from spec_runtime.errors import UserError

FULL, REDUCED = 127, 63  # the largest int8 weight in the full and in the reduced range
PRECISIONS = ("fp32", "int8", "int4", "fp16", "bf16")
# Fusions of taps stay in float: some channels of a residual stream are a hundred times as large as
# the rest, which one scale for a row does not survive.
KEPT = "fusions."
# Products with fewer weights stay in float: a drafter's small adapters would gain nothing.
SMALLEST = 4096


def quantize(
    model: ir.Model,
    precision: str,
    reduce_range: bool = False,
    rounding: Rounding | None = None,
    block: int = BLOCK,
    shared: Collection[tuple[int, ...]] = (),
) -> ir.Model:
    """Rewrites `model` (slots form, float32) in place for int8 or int4, and returns it.

    Other precisions are the module's own types, and nothing changes. `reduce_range` keeps int8
    weights within ±63. A matrix is read and quantised only when it is written, after a first look
    at int4, which tells its form; `rounding` then notes what that changed in the layers' products.
    `block` is how many int4 weights share a scale where they are not in 4 bits already. Tables of
    the shapes `shared` stay in float, as the graph has them that lends them. Raises UserError if
    the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise UserError(f"got precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if precision not in ("int8", "int4"):
        return model
    edit = GraphEditor(model, precision)
    model.opset_imports[MS] = 1
    largest = REDUCED if reduce_range else FULL
    rounding = rounding or Rounding()
    product: _Int8 | _Int4 = _Int4(edit, rounding, block)
    if precision == "int8":
        product = _Int8(edit, largest, rounding)
    kept = routers(edit.graph)
    for node in list(edit.graph):
        if node.op_type == "MoE":
            quantize_experts(edit, node, 8 if precision == "int8" else 4)
        weight = None if node in kept else _weight(node)
        if weight is None:
            continue
        if node.op_type == "Gather" and tuple(weight.shape.numpy()) not in shared:
            _quantize_embedding(edit, node, weight)
        elif node.op_type in ("MatMul", "Gemm"):
            is_head = node.op_type == "Gemm"  # Gemm(x, W[V,D], transB=1)
            if weight.shape.numpy()[-1 if is_head else 0] % BLOCK == 0:
                y = product(node, weight, is_head)
                if len(node.inputs) > 2 and node.inputs[2] is not None:  # a Gemm's bias
                    (y,) = edit.add(node, "Add", [y, node.inputs[2]])
                edit.replace(node.outputs[0], y)
    remove_dead(edit.graph)
    return model


def _weight(node: ir.Node) -> ir.TensorProtocol | None:
    """Returns the float matrix this node reads if it is large enough to be quantised, else None."""
    index = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op_type)
    value = None if index is None else node.inputs[index]
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    tensor = value.const_value
    if (
        str(value.name).startswith(KEPT)
        or tensor.dtype != ir.DataType.FLOAT
        or len(tensor.shape) != 2
        or np.prod(tensor.shape.numpy()) < SMALLEST
    ):
        return None
    return tensor


def tables_of(path: Path) -> set[tuple[int, ...]]:
    """Returns the shapes of the embeddings that the graph in a file has in float."""
    nodes = [node for node in ir.load(path).graph if node.op_type == "Gather"]
    weights = [weight for node in nodes if (weight := _weight(node)) is not None]
    return {tuple(weight.shape.numpy()) for weight in weights}


def _quantize_embedding(edit: GraphEditor, node: ir.Node, table: ir.TensorProtocol) -> None:
    """Replaces the Gather of an embedding by one of 8-bit rows and one of their block scales.

    Only the rows asked for are ever unpacked.
    """
    V, D = table.shape.numpy()
    if D % BLOCK:
        return
    packed = Packed(edit, table, _s8_blocks)
    blocks, ids = (V, D // BLOCK), node.inputs[1]
    q = packed.array(0, np.int8, (*blocks, BLOCK), "embedding.q8")
    (row,) = edit.add(node, "Gather", [q, ids], axis=0)
    (row,) = edit.add(node, "Cast", [row], to=ir.DataType.FLOAT.value)
    scale = packed.array(1, np.float32, (*blocks, 1), "embedding.scale")
    (row_scale,) = edit.add(node, "Gather", [scale, ids], axis=0)
    (row,) = edit.add(node, "Mul", [row, row_scale])
    if ids is not None and ids.shape is not None:
        sizes = edit.constant(np.array([0] * len(ids.shape) + [D], np.int64))
    else:
        outer, width = edit.add(node, "Shape", [ids]), edit.constant(np.array([D], np.int64))
        (sizes,) = edit.add(node, "Concat", [*outer, width], axis=0)
    (row,) = edit.add(node, "Reshape", [row, sizes])
    edit.replace(node.outputs[0], row)


class _Int8:
    """Makes row-wise int8 products; all products that read a value share its quantisation."""

    def __init__(self, edit: GraphEditor, largest: int, rounding: Rounding) -> None:
        self.edit, self.largest, self.rounding = edit, largest, rounding
        self.quantized: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self.packed: dict[ir.Value, Packed] = {}

    def __call__(self, node: ir.Node, weight: ir.TensorProtocol, is_head: bool) -> ir.Value:
        edit = self.edit
        x, matrix = input_at(node, 0), input_at(node, 1)
        K, N = weight.shape.numpy()[:: -1 if is_head else 1]
        if x not in self.quantized:
            self.quantized[x] = self._rows(node, x)
        q, size = self.quantized[x]
        if matrix not in self.packed:
            rows = partial(_s8_rows, largest=self.largest)
            pack = rows if is_head else self.rounding.noted(rows, _from_s8_rows, matrix)
            self.packed[matrix] = Packed(edit, weight, pack, is_transposed=not is_head)
        packed = self.packed[matrix]
        inputs = [
            q,
            packed.array(0, np.int8, (K, N), f"{matrix.name}.q8", turn=True),
            edit.constant(np.array(1, np.float32)),
            packed.array(1, np.float32, (N,), f"{matrix.name}.scale"),
            edit.constant(np.array(128, np.uint8)),
        ]
        (y,) = edit.add(node, "MatMulIntegerToFloat", inputs, domain=MS)
        return edit.add(node, "Mul", [y, size])[0]

    def _rows(self, node: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Quantises x [..., K]: returns u8 of the same shape, and max|x| f32 [..., 1] of each row.

        The 1/127 of a row's scale sits in QuantizeLinear's constant and in the weights' scales,
        which saves a node. A zero row's quotient is undefined but finite after the cast, and 0
        times that is 0.
        """
        edit = self.edit
        (size,) = edit.add(node, "Abs", [x])
        (size,) = edit.add(node, "ReduceMax", [size, edit.constant(np.array([-1]))], keepdims=1)
        (ratio,) = edit.add(node, "Div", [x, size])
        step, zero_point = (
            edit.constant(np.array(1 / 127, np.float32)),
            edit.constant(np.array(128, np.uint8)),
        )
        (q,) = edit.add(node, "QuantizeLinear", [ratio, step, zero_point])
        return q, size


class _Int4:
    """Makes products of 4-bit weights in the form of each matrix, see four_bits; the head's have
    8 bits. `size` is that of the blocks of weights without a form of their own."""

    def __init__(self, edit: GraphEditor, rounding: Rounding, size: int) -> None:
        self.edit, self.rounding, self.size = edit, rounding, size
        self.sums: dict[ir.Value, ir.Value] = {}
        self.packed: dict[ir.Value, tuple[Packed, Form]] = {}

    def __call__(self, node: ir.Node, weight: ir.TensorProtocol, is_head: bool) -> ir.Value:
        edit = self.edit
        x, matrix = input_at(node, 0), input_at(node, 1)
        K, N = weight.shape.numpy()[:: -1 if is_head else 1]
        if matrix not in self.packed:
            self.packed[matrix] = self._pack(matrix, weight, is_head)
        packed, form = self.packed[matrix]
        num_blocks, width = K // form.size, form.size if is_head else form.size // 2
        inputs: list[ir.Value] = [
            x,
            packed.array(0, np.uint8, (N, num_blocks, width), "weight.q"),
            packed.array(1, np.float32, (N, num_blocks), "weight.scale"),
        ]
        if not is_head:  # two to a byte
            shape = N, (num_blocks + 1) // 2
            inputs.append(
                edit.constant(np.zeros(shape, np.uint8), "zero_points")
                if form.has_minima
                else packed.array(2, np.uint8, shape, "weight.zero")
            )
        (y,) = edit.add(
            node,
            "MatMulNBits",
            inputs,
            domain=MS,
            K=K,
            N=N,
            bits=8 if is_head else 4,
            block_size=form.size,
            accuracy_level=4,
        )
        if is_head or not form.has_minima:
            return y
        minimum = packed.array(2, np.float32, (num_blocks, N), "weight.minimum", turn=True)
        (offset,) = edit.add(node, "MatMul", [self._sums(node, x, num_blocks), minimum])
        return edit.add(node, "Add", [y, offset])[0]

    def _pack(
        self, matrix: ir.Value, weight: ir.TensorProtocol, is_head: bool
    ) -> tuple[Packed, Form]:
        """Returns a matrix packed, and how."""
        if is_head:
            return Packed(self.edit, weight, _q8), Form(False)
        form = form_of(weight.numpy()[:, :LOOKED_AT].T, self.size)
        if form.has_minima:
            pack = self.rounding.noted(pack_minima, unpack_minima, matrix)
        else:
            whole = partial(pack_zero_points, size=form.size)
            pack = self.rounding.noted(whole, unpack_zero_points, matrix)
        return Packed(self.edit, weight, pack, is_transposed=True), form

    def _sums(self, node: ir.Node, x: ir.Value, num_blocks: int) -> ir.Value:
        """Returns the sums of x over blocks."""
        if x not in self.sums:
            # Rows [N, K] and [1, N, K] alike: the sums [N, B] broadcast over both. Only drafters
            # have stacks of rows [M, N, K], in graphs whose shapes are the tracer's.
            is_stack = x.shape is not None and len(x.shape) == 3 and x.shape[0] != 1
            kept = [0, -1] if is_stack else [-1]
            shape = self.edit.constant(np.array([*kept, num_blocks, BLOCK]))
            (cut,) = self.edit.add(node, "Reshape", [x, shape])
            last = self.edit.constant(np.array([-1]))
            (self.sums[x],) = self.edit.add(node, "ReduceSum", [cut, last], keepdims=0)
        return self.sums[x]


def _in_blocks(rows_NK: np.ndarray) -> np.ndarray:
    """Returns rows in blocks of 32, f32[N, B, 32]."""
    return rows_NK.reshape(len(rows_NK), -1, BLOCK)


def _s8_rows(rows_NK: np.ndarray, largest: int) -> Arrays:
    """Packs rows into s8[N, K] up to ±`largest`, with scales f32[N] that contain the factor 1/127.

    Rows that are whole multiples of one number already, as a checkpoint of 8 bits has them, stay
    as they are.
    """
    size = np.abs(rows_NK).max(-1)
    steps = num_steps(rows_NK, np.zeros_like(size), size, largest)
    # Such a checkpoint may hold −128.
    is_low = (steps == largest) & (largest == FULL) & (rows_NK.max(-1) < size)
    wider = num_steps(rows_NK[is_low], np.zeros(is_low.sum()), size[is_low], FULL + 2, FULL + 1)
    steps[is_low] = np.where(wider == FULL + 1, wider, largest)
    scale = size / steps
    scale[scale == 0] = 1
    return np.rint(rows_NK / scale[:, None]).astype(np.int8), (scale / 127).astype(np.float32)


def _from_s8_rows(packed: Arrays) -> np.ndarray:
    q_NK, scale_N = packed
    return q_NK * (scale_N * 127)[:, None]


def _s8_blocks(rows_NK: np.ndarray) -> Arrays:
    """Packs rows into s8[N, B, 32] with scales f32[N, B, 1]."""
    blocks = _in_blocks(rows_NK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    q = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return q, scale.astype(np.float32)


def _q8(rows_NK: np.ndarray) -> Arrays:
    """Packs rows into u8[N, B, 32] with zero point 128 and scale f32[N, B]."""
    blocks = _in_blocks(rows_NK)
    scale = np.abs(blocks).max(-1) / 127
    q = np.rint(blocks / np.where(scale == 0, 1, scale)[..., None]) + 128
    return q.astype(np.uint8), scale.astype(np.float32)
