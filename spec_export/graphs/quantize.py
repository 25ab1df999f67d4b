"""Quantises the weights of a slots-form graph to int8 or int4, in ONNX Runtime's operators.

*int8*: every product is row-wise: q = u8(x / s) with zero point 128 and s = max|x| / 127 *of that
row*, so that a tree node's result does not depend on its siblings. Weights are s8 with one scale
per output column; the int32 accumulation is exact.
*int4*: weights are w = d·q + m in blocks of 32 (GGUF's Q4_1 maps exactly): MatMulNBits on d·q, plus
the block sums of x times m. The LM head is in 8 bits, in blocks of 32.
Both keep the embedding in 8 bits with one scale per 32 values (GGUF's Q8_0 maps exactly).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import MS, GraphEditor, remove_dead
from spec_runtime.errors import UserError

BLOCK = 32
FULL, REDUCED = 127, 63  # the largest int8 weight in the full and in the reduced range
PRECISIONS = ("fp32", "int8", "int4", "fp16", "bf16")
# Products with fewer weights stay in float: a drafter's small adapters would gain nothing.
SMALLEST = 4096


def quantize(model: ir.Model, precision: str, reduce_range: bool = False) -> ir.Model:
    """Rewrites `model` (slots form, float32) in place for int8 or int4, and returns it.

    Other precisions are the module's own types, and nothing changes. `reduce_range` keeps int8
    weights within ±63. Raises UserError if the precision is unknown.
    """
    if precision not in PRECISIONS:
        raise UserError(f"got precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    if precision not in ("int8", "int4"):
        return model
    edit = GraphEditor(model, precision)
    model.opset_imports[MS] = 1
    largest = REDUCED if reduce_range else FULL
    product = _Int8(edit, largest) if precision == "int8" else _Int4(edit)
    for node in list(edit.graph):
        weight = _weight(node)
        if weight is None:
            continue
        if node.op_type == "Gather":
            _quantize_embedding(edit, node, weight)
        elif node.op_type in ("MatMul", "Gemm"):
            is_head = node.op_type == "Gemm"  # Gemm(x, W[V,D], transB=1)
            weight_KN = weight.T if is_head else weight
            if weight_KN.shape[0] % BLOCK == 0:
                y = product(node, weight_KN, is_head)
                if len(node.inputs) > 2 and node.inputs[2] is not None:  # a Gemm's bias
                    (y,) = edit.add(node, "Add", [y, node.inputs[2]])
                edit.replace(node.outputs[0], y)
    remove_dead(edit.graph)
    return model


def _weight(node: ir.Node) -> np.ndarray | None:
    """Returns the float matrix this node reads if it is large enough to be quantised, else None."""
    index = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op_type)
    value = None if index is None else node.inputs[index]
    if value is None or not value.is_initializer() or value.const_value is None:
        return None
    tensor = value.const_value
    if (
        tensor.dtype != ir.DataType.FLOAT
        or len(tensor.shape) != 2
        or np.prod(tensor.shape.numpy()) < SMALLEST
    ):
        return None
    return tensor.numpy()


def _quantize_embedding(edit: GraphEditor, node: ir.Node, table_VD: np.ndarray) -> None:
    """Replaces the Gather of an embedding by one of 8-bit rows and one of their block scales.

    Only the rows asked for are ever unpacked.
    """
    V, D = table_VD.shape
    if D % BLOCK:
        return
    blocks = table_VD.reshape(V, D // BLOCK, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    q = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    ids = node.inputs[1]
    (row,) = edit.add(node, "Gather", [edit.constant(q, "embedding.q8"), ids], axis=0)
    (row,) = edit.add(node, "Cast", [row], to=ir.DataType.FLOAT.value)
    (row_scale,) = edit.add(
        node, "Gather", [edit.constant(scale.astype(np.float32), "embedding.scale"), ids], axis=0
    )
    (row,) = edit.add(node, "Mul", [row, row_scale])
    (row,) = edit.add(node, "Reshape", [row, edit.constant(np.array([0, 0, -1]))])
    edit.replace(node.outputs[0], row)


class _Int8:
    """Makes row-wise int8 products; all products that read a value share its quantisation."""

    def __init__(self, edit: GraphEditor, largest: int) -> None:
        self.edit, self.largest = edit, largest
        self.quantized: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def __call__(self, node: ir.Node, weight_KN: np.ndarray, is_head: bool) -> ir.Value:
        edit = self.edit
        x = node.inputs[0]
        assert x is not None
        if x not in self.quantized:
            self.quantized[x] = self._rows(node, x)
        q, size = self.quantized[x]
        weight_scale = np.abs(weight_KN).max(0) / self.largest
        weight_scale[weight_scale == 0] = 1
        weight = np.rint(weight_KN / weight_scale).astype(np.int8)
        stem = str(node.inputs[1].name if node.inputs[1] is not None else "weight")
        inputs = [
            q,
            edit.constant(weight, f"{stem}.q8"),
            edit.constant(np.array(1, np.float32)),
            edit.constant((weight_scale / 127).astype(np.float32), f"{stem}.scale"),
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
    """Makes products of 4-bit weights in blocks of 32 with scale and minimum; the head's have 8."""

    def __init__(self, edit: GraphEditor) -> None:
        self.edit = edit
        self.sums: dict[ir.Value, ir.Value] = {}

    def __call__(self, node: ir.Node, weight_KN: np.ndarray, is_head: bool) -> ir.Value:
        edit = self.edit
        x = node.inputs[0]
        assert x is not None
        K, N = weight_KN.shape
        blocks = np.ascontiguousarray(weight_KN.T).reshape(N, K // BLOCK, BLOCK)
        pack: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]] = (
            _q8 if is_head else _q4
        )
        packed, scale, minimum = pack(blocks)
        inputs: list[ir.Value] = [
            x,
            edit.constant(packed, "weight.q"),
            edit.constant(scale, "weight.scale"),
        ]
        if minimum is not None:  # zero points of 0, two to a byte
            zero_points = np.zeros((N, (K // BLOCK + 1) // 2), np.uint8)
            inputs.append(edit.constant(zero_points, "zero_points"))
        (y,) = edit.add(
            node,
            "MatMulNBits",
            inputs,
            domain=MS,
            K=K,
            N=N,
            bits=8 if is_head else 4,
            block_size=BLOCK,
            accuracy_level=4,
        )
        if minimum is None:
            return y
        if x not in self.sums:
            # Rows [N, K] and [1, N, K] alike: the sums [N, B] broadcast over both. Only drafters
            # have stacks of rows [M, N, K], in graphs whose shapes are the tracer's.
            is_stack = x.shape is not None and len(x.shape) == 3 and x.shape[0] != 1
            kept = [0, -1] if is_stack else [-1]
            shape = edit.constant(np.array([*kept, K // BLOCK, BLOCK]))
            (cut,) = edit.add(node, "Reshape", [x, shape])
            self.sums[x] = edit.add(
                node, "ReduceSum", [cut, edit.constant(np.array([-1]))], keepdims=0
            )[0]
        (offset,) = edit.add(
            node, "MatMul", [self.sums[x], edit.constant(minimum.T, "weight.minimum")]
        )
        return edit.add(node, "Add", [y, offset])[0]


def _q4(blocks_NBK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Packs blocks f32[N, B, 32] into 4 bits, so that w ≈ scale·q + minimum.

    Returns q packed u8[N, B, 16] (value 2j in the low half of a byte, 2j+1 in the high half), scale
    f32[N, B] and minimum f32[N, B].
    """
    low, high = blocks_NBK.min(-1), blocks_NBK.max(-1)
    scale = (high - low) / 15
    q = (
        np.rint((blocks_NBK - low[..., None]) / np.where(scale == 0, 1, scale)[..., None])
        .clip(0, 15)
        .astype(np.uint8)
    )
    return q[..., ::2] | (q[..., 1::2] << 4), scale.astype(np.float32), low.astype(np.float32)


def _q8(blocks_NBK: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Packs blocks f32[N, B, 32] into u8[N, B, 32] with zero point 128 and scale f32[N, B]."""
    scale = np.abs(blocks_NBK).max(-1) / 127
    q = np.rint(blocks_NBK / np.where(scale == 0, 1, scale)[..., None]) + 128
    return q.astype(np.uint8), scale.astype(np.float32), None
