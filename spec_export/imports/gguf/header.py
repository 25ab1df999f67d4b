"""Reads the header of a GGUF file, or of all parts of a split one, and checks that all is there.

A header that lies about a count or a length would keep other readers busy for ever, or give them
numbers from beyond the end of the file. The reader of the package `gguf` is one of them: it goes on
for ever where an array's count is a lie, and takes seconds for the tokens of a whole file.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.errors import UserError

MAX_DIMENSIONS = 4  # ggml has no tensors of more
MAX_NAME = 200  # characters; the longest known is a third of it
STRING, ARRAY = 8, 9
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.ASCII)
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
class GGUFTensor:
    """Says where a tensor's bytes are.

    path: the file. start, stop: positions of its bytes in it. shape: rows first, as numpy has it.
    kind: the number of ggml's type.
    """

    path: Path
    start: int
    stop: int
    shape: tuple[int, ...]
    kind: int


@dataclass(frozen=True)
class GGUFHeader:
    """Says what a whole GGUF model holds.

    architecture: the name of the model's kind. tensors: by their names, in the files' order.
    values: the metadata by their keys, which are numbers, strings or lists of either. rope_factors:
    the numbers of the tensors FREQS, LONG and SHORT that there are.
    """

    architecture: str
    tensors: dict[str, GGUFTensor]
    values: dict[str, Any]
    rope_factors: dict[str, list[float]]


def parts(path: Path) -> list[Path]:
    """Returns the files of the model that this file is one of, as the names say, in order.

    Example: m-00002-of-00002.gguf -> m-00001-of-00002.gguf, m-00002-of-00002.gguf. Raises UserError
    that names the files which are not there.
    """
    found = PART.fullmatch(path.name)
    if not found or not 1 <= int(found["number"]) <= int(found["count"]):
        return [path]
    count = int(found["count"])
    names = [f"{found['stem']}-{i + 1:05}-of-{count:05}{found['suffix']}" for i in range(count)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"got {path}, one of {count} parts of a model, without {missing[0]}{more}: put all "
            "parts into one folder"
        )
    return [path.with_name(name) for name in names]


def read(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file, or what all parts of a split one hold together.

    Headers are kept until their files change; do not alter them. Raises UserError, which says what
    is wrong, unless each file has all the bytes that its header speaks of.
    """
    files = parts(path)
    try:
        states = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return _read(tuple(files), states)


@lru_cache(maxsize=2)  # a target and a draft model
def _read(files: tuple[Path, ...], states: tuple[tuple[int, int], ...]) -> GGUFHeader:
    headers = [_read_part(file) for file in files]
    first, tensors = headers[0], dict[str, GGUFTensor]()
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        part, count = (header.values.get(f"split.{key}", 0) for key in ("no", "count"))
        if count in (0, 1) and len(files) == 1:
            pass
        elif count != len(files):
            raise UserError(
                f"{file} is one of {count!r:.40} parts by its header (split.count), of {len(files)}"
                " by its name, expected a name such as model-00001-of-00003.gguf: name the parts "
                "as they were"
            )
        elif part != number:
            raise UserError(
                f"{file} is part {part!r:.40} by its header (split.no, counted from 0), expected "
                f"{number} by its name: name the parts as they were"
            )
        twice = min(tensors.keys() & header.tensors.keys(), default=None)
        if twice is not None:
            raise UserError(
                f"got tensor {twice} in {tensors[twice].path} and in {file}, expected it in one of "
                "them: they are not of one model; download it again"
            )
        tensors |= header.tensors
    total = first.values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise UserError(
            f"the parts of {files[0]} hold {len(tensors)} tensors, expected {total!r:.40} "
            "(split.tensors.count): they are not of one model"
        )
    if not first.architecture:
        raise UserError(
            f"{files[0]} is no whole GGUF file: it names no general.architecture; download or "
            "convert it again"
        )
    factors = {name: factor for each in headers for name, factor in each.rope_factors.items()}
    return GGUFHeader(first.architecture, tensors, first.values, factors)


def _read_part(path: Path) -> GGUFHeader:
    """Returns the header of one file; only a first part has to name an architecture."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path).header()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is no whole GGUF file: {error}; download or convert it again"
        ) from error


class _Cursor:
    """Reads values one after the other; each method raises UserError at the end of the data."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise UserError("it does not begin with GGUF")
        self.position = 4
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in (2, 3):
            raise UserError(f"it is of version {version}, expected 2 or 3")
        values = {"general.alignment": 32}
        for _ in range(num_values):
            key, kind = self.name(), self.number("I")
            values[key] = self.value(kind)
        architecture, alignment = values.get("general.architecture"), values["general.alignment"]
        if not isinstance(architecture, str | None):
            raise UserError("it names no general.architecture")
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"it has alignment {alignment!r:.40}, expected a power of two")
        found = [self.tensor() for _ in range(num_tensors)]
        start = -(-self.position // alignment) * alignment
        tensors = dict[str, GGUFTensor]()
        for name, shape, kind, offset, size in found:
            if name in tensors:
                raise UserError(f"it holds tensor {name} twice")
            stop = start + offset + size
            if stop > len(self.data):
                raise UserError(f"tensor {name} ends at byte {stop}, the file at {len(self.data)}")
            tensors[name] = GGUFTensor(self.path, start + offset, stop, shape, kind)
        factors = {
            name: np.frombuffer(self.data[tensor.start : tensor.stop], "<f4").tolist()
            for name, tensor in tensors.items()
            if name in (FREQS, LONG, SHORT)
        }
        return GGUFHeader(architecture or "", tensors, values, factors)

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

    def name(self) -> str:
        """Returns the name of a value or a tensor, which messages may repeat."""
        name = self.text()
        if len(name) > MAX_NAME or not name.isprintable():
            raise UserError(f"it holds a name of {len(name)} characters: {name!r:.40}...")
        return name

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

    def tensor(self) -> tuple[str, tuple[int, ...], int, int, int]:
        """Returns a tensor's name, shape, type, where its bytes start after the header, and how
        many they are."""
        import gguf

        name, num_dimensions = self.name(), self.number("I")
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
        return name, tuple(reversed(shape)), kind, offset, prod(shape) // block * block_bytes
