"""Quantises the weights of experts: com.microsoft.MoE becomes QMoE, in blocks of 32.

*int8*: w = s·(q − 128). A block whose weights are multiples of a power of two, as all of MXFP4's
are, is held exactly. *int4*: w = s·(q − z), with a whole zero point z for each block. ONNX Runtime
quantises each row's activations in blocks of 32 as well, so that a tree node does not depend on its
siblings.
"""

from functools import partial

import numpy as np
import onnx_ir as ir

from spec_export.graphs.edit import MS, GraphEditor, input_at
from spec_export.graphs.four_bits import BLOCK, pack_zero_points
from spec_export.graphs.packed import Arrays, Packed

KEPT = (  # attributes that both operators have
    "k",
    "normalize_routing_weights",
    "activation_type",
    "swiglu_fusion",
    "swiglu_limit",
    "activation_alpha",
    "activation_beta",
)


def quantize_experts(edit: GraphEditor, node: ir.Node, bits: int) -> None:
    """Replaces a MoE node by QMoE with weights of 8 or 4 bits; leaves widths that blocks do not
    divide."""
    matrices = [input_at(node, i) for i in (2, 4)]
    weights = [value.const_value for value in matrices if value.const_value is not None]
    assert len(weights) == len(matrices), "the experts' weights are constants"
    shapes = [tuple(weight.shape.numpy()) for weight in weights]
    # ONNX Runtime takes zero points by block only where a row has more than one.
    if any(K % BLOCK or K == BLOCK for _, _, K in shapes):
        return
    biases = [*node.inputs, None, None, None][3:6:2]  # trailing absent inputs are not listed
    inputs: list[ir.Value | None] = [*node.inputs[:2]]
    zero_points: list[ir.Value] = []
    for value, weight, (E, R, K), bias in zip(matrices, weights, shapes, biases, strict=True):
        pack = _q8 if bits == 8 else partial(pack_zero_points, size=BLOCK)
        packed, blocks = Packed(edit, weight, pack), K // BLOCK
        q = packed.array(0, np.uint8, (E, R, K * bits // 8), f"{value.name}.q")
        scale = packed.array(1, np.float32, (E, R, blocks), f"{value.name}.s")
        inputs += [q, scale, bias]
        if bits == 4:
            shape = (E, R, (blocks + 1) // 2)
            zero_points.append(packed.array(2, np.uint8, shape, f"{value.name}.zero"))
    if zero_points:
        inputs += [None, None, None, *zero_points]
    kept = {name: node.attributes[name].value for name in KEPT if name in node.attributes}
    (y,) = edit.add(
        node,
        "QMoE",
        inputs,
        domain=MS,
        expert_weight_bits=bits,
        block_size=BLOCK,
        accuracy_level=4,
        **kept,
    )
    edit.replace(node.outputs[0], y)


def routers(graph: ir.Graph) -> set[ir.Node]:
    """Returns the products that choose experts, which stay in float: a rounded one would choose
    others."""
    found = set()
    for node in graph:
        if node.op_type == "MoE":
            made = input_at(node, 1).producer()
            while made is not None and made.op_type != "MatMul":
                made = input_at(made, 0).producer()
            assert made is not None, node
            found.add(made)
    return found


def _q8(rows_RK: np.ndarray) -> Arrays:
    """Packs rows into u8[R, K] with scales f32[R, B]."""
    blocks = rows_RK.reshape(len(rows_RK), -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    scale[scale == 0] = 1
    power = np.exp2(np.ceil(np.log2(scale)))
    is_exact = (np.rint(blocks / power) * power == blocks).all(-1, keepdims=True)
    scale = np.where(is_exact, power, scale).astype(np.float32)
    q = (np.rint(blocks / scale) + 128).astype(np.uint8)
    return q.reshape(rows_RK.shape), scale[..., 0]
