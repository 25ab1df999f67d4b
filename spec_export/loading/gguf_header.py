"""Reads the header of a GGUF file and checks that the whole file is there.

A header that lies about a count or a length would keep other readers busy for ever, or give them
numbers from beyond the end of the file. The reader of the package `gguf` is one of them: it goes on
for ever where an array's count is a lie, and takes seconds for the tokens of a whole file.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.errors import UserError

MAX_DIMENSIONS = 4  # ggml has no tensors of more
STRING, ARRAY = 8, 9
# Tensors that hold no weights: factors by which the frequencies of rotary embeddings are divided.
FREQS, LONG, SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))
# The types of metadata values that have one size, by their number: format for `struct`.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True)
class GGUFHeader:
    """Says what a whole GGUF file holds.

    architecture: the name of the model's kind. tensor_names: in the file's order. values: the
    metadata by their keys, which are numbers, strings or lists of either. rope_factors: the numbers
    of the tensors FREQS, LONG and SHORT that there are.
    """

    architecture: str
    tensor_names: tuple[str, ...]
    values: dict[str, Any]
    rope_factors: dict[str, list[float]]


def read(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file.

    Raises UserError, which says what is wrong, unless the file has all the bytes that its header
    speaks of.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is no whole GGUF file: {error}; download or convert it again"
        ) from error


class _Cursor:
    """Reads values one after the other; each method raises UserError at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise UserError("it does not begin with GGUF")
        self.position = 4
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            raise UserError(f"it is of version {version}, expected 2 or 3")
        values = {"general.alignment": 32}
        for _ in range(num_values):
            key, kind = self.text(), self.number("I")
            values[key] = self.value(kind)
        architecture, alignment = values.get("general.architecture"), values["general.alignment"]
        if not architecture or not isinstance(architecture, str):
            raise UserError("it names no general.architecture")
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"it has alignment {alignment!r:.40}, expected a power of two")
        starts = dict[str, int]()  # where the rotary factors' bytes start
        ends = dict[str, int]()  # where each tensor's bytes end, from the first tensor's start
        for _ in range(num_tensors):
            name, offset, end = self.tensor()
            if name in ends:
                raise UserError(f"it holds tensor {name} twice")
            ends[name] = end
            if name in (FREQS, LONG, SHORT):
                starts[name] = offset
        start = -(-self.position // alignment) * alignment
        for name, end in ends.items():
            if start + end > len(self.data):
                raise UserError(
                    f"tensor {name} ends at byte {start + end}, the file at {len(self.data)}"
                )
        factors = {
            name: np.frombuffer(self.data[start + offset : start + ends[name]], "<f4").tolist()
            for name, offset in starts.items()
        }
        return GGUFHeader(architecture, tuple(ends), values, factors)

    def number(self, kind: str) -> Any:
        try:
            (value,) = struct.unpack_from(f"<{kind}", self.data, self.position)
        except struct.error:
            raise UserError("it ends inside its header") from None
        self.position += struct.calcsize(f"<{kind}")
        return value

    def skip(self, num_bytes: int) -> int:
        """Moves on, and returns the position before."""
        if num_bytes > len(self.data) - self.position:
            raise UserError("it ends inside its header")
        self.position += num_bytes
        return self.position - num_bytes

    def text(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        return self.data[start : self.position].decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Returns a value of the metadata, whose kind is a number of the format."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise UserError(f"it holds a value of the unknown kind {kind}")
        item, count = self.number("I"), self.number("Q")
        if item in SCALARS:
            start = self.skip(count * struct.calcsize(f"<{SCALARS[item]}"))
            return list(struct.unpack_from(f"<{count}{SCALARS[item]}", self.data, start))
        if item != STRING:
            raise UserError(f"it holds an array of kind {item}, expected numbers or strings")
        return [self.text() for _ in range(count)]

    def tensor(self) -> tuple[str, int, int]:
        """Returns a tensor's name, and where its bytes start and end."""
        import gguf

        name, num_dimensions = self.text(), self.number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise UserError(f"tensor {name} has {num_dimensions} dimensions")
        shape = [self.number("Q") for _ in range(num_dimensions)]
        kind, offset = self.number("I"), self.number("Q")
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise UserError(f"tensor {name} is of the unknown type {kind}") from None
        if not shape or shape[0] % block:
            raise UserError(f"tensor {name} has shape {shape}, expected whole blocks of {block}")
        if name in (FREQS, LONG, SHORT) and kind != gguf.GGMLQuantizationType.F32:
            raise UserError(f"tensor {name} is of type {kind}, expected float32")
        return name, offset, offset + prod(shape) // block * block_bytes
