"""Reads from an ONNX file which operators it uses and where its weights lie.

The runtime has no onnx package, and needs these lists only. This walks the protocol-buffer messages
in place and steps over tensors, so that a file of any size takes milliseconds.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from spec_runtime.errors import UserError

# Field numbers of onnx.proto: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
_MODEL_GRAPH, _MODEL_FUNCTIONS = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH, _ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = 5, 6, 10, 11
_ATTRIBUTE_SPARSE, _ATTRIBUTE_SPARSES = 22, 23
_SPARSE_VALUES, _SPARSE_INDICES = 1, 2
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL = 1, 2, 8, 13
_ENTRY_KEY, _ENTRY_VALUE = 1, 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


class ExternalWeight(NamedTuple):
    """Says where a weight of the graph lies: `length` bytes from byte `offset` of a file on.

    `location` is the file's path, relative to the graph's folder. `element_type` is a number of
    ONNX's enumeration TensorProto.DataType: 1 is float32, 10 float16, 16 bfloat16.
    """

    name: str
    element_type: int
    shape: tuple[int, ...]
    location: str
    offset: int
    length: int


@dataclass
class OnnxOutline:
    """Lists what an ONNX file uses.

    `operators` holds names with their domain before them unless it is ONNX's own: "Add",
    "com.microsoft.MatMulNBits". `weight_files` holds the paths, relative to the file's folder, of
    the tensors outside of it, and `weights` those of them that are the graph's own and say where
    they begin and end. `has_functions` says that it defines operators of its own,
    and `nested` holds the operators that run graphs inside themselves, such as "Loop".
    """

    operators: set[str] = field(default_factory=set)
    weight_files: set[str] = field(default_factory=set)
    weights: list[ExternalWeight] = field(default_factory=list)
    nested: set[str] = field(default_factory=set)
    has_functions: bool = False


def read_outline(path: str | Path) -> OnnxOutline:
    """Returns what the ONNX file at `path` uses.

    Graphs inside of nodes and functions are not entered. Raises UserError if it is no protocol
    buffer, is empty, or holds no graph, and OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise UserError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walker(data).model()


class Messages:
    """Reads protocol-buffer messages in place."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data

    def text(self, begin: int, end: int) -> str:
        return self.data[begin:end].decode("utf-8", errors="replace")

    def messages(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields number, begin and end of each field that has a length, and steps over the rest."""
        for number, first, last, value in self.fields(at, end):
            if value < 0:
                yield number, first, last

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields number, begin, end and value of each field that has a length or is a number.

        The value is -1 for a field that has a length; a number ends where it begins.
        """
        while at < end:
            tag, at = self.varint(at, end)
            # A reader takes 32 bits of a tag and drops the others.
            number, kind = (tag & 0xFFFFFFFF) >> 3, tag & 7
            if kind == _BYTES:
                length, at = self.varint(at, end)
                if length > end - at:
                    raise UserError(f"a field of {length} bytes ends after its message")
                yield number, at, at + length, -1
                at += length
            elif kind == _VARINT:
                value, at = self.varint(at, end)
                yield number, at, at, value
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise UserError(f"got wire type {kind} at byte {at}")
        if at > end:
            raise UserError("a field ends after its message")

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Returns the number that begins at byte `at`, and where it ends."""
        value, data = 0, self.data
        for i in range(min(_MAX_VARINT_BYTES, end - at)):
            byte = data[at + i]
            value |= (byte & 0x7F) << (7 * i)
            if byte < 0x80:
                return value, at + i + 1
        raise UserError(f"got no number at byte {at}")


class _Walker(Messages):
    """Walks the messages in `data` and notes what it finds in `found`."""

    def __init__(self, data: mmap.mmap) -> None:
        super().__init__(data)
        self._found = OnnxOutline()

    def model(self) -> OnnxOutline:
        """Returns what the whole file uses."""
        has_graph = False
        for number, begin, end in self.messages(0, len(self.data)):
            if number == _MODEL_GRAPH:
                has_graph = True
                self._graph(begin, end)
            elif number == _MODEL_FUNCTIONS:
                self._found.has_functions = True
        if not has_graph:
            raise UserError("it holds no graph")
        return self._found

    def _graph(self, begin: int, end: int) -> None:
        walks: dict[int, Callable[[int, int], None]] = {
            _GRAPH_NODE: self._node,
            _GRAPH_INITIALIZER: self._weight,
            _GRAPH_SPARSE: self._sparse,
        }
        for number, first, last in self.messages(begin, end):
            if number in walks:
                walks[number](first, last)

    def _node(self, begin: int, end: int) -> None:
        operators, domains, has_graph = [""], [""], False
        for number, first, last in self.messages(begin, end):
            if number == _NODE_OPERATOR:
                operators.append(self.text(first, last))
            elif number == _NODE_DOMAIN:
                domains.append(self.text(first, last))
            elif number == _NODE_ATTRIBUTE:
                has_graph |= self._attribute(first, last)
        # Of a field that comes twice, the last one counts.
        name, domain = operators[-1], domains[-1]
        operator = name if domain in ("", "ai.onnx") else f"{domain}.{name}"
        self._found.operators.add(operator)
        if has_graph:
            self._found.nested.add(operator)

    def _attribute(self, begin: int, end: int) -> bool:
        """Notes the attribute's tensors; returns whether it holds a graph."""
        has_graph = False
        for number, first, last in self.messages(begin, end):
            if number in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
                self._tensor(first, last)
            elif number in (_ATTRIBUTE_SPARSE, _ATTRIBUTE_SPARSES):
                self._sparse(first, last)
            elif number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                has_graph = True
        return has_graph

    def _sparse(self, begin: int, end: int) -> None:
        for number, first, last in self.messages(begin, end):
            if number in (_SPARSE_VALUES, _SPARSE_INDICES):
                self._tensor(first, last)

    def _tensor(self, begin: int, end: int) -> dict[str, str]:
        """Notes the file that a tensor lies in; returns all that it says of its place."""
        place: dict[str, str] = {}
        for number, first, last in self.messages(begin, end):
            if number == _TENSOR_EXTERNAL:
                entry = dict.fromkeys((_ENTRY_KEY, _ENTRY_VALUE), "")
                for part, part_first, part_last in self.messages(first, last):
                    entry[part] = self.text(part_first, part_last)
                place[entry[_ENTRY_KEY]] = entry[_ENTRY_VALUE]
                if entry[_ENTRY_KEY] == "location":
                    self._found.weight_files.add(entry[_ENTRY_VALUE])
        return place

    def _weight(self, begin: int, end: int) -> None:
        """Notes a weight of the graph, and where it lies if that is another file."""
        place = self._tensor(begin, end)
        offset, length = place.get("offset", "0"), place.get("length", "")
        if "location" not in place or not (offset.isdecimal() and length.isdecimal()):
            return
        name, element_type, dims = "", 0, []
        for number, first, last, value in self.fields(begin, end):
            if number == _TENSOR_NAME:
                name = self.text(first, last)
            elif number == _TENSOR_TYPE:
                element_type = value
            elif number == _TENSOR_DIMS and value >= 0:
                dims.append(value)
            elif number == _TENSOR_DIMS:  # several packed into one field
                while first < last:
                    size, first = self.varint(first, last)
                    dims.append(size)
        where = place["location"], int(offset), int(length)
        self._found.weights.append(ExternalWeight(name, element_type, tuple(dims), *where))
