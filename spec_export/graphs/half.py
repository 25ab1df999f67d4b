"""Brings the arithmetic of a float32 graph into float16 or bfloat16.

Graphs for GPUs need this, because TensorRT and CUDA take a graph's types as they are. Weights,
key/value caches and products take the narrow type. Softmax and what it feeds, up to the next
product, stay in float32, because a sum over a vocabulary overflows float16. All other inputs and
outputs keep their types.
"""

import onnx_ir as ir

from spec_export.graphs.edit import add_initializer, remove_unused_initializers

WIDE = frozenset(("Softmax", "LogSoftmax", "TopK"))
NARROW = frozenset(("MatMul", "Gemm", "Attention"))
FLOAT16 = ir.DataType.FLOAT16
HALVES = {"fp16": FLOAT16, "bf16": ir.DataType.BFLOAT16, "fp8": FLOAT16}  # fp8: but for weights
WIDER = "wider"  # where a narrowed initializer's `meta` has its float32 tensor, for quantising


def narrow(model: ir.Model, precision: str) -> ir.Model:
    """Brings a float32 graph into the type of the precision, in place, and returns it.

    Nothing changes for precisions without a type in HALVES, or where a weight has it already.
    """
    graph, dtype = model.graph, HALVES.get(precision)
    if dtype is None or any(weight.dtype == dtype for weight in graph.initializers.values()):
        return model
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    wide: set[ir.Value | None] = set()

    def as_type(value: ir.Value, wanted: ir.DataType, before: ir.Node | None) -> ir.Value:
        """Returns `value` in the type `wanted`; the cast is made once."""
        if value.dtype == wanted:
            return value
        key = (value, wanted)
        if key not in casts:
            if value.const_value is not None and value.is_initializer():
                casts[key] = _converted(graph, value, wanted)
            else:
                node = ir.node("Cast", [value], {"to": wanted.value})
                casts[key] = made = node.outputs[0]
                made.name, made.shape = f"{value.name}.{wanted.name.lower()}", value.shape
                made.type = ir.TensorType(wanted)
                source = value.producer()
                if source is not None:
                    graph.insert_after(source, node)
                elif before is not None:
                    graph.insert_before(before, node)
                else:
                    graph.append(node)
        return casts[key]

    nodes = list(graph)
    for given in graph.inputs:
        if str(given.name).startswith("kv.") and given.dtype == ir.DataType.FLOAT:
            given.type = ir.TensorType(dtype)
    for node in nodes:
        follows = node.op_type not in NARROW and any(value in wide for value in node.inputs)
        is_wide = node.op_type in WIDE or follows
        wanted = ir.DataType.FLOAT if is_wide else dtype
        # not the indices that TopK finds, which may choose rows of a narrow table
        wide.update(v for v in node.outputs if is_wide and v.dtype == ir.DataType.FLOAT)
        for i, value in enumerate(node.inputs):
            if value is not None and value.dtype in (ir.DataType.FLOAT, dtype):
                node.replace_input_with(i, as_type(value, wanted, nodes[0]))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT.value:
            node.attributes["to"] = ir.AttrInt64("to", dtype.value)
        for output in node.outputs:
            if output.dtype == ir.DataType.FLOAT:
                output.type = ir.TensorType(wanted)
    for i, output in enumerate(graph.outputs):
        name = str(output.name)
        if output.dtype == dtype and not name.startswith("kv."):
            output.name = f"{name}.narrow"
            graph.outputs[i] = cast = as_type(output, ir.DataType.FLOAT, None)
            cast.name = name
    remove_unused_initializers(graph)
    graph.sort()
    return model


def _converted(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Adds an initializer that holds the numbers of the initializer `value` in this type."""
    wide = value.const_value
    assert wide is not None

    def converted() -> ir.TensorProtocol:
        return ir.tensor(wide.numpy().astype(dtype.numpy()), dtype=dtype)

    tensor = ir.LazyTensor(converted, dtype, ir.Shape(wide.shape.numpy()))
    narrowed = add_initializer(graph, tensor, f"{value.name}.{dtype.name.lower()}")
    narrowed.meta[WIDER] = wide
    return narrowed
