"""Edits ONNX graphs: inserts nodes, stores constants, and removes nodes that are no longer read.

The files that rewrite a graph (slots, banks, quantize, half, tensorrt) share these.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

MS = "com.microsoft"  # the domain of ONNX Runtime's own operators
# What a masked attention score is set to, by the type of the scores. It is finite, because a row
# of nothing but −inf would become NaN, and far below any score, in float16 too.
MASKED = {ir.DataType.FLOAT: -1e9, ir.DataType.FLOAT16: -6e4, ir.DataType.BFLOAT16: -1e9}


class GraphEditor:
    """Inserts nodes, constants and inputs into the graph of one model.

    All new names begin with `prefix`, so that they differ from those of other rewrites.
    """

    def __init__(self, model: ir.Model, prefix: str) -> None:
        self.graph = model.graph
        self.prefix = prefix
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}
        self._count = 0

    def name(self, stem: str) -> str:
        """Returns a name that no other value of the graph has."""
        self._count += 1
        return f"{self.prefix}.{stem}.{self._count}"

    def constant(self, array: np.ndarray, stem: str = "const") -> ir.Value:
        """Returns an initializer that holds `array`; equal arrays are stored once."""
        array = np.ascontiguousarray(array)
        key = (str(array.dtype), array.tobytes(), array.shape)
        if key not in self._constants:
            self._constants[key] = add_initializer(self.graph, ir.tensor(array), self.name(stem))
        return self._constants[key]

    def lazy(
        self, make: Callable[[], np.ndarray], dtype: DTypeLike, shape: Sequence[int], stem: str
    ) -> ir.Value:
        """Returns an initializer of this type and shape whose array `make` makes whenever it is
        written."""
        number = ir.DataType.from_numpy(np.dtype(dtype))
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.ascontiguousarray(make())), number, ir.Shape(shape)
        )
        return add_initializer(self.graph, tensor, self.name(stem))

    def add_input(
        self, name: str, dtype: ir.DataType, shape: Sequence[int | str | ir.SymbolicDim | None]
    ) -> ir.Value:
        """Appends an input to the graph and returns it; `name` is taken as given."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def add(
        self,
        before: ir.Node | None,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        num_outputs: int = 1,
        domain: str = "",
        **attributes: int | float | str | list[int],
    ) -> list[ir.Value]:
        """Inserts a node before `before`, at the end for None, and returns its outputs."""
        node = ir.node(
            op_type, list(inputs), attributes or None, domain=domain, num_outputs=num_outputs
        )
        for i, output in enumerate(node.outputs):
            output.name = self.name(f"{op_type.lower()}_{i}")
        if before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(before, node)
        return list(node.outputs)

    def places(
        self, before: ir.Node, rows: ir.Value, shape: Sequence[int], order: Sequence[int], axis: int
    ) -> ir.Value:
        """Inserts what makes of `rows` i64[N] an index for ScatterND, i64[*shape, C], with N in
        place of `shape[axis]`; returns it.

        Component c counts along the axis `order[c]`, and is the row where that is `axis`. Example:
        with rows [7, 3], shape (1, 2), order (0, 1) and axis 0 it is
        [[(7, 0), (7, 1)], [(3, 0), (3, 1)]].
        """
        column_shape = np.where(np.arange(len(shape) + 1) == axis, -1, 1)
        column = self.add(before, "Reshape", [rows, self.constant(column_shape)])
        counted = self.constant(np.moveaxis(np.indices(shape)[list(order)], 0, -1))
        is_row = self.constant(np.equal(order, axis))
        return self.add(before, "Where", [is_row, *column, counted])[0]

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Makes every reader of `old`, graph outputs included, read `new`.

        `new` takes over the shape and the type of `old`, and its name if it was a graph output.
        """
        new.shape, new.type = old.shape, old.type
        name, is_output = old.name, old.is_graph_output()
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if is_output:
            old.name, new.name = self.name("dead"), name


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Stores `tensor` in the graph under this name and returns its value."""
    value = ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )
    graph.register_initializer(value)
    return value


def producer(value: ir.Value | None, op_type: str) -> ir.Node:
    """Returns the node that makes `value` and asserts that it is of this type.

    Any other node means that the graph was not traced by `trace`.
    """
    node = None if value is None else value.producer()
    assert node is not None, value
    assert node.op_type == op_type, (value, op_type, node)
    return node


def input_at(node: ir.Node, index: int) -> ir.Value:
    """Returns the input of `node` at this index and asserts that it is there."""
    value = node.inputs[index]
    assert value is not None, (node, index)
    return value


def fixed_size(value: ir.Value, axis: int) -> int:
    """Returns the size of `value` along `axis` and asserts that it is a number, not a symbol."""
    size = None if value.shape is None else value.shape[axis]
    assert isinstance(size, int), (value, axis)
    return size


def remove_dead(graph: ir.Graph) -> None:
    """Removes the nodes whose outputs are not read, and then the initializers that are not read.

    Nodes are visited from the end, so that a whole dead chain goes in one pass.
    """
    outputs = set(graph.outputs)
    for node in reversed(list(graph)):
        if all(not value.uses() and value not in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    remove_unused_initializers(graph)


def remove_unused_initializers(graph: ir.Graph) -> None:
    """Removes the initializers that no node reads and that are no output of the graph."""
    outputs = set(graph.outputs)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in outputs:
            del graph.initializers[name]
