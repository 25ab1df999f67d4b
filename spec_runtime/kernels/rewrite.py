"""Puts native operators into a graph: FewRows in place of the nodes of each product with weights,
and TreeAttention in place of each GroupQueryAttention. Norms, gates and rotations beside a product
become its node's too: each node costs a pass microseconds, in which waiting threads fall asleep.

The runtime has no onnx package: this edits the file's messages. Weights stay where they lie, in the
files beside the graph's, and FewRows reads them as they are.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from spec_runtime.bundle.onnx_file import Messages

DOMAIN = "specsplit"
# Field numbers of onnx.proto, see bundle/onnx_file.py
_MODEL_GRAPH, _MODEL_OPSETS, _OPSET_DOMAIN, _OPSET_VERSION = 7, 8, 1, 2
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_OUTPUT, _OUTPUT_NAME = 1, 5, 12, 1
_INPUT, _OUTPUT, _NAME, _OPERATOR, _ATTRIBUTE, _DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_TYPE, _IS_INT = 1, 3, 20, 2
_LAST = 2**64 - 1  # the axis -1
_ZERO = b"\x15\0\0\0\0\xa0\1\1"  # the number of an attribute that is a float, and its type
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW, _FLOAT = 1, 2, 8, 9, 1
# What a row is quantised with: QuantizeLinear's scale and zero point, and the product's scale.
_STEP, _MIDDLE, _ONE = struct.pack("<f", 1 / 127), b"\x80", struct.pack("<f", 1)
_NUM_INPUTS = 6  # of FewRows, before those of a norm and of a rotation
_Makers = Mapping[str, "_Node"]  # by the names of their outputs

# Products and attention whose results for a row depend on the other rows of a pass, or on slots.
_INEXACT = {"MatMul", "Gemm", "Attention", "Conv"} | {
    f"com.microsoft.{name}" for name in ("GroupQueryAttention", "MatMulNBits", "MoE", "QMoE")
}


class NativeModel(NamedTuple):
    """An ONNX file with native operators, and whether the results for a row depend on neither the
    other rows of a pass nor the slots of what it attends."""

    data: bytes
    has_exact_rows: bool


@dataclass
class _Node:
    """One node, and its message. `integers` holds its attributes that are whole numbers, and
    `attributes` the messages of all."""

    message: bytes
    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    integers: dict[str, int] = field(default_factory=dict)
    attributes: dict[str, bytes] = field(default_factory=dict)


def with_operators(path: Path, threads: int = 1) -> NativeModel | None:
    """Returns the ONNX file at `path` with FewRows in place of each product, and TreeAttention in
    place of each attention, that they can compute, or None if there is none. The session will have
    `threads`."""
    data, parts, graph = path.read_bytes(), [], None
    for number, begin, end, value in Messages(data).fields(0, len(data)):
        if number == _MODEL_GRAPH:
            graph = _Graph(data[begin:end], threads)
        else:
            is_number = value >= 0
            parts.append(_number(number, value) if is_number else _message(number, data[begin:end]))
    if graph is None or not graph.replace():
        return None
    opset = _message(_OPSET_DOMAIN, DOMAIN.encode()) + _number(_OPSET_VERSION, 1)
    parts += [_message(_MODEL_OPSETS, opset), _message(_MODEL_GRAPH, graph.bytes())]
    return NativeModel(b"".join(parts), graph.has_exact_rows)


class _Graph:
    """Holds a graph's nodes, and all else of its message as it was."""

    def __init__(self, data: bytes, threads: int) -> None:
        self._threads = threads
        self._nodes: list[_Node] = []
        self._others: list[bytes] = []
        self._outputs: list[str] = []
        self._constants: dict[str, bytes] = {}  # small ones, which stand in the file itself
        self._shapes: dict[str, tuple[int, ...]] = {}  # of initializers in float32
        reader = Messages(data)
        for number, begin, end in reader.messages(0, len(data)):
            if number == _GRAPH_NODE:
                self._nodes.append(_node(data[begin:end]))
                continue
            self._others.append(_message(number, data[begin:end]))
            if number not in (_GRAPH_OUTPUT, _GRAPH_INITIALIZER):
                continue
            texts = {n: data[a:b] for n, a, b in reader.messages(begin, end)}
            if number == _GRAPH_OUTPUT:
                self._outputs.append(texts[_OUTPUT_NAME].decode())
                continue
            name = texts[_TENSOR_NAME].decode()
            if _TENSOR_RAW in texts:
                self._constants[name] = texts[_TENSOR_RAW]
            numbers = [(n, value) for n, _, _, value in reader.fields(begin, end)]
            if (_TENSOR_TYPE, _FLOAT) in numbers:
                self._shapes[name] = tuple(value for n, value in numbers if n == _TENSOR_DIMS)

    def bytes(self) -> bytes:
        """Returns the graph's message."""
        nodes = [_message(_GRAPH_NODE, node.message) for node in self._nodes]
        return b"".join([*nodes, *self._others])

    @property
    def has_exact_rows(self) -> bool:
        return not any(node.operator in _INEXACT for node in self._nodes)

    def replace(self) -> bool:
        """Replaces the nodes of all products and attentions, and returns whether there was one."""
        makers = {name: node for node in self._nodes for name in node.outputs if name}
        uses = Counter(name for node in self._nodes for name in node.inputs)
        uses.update(self._outputs)
        made: dict[str, _Node] = {}  # by the output that is now theirs
        for node in self._nodes:
            product = self._int8(node, makers, uses) or self._int4(node, makers, uses)
            product = product or self._float(node) or self._attention(node, makers, uses)
            if product is not None:
                made[node.outputs[0]] = product
        taken = {name for node in made.values() for name in node.outputs[1:]}
        self._nodes = [
            made.get(node.outputs[0], node) for node in self._nodes if node.outputs[0] not in taken
        ]
        self._remove_unread()  # also a MatMulNBits that was replaced before the Add of its minima
        self._join_neighbours()
        return bool(made)

    def _join_neighbours(self) -> None:
        """Has each FewRows compute what stands before and after it, where it can."""
        makers = {name: node for node in self._nodes for name in node.outputs if name}
        readers: dict[str, list[_Node | None]] = {name: [None] for name in self._outputs}
        for node in self._nodes:
            for name in node.inputs:
                readers.setdefault(name, []).append(node)
        joined, gone = [], set()
        for node in self._nodes:
            if node.operator != f"{DOMAIN}.FewRows":
                joined.append(node)
                continue
            x, *inputs = [*node.inputs, *[""] * _NUM_INPUTS][:_NUM_INPUTS]
            outputs, attributes = [node.outputs[0], "", "", ""], node.attributes.copy()
            before = makers.get(x)
            if before and readers[x] == [node] and self._is_norm(before):
                x, *added, norm = before.inputs
                inputs += [norm, *(added or [""])]
                outputs[3:] = before.outputs[3:]
                attributes["epsilon"] = before.attributes["epsilon"]
                gone.add(id(before))
            else:
                gates = before and _gates(before, makers)
                x, inputs = gates or x, [*inputs, "", ""]
                attributes |= _integers(gated=int(bool(gates)))
            if after := self._rotation(outputs[0], makers, readers):
                split, rotary, cut = after
                inputs += rotary.inputs[1:]
                outputs[:3] = [*cut.outputs, split.outputs[1]]
                queries, keys = struct.unpack("<2q", self._constants[cut.inputs[1]])
                heads = rotary.integers["num_heads"]
                attributes |= _integers(heads=heads, queries=queries, keys=keys)
                gone.update(map(id, after))
            joined.append(_native("FewRows", [x, *inputs], outputs, attributes))
        self._nodes = [node for node in joined if id(node) not in gone]
        self._remove_unread()

    def _is_norm(self, node: _Node) -> bool:
        """Returns whether `node` is an RMS norm of rows, or of their sums with others."""
        if node.operator == "RMSNormalization":
            is_plain = node.integers.get("axis") == _LAST and len(node.inputs) == 2
        else:
            is_plain = node.operator == "com.microsoft.SkipSimplifiedLayerNormalization"
            is_plain = is_plain and len(node.inputs) == 3 and not any(node.outputs[1:3])
        has_weight = len(self._shapes.get(node.inputs[-1], ())) == 1 if is_plain else False
        return has_weight and "epsilon" in node.attributes

    def _rotation(
        self, name: str, makers: _Makers, readers: Mapping[str, list[_Node | None]]
    ) -> list[_Node] | None:
        """Returns the three nodes that part queries and keys from values, rotate them, and part
        them, if nobody else reads the product `name`."""
        found: list[_Node] = []
        for operator in ("Split", "RotaryEmbedding", "Split"):
            node, *others = readers.get(name, [None])
            if node is None or others or node.operator != operator or node.inputs[0] != name:
                return None
            found.append(node)
            name = node.outputs[0]
        split, rotary, cut = found
        is_plain = len(rotary.inputs) == 4 and not rotary.integers.get("interleaved")
        for each in (split, cut):
            is_plain &= each.integers.get("axis") == _LAST and len(each.outputs) == 2
        sizes = self._constants.get(cut.inputs[1], b"") if is_plain else b""
        is_plain = len(sizes) == struct.calcsize("<2q") and not makers.keys() & rotary.inputs[1:]
        return found if is_plain else None

    def _int8(self, node: _Node, makers: _Makers, uses: Mapping[str, int]) -> _Node | None:
        """Returns FewRows if `node` is the last of a row-wise int8 product, see quantize._Int8."""
        product = _maker(node, 0, "Mul", "com.microsoft.MatMulIntegerToFloat", makers)
        if product is None or uses[product.outputs[0]] != 1 or len(product.inputs) != 5:
            return None
        rows = _maker(product, 0, None, "QuantizeLinear", makers)
        ratio = rows and _maker(rows, 0, None, "Div", makers)
        most = ratio and _maker(ratio, 1, None, "ReduceMax", makers)
        size = most and _maker(most, 0, None, "Abs", makers)
        if not (rows and ratio and most and size):
            return None
        _, weight, one, scale, middle = product.inputs
        constants = [self._constants.get(name) for name in (*rows.inputs[1:], one, middle)]
        if (
            constants != [_STEP, _MIDDLE, _ONE, _MIDDLE]
            or node.inputs[1] != most.outputs[0]
            or size.inputs[0] != ratio.inputs[0]
        ):
            return None
        return self._few_rows([ratio.inputs[0], weight, scale], node.outputs[0], bits=0)

    def _int4(self, node: _Node, makers: _Makers, uses: Mapping[str, int]) -> _Node | None:
        """Returns FewRows if `node` is a MatMulNBits, or adds minima to one, see quantize._Int4."""
        if node.operator == "com.microsoft.MatMulNBits":
            bits, block = node.integers.get("bits", 4), node.integers.get("block_size", 1)
            if len(node.inputs) > (4 if bits == 4 else 3) or node.integers.get("K", 1) % block:
                return None
            return self._few_rows(node.inputs, node.outputs[0], bits=bits)
        product = _maker(node, 0, "Add", "com.microsoft.MatMulNBits", makers)
        offset = _maker(node, 1, "Add", "MatMul", makers)
        if product is None or offset is None or uses[product.outputs[0]] != 1:
            return None
        sums = _maker(offset, 0, None, "ReduceSum", makers)
        cut = sums and _maker(sums, 0, None, "Reshape", makers)
        if not cut or cut.inputs[0] != product.inputs[0] or len(product.inputs) != 4:
            return None
        return self._few_rows([*product.inputs, offset.inputs[1]], node.outputs[0], bits=4)

    def _float(self, node: _Node) -> _Node | None:
        """Returns FewRows if `node` is a product with an initializer in float32."""
        is_gemm, (_, weight, *bias) = node.operator == "Gemm", [*node.inputs, "", ""][:3]
        if node.operator not in ("MatMul", "Gemm") or len(self._shapes.get(weight, ())) != 2:
            return None
        turned = int(is_gemm and node.integers.get("transB", 0))
        columns = self._shapes[weight][not turned]
        is_plain = not node.integers.get("transA") and node.message.count(_ONE) == 2 * is_gemm
        if not is_plain or (bias != [""] and self._shapes.get(bias[0]) != (columns,)):
            return None
        inputs = [node.inputs[0], weight, "", "", "", *bias]
        return self._few_rows(inputs, node.outputs[0], bits=32, turned=turned)

    def _attention(self, node: _Node, makers: _Makers, uses: Mapping[str, int]) -> _Node | None:
        """Returns TreeAttention if `node` is an attention of slots._attend_with_bias in float32. It
        also writes the layer's new rows, unless another layer reads them too."""
        if node.operator != "com.microsoft.GroupQueryAttention" or node.integers.get("causal") != 0:
            return None
        query, _, _, keys, values, _, _, *rotary, bias = node.inputs[:11]
        bias_of = makers.get(bias)
        if any(rotary) or bias_of is None or bias_of.operator != "Where":
            return None
        if len(self._constants.get(bias_of.inputs[1], b"")) != struct.calcsize("f"):
            return None
        zeros = (_message(_ATTRIBUTE_NAME, name) + _ZERO for name in (b"scale", b"softcap"))
        scale, softcap = map(node.attributes.get, ("scale", "softcap"), zeros)
        sinks = node.inputs[11] if len(node.inputs) > 11 else ""
        inputs, outputs = [query, keys, values, bias, sinks], [node.outputs[0]]
        writes = [_write(name, makers) for name in (keys, values)]
        is_own = all(uses[name] == 1 + (name in self._outputs) for name in (keys, values))
        if is_own and None not in writes:
            pasts, rows, slots = zip(*(write for write in writes if write), strict=True)
            inputs = [query, *pasts, bias, sinks, *rows, slots[0]]
            outputs += [keys, values]
        attributes = {"num_heads": node.attributes["num_heads"], "scale": scale, "softcap": softcap}
        return _native("TreeAttention", inputs, outputs, attributes)

    def _few_rows(self, inputs: list[str], output: str, **attributes: int) -> _Node:
        numbers = _integers(**attributes, gated=0, heads=0, threads=self._threads)
        return _native("FewRows", inputs, [output], numbers)

    def _remove_unread(self) -> None:
        """Removes nodes whose outputs nobody reads, from the end on."""
        read, kept = set(self._outputs), []
        for node in reversed(self._nodes):
            if read.intersection(node.outputs):
                kept.append(node)
                read.update(node.inputs)
        self._nodes = kept[::-1]


def _maker(
    node: _Node, index: int, operator: str | None, wanted: str, makers: _Makers
) -> _Node | None:
    """Returns the node that makes this input, if it is a `wanted` and `node` is an `operator`."""
    if operator is not None and node.operator != operator:
        return None
    maker = makers.get(node.inputs[index]) if index < len(node.inputs) else None
    return maker if maker is not None and maker.operator == wanted else None


def _write(cache: str, makers: _Makers) -> tuple[str, str, str] | None:
    """Returns a cache before its rows are written, these rows, and where they go, if slots.write
    wrote them."""
    scatter = makers.get(cache)
    if scatter is None or scatter.operator != "ScatterND":
        return None
    past, indices, rows = scatter.inputs
    place = makers.get(indices)
    while place is not None and place.operator in ("Where", "Add", "Mul"):  # older ones add
        place = makers.get(place.inputs[place.operator == "Where"])
    if place is None or place.operator != "Reshape":
        return None
    cut = makers.get(rows)
    return past, cut.inputs[0] if cut and cut.operator == "Reshape" else rows, place.inputs[0]


def _gates(node: _Node, makers: _Makers) -> str | None:
    """Returns the rows of gates and values of which `node` makes SiLU(gate) * value, if it does."""
    silu = _maker(node, 0, "Mul", "Mul", makers)
    sigmoid = silu and _maker(silu, 1, None, "Sigmoid", makers)
    split = sigmoid and _maker(sigmoid, 0, None, "Split", makers)
    if not (silu and sigmoid and split) or split.integers.get("axis") != _LAST:
        return None
    read = [silu.inputs[0], node.inputs[1]]
    is_plain = split.outputs == read == [*sigmoid.inputs, read[1]] and len(split.inputs) == 1
    return split.inputs[0] if is_plain else None


def _integers(**values: int) -> dict[str, bytes]:
    """Returns the messages of attributes that are whole numbers."""
    return {
        name: _message(_ATTRIBUTE_NAME, name.encode())
        + _number(_ATTRIBUTE_INT, value)
        + _number(_ATTRIBUTE_TYPE, _IS_INT)
        for name, value in values.items()
    }


def _native(
    operator: str, inputs: list[str], outputs: list[str], attributes: Mapping[str, bytes]
) -> _Node:
    parts = [_message(_INPUT, name.encode()) for name in inputs]
    parts += [_message(_OUTPUT, name.encode()) for name in outputs]
    parts += [
        _message(_NAME, f"{operator}.{outputs[0]}".encode()),
        _message(_OPERATOR, operator.encode()),
        _message(_DOMAIN, DOMAIN.encode()),
        *(_message(_ATTRIBUTE, attribute) for attribute in attributes.values()),
    ]
    name = f"{DOMAIN}.{operator}"
    return _Node(b"".join(parts), name, inputs, outputs, attributes=dict(attributes))


def _node(message: bytes) -> _Node:
    node, domain, reader = _Node(message), "", Messages(message)
    for number, begin, end in reader.messages(0, len(message)):
        if number == _INPUT:
            node.inputs.append(reader.text(begin, end))
        elif number == _OUTPUT:
            node.outputs.append(reader.text(begin, end))
        elif number == _OPERATOR:
            node.operator = reader.text(begin, end)
        elif number == _DOMAIN:
            domain = reader.text(begin, end)
        elif number == _ATTRIBUTE:
            name = ""
            for part, first, last, value in reader.fields(begin, end):
                if part == _ATTRIBUTE_NAME:
                    name = reader.text(first, last)
                elif part == _ATTRIBUTE_INT:
                    node.integers[name] = value
            node.attributes[name] = message[begin:end]
    if domain not in ("", "ai.onnx"):
        node.operator = f"{domain}.{node.operator}"
    return node


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _message(number: int, message: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(message)) + message
