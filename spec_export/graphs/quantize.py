"""Quantises the weights of a slots-form graph to int8, int4 or fp8, in ONNX Runtime's operators.

*int8*: every product is row-wise: q = u8(x / s) with zero point 128 and s = max|x| / 127 *of that
row*, so that a tree node's result does not depend on its siblings. Weights are s8 with one scale
per output column; the int32 accumulation is exact.
*int4*: weights are in blocks with zero points or minima, see `four_bits`: 4-bit checkpoints map
exactly. The LM head is in 8 bits, in blocks of 32.
Both keep the embedding in 8 bits with one scale per 32 values (GGUF's Q8_0 maps exactly). Experts
are quantised by `expert_weights`.
*fp8*: weights are 8-bit floats (e4m3) with one scale for each 128 of a row; FP8 checkpoints map
exactly. Only CUDA has the operator, which reads float16. Embedding and experts stay in that.
"""

from collections.abc import Callable, Collection
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
    in_blocks,
    pack_minima,
    pack_zero_points,
    unpack_minima,
    unpack_zero_points,
)
from spec_export.graphs.half import WIDER
from spec_export.graphs.packed import Arrays, Packed
from spec_export.graphs.rounding import Rounding, num_steps

FULL, REDUCED = 127, 63  # the largest int8 weight in the full and in the reduced range
QUANTISED = ("int8", "int4", "fp8")
E4M3 = ir.DataType.FLOAT8E4M3FN.numpy()
FP8_BLOCK, FP8_PRODUCT = 128, "MatMulBlockQuantizedFp8Weight"
# What a block's largest weight may be in e4m3: every mantissa, with the largest exponent it has.
FP8_TOPS = (448, 416, 384, 352, 320, 288, 256, 240)
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
    """Rewrites `model` (slots form, float32, for fp8 narrowed to float16) in place for one of
    QUANTISED, and returns it.

    Other precisions are the module's own types, and nothing changes. `reduce_range` keeps int8
    weights within ±63. A matrix is read and quantised only when it is written, after a first look
    at int4, which tells its form; `rounding` then notes what that changed in the layers' products.
    `block` is how many int4 weights share a scale where they are not in 4 bits already. Tables of
    the shapes `shared` stay in float, as the graph has them that lends them.
    """
    if precision not in QUANTISED:
        return model
    edit = GraphEditor(model, precision)
    model.opset_imports[MS] = 1
    rounding = rounding or Rounding()
    product: _Int8 | _Int4 | _Fp8 = _Fp8(edit, rounding)
    if precision == "int8":
        product = _Int8(edit, rounding, REDUCED if reduce_range else FULL)
    elif precision == "int4":
        product = _Int4(edit, rounding, block)
    kept = routers(edit.graph)
    for node in list(edit.graph):
        if node.op_type == "MoE" and precision != "fp8":
            quantize_experts(edit, node, 8 if precision == "int8" else 4)
        weight = None if node in kept else _weight(node)
        if weight is None:
            continue
        if node.op_type == "Gather":
            if precision != "fp8" and tuple(weight.shape.numpy()) not in shared:
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
    tensor: ir.TensorProtocol = value.meta.get(WIDER, value.const_value)
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


class _Products:
    """Makes products of quantised matrices, each of which is packed once."""

    def __init__(self, edit: GraphEditor, rounding: Rounding) -> None:
        self.edit, self.rounding = edit, rounding
        self._packed: dict[ir.Value, Packed] = {}

    def packed(
        self,
        node: ir.Node,
        weight: ir.TensorProtocol,
        is_head: bool,
        pack: Callable[[np.ndarray], Arrays],
        restore: Callable[[Arrays], np.ndarray],
    ) -> tuple[Packed, int, int]:
        """Returns the matrix [N, K] of a product, K and N; notes what rounding changes in a
        layer's."""
        K, N = weight.shape.numpy()[:: -1 if is_head else 1]
        matrix = input_at(node, 1)
        if matrix not in self._packed:
            noted = pack if is_head else self.rounding.noted(pack, restore, matrix)
            self._packed[matrix] = Packed(self.edit, weight, noted, is_transposed=not is_head)
        return self._packed[matrix], K, N


class _Fp8(_Products):
    """Makes products of 8-bit floats, whose other factor stays in float16."""

    def __call__(self, node: ir.Node, weight: ir.TensorProtocol, is_head: bool) -> ir.Value:
        packed, K, N = self.packed(node, weight, is_head, _e4m3, _from_e4m3)
        inputs = [
            input_at(node, 0),
            packed.array(0, E4M3, (N, K), "weight.fp8"),
            packed.array(1, np.float32, (N, -(-K // FP8_BLOCK)), "weight.scale"),
        ]
        return self.edit.add(node, FP8_PRODUCT, inputs, domain=MS, block_size=FP8_BLOCK)[0]


class _Int8(_Products):
    """Makes row-wise int8 products; all products that read a value share its quantisation."""

    def __init__(self, edit: GraphEditor, rounding: Rounding, largest: int) -> None:
        super().__init__(edit, rounding)
        self.largest = largest
        self.quantized: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def __call__(self, node: ir.Node, weight: ir.TensorProtocol, is_head: bool) -> ir.Value:
        edit, x, name = self.edit, input_at(node, 0), input_at(node, 1).name
        rows = partial(_s8_rows, largest=self.largest)
        packed, K, N = self.packed(node, weight, is_head, rows, _from_s8_rows)
        if x not in self.quantized:
            self.quantized[x] = self._rows(node, x)
        q, size = self.quantized[x]
        inputs = [
            q,
            packed.array(0, np.int8, (K, N), f"{name}.q8", turn=True),
            edit.constant(np.array(1, np.float32)),
            packed.array(1, np.float32, (N,), f"{name}.scale"),
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


class _Int4(_Products):
    """Makes products of 4-bit weights in the form of each matrix, see four_bits; the head's have
    8 bits. `size` is that of the blocks of weights without a form of their own."""

    def __init__(self, edit: GraphEditor, rounding: Rounding, size: int) -> None:
        super().__init__(edit, rounding)
        self.size = size
        self.sums: dict[ir.Value, ir.Value] = {}
        self.forms: dict[ir.Value, Form] = {}

    def __call__(self, node: ir.Node, weight: ir.TensorProtocol, is_head: bool) -> ir.Value:
        edit, x, matrix = self.edit, input_at(node, 0), input_at(node, 1)
        if matrix not in self.forms:
            self.forms[matrix] = Form(False)
            if not is_head:
                self.forms[matrix] = form_of(weight.numpy()[:, :LOOKED_AT].T, self.size)
        form, restore = self.forms[matrix], unpack_zero_points
        pack: Callable[[np.ndarray], Arrays] = partial(pack_zero_points, size=form.size)
        if is_head or form.has_minima:
            pack, restore = _q8 if is_head else pack_minima, unpack_minima
        packed, K, N = self.packed(node, weight, is_head, pack, restore)
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
    blocks = in_blocks(rows_NK, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    q = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return q, scale.astype(np.float32)


def _q8(rows_NK: np.ndarray) -> Arrays:
    """Packs rows into u8[N, B, 32] with zero point 128 and scale f32[N, B]."""
    q, scale = _s8_blocks(rows_NK)
    return (q.astype(np.int16) + 128).astype(np.uint8), scale[..., 0]


def _e4m3(rows_NK: np.ndarray) -> Arrays:
    """Packs rows into 8-bit floats [N, K], with scales f32[N, K / 128].

    A block's largest weight becomes the one of FP8_TOPS with which the squared error is least. For
    a block of an FP8 checkpoint that is the one with its own mantissa, which holds it exactly.
    """
    K = rows_NK.shape[1]
    blocks = in_blocks(np.pad(rows_NK, ((0, 0), (0, -K % FP8_BLOCK))), FP8_BLOCK)
    largest = np.abs(blocks).max(-1)
    best, scale = np.full(largest.shape, np.inf), np.ones_like(largest)
    q = np.zeros(blocks.shape, E4M3)
    for top in FP8_TOPS:
        each = largest / top
        each[each == 0] = 1
        rounded = (blocks / each[..., None]).astype(E4M3)
        error = np.square(rounded.astype(np.float32) * each[..., None] - blocks).sum(-1)
        better = error < best
        q[better], scale[better], best[better] = rounded[better], each[better], error[better]
    return q.reshape(len(q), -1)[:, :K], scale


def _from_e4m3(packed: Arrays) -> np.ndarray:
    q_NK, scale = packed
    return q_NK.astype(np.float32) * scale.repeat(FP8_BLOCK, 1)[:, : q_NK.shape[1]]


def dequantised(model: ir.Model) -> ir.Model:
    """Replaces a graph's products of 8-bit floats by those of the same weights in float16, which
    run anywhere, in place; returns it."""
    edit = GraphEditor(model, "dequantised")
    for node in [node for node in model.graph if node.op_type == FP8_PRODUCT]:
        q, scale = (input_at(node, i).const_value for i in (1, 2))
        assert q is not None
        assert scale is not None
        turned = q.shape.numpy()[::-1]
        weight = edit.lazy(partial(_float16, q, scale), np.float16, turned, "weight")
        (y,) = edit.add(node, "MatMul", [input_at(node, 0), weight])
        edit.replace(node.outputs[0], y)
    remove_dead(model.graph)
    return model


def _float16(q: ir.TensorProtocol, scale: ir.TensorProtocol) -> np.ndarray:
    return _from_e4m3((q.numpy(), scale.numpy())).T.astype(np.float16)
