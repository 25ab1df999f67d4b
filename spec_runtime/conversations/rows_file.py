"""Writes a conversation, messages and rows, to a safetensors file, and reads it back.

The file belongs to one bundle and drafter, which its metadata name, and may have no rows. Nothing
in it is trusted: sizes and types are compared with what is expected before anything is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.conversations.kept_rows import KeptRows
from spec_runtime.errors import UserError
from spec_runtime.files.writing import replacing
from spec_runtime.mapping import brief
from spec_runtime.text.tokenizer import Message

TOKENS, FEATURES, MESSAGES = "tokens", "features", "messages"
DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype(np.int64),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}
MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class RowsOwner:
    """Says whose rows a file holds: the SHA-256 of a bundle's manifest, and a drafter of it."""

    bundle: str
    drafter: str


def write_rows(
    path: Path, rows: KeptRows, owner: RowsOwner, messages: Sequence[Message] = ()
) -> None:
    """Writes the file, whole or not at all. Raises ValueError for messages that have no JSON or too
    much of it and if something at `path` is no file, and OSError if it cannot be written."""
    arrays = {TOKENS: np.array(rows.tokens, np.int64), **rows.kv}
    if rows.features_TF is not None:
        arrays[FEATURES] = rows.features_TF
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {
        "__metadata__": {
            "bundle": owner.bundle,
            "drafter": owner.drafter,
            MESSAGES: _as_json(messages),
        },
    }
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": names[array.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UserError(
            f"got messages of {len(text)} bytes, expected at most {MAX_HEADER_BYTES}; save them "
            "elsewhere"
        )
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())


def _as_json(messages: Sequence[Message]) -> str:
    try:
        return json.dumps([dict(message) for message in messages])
    except (TypeError, ValueError) as error:
        raise UserError(f"got messages that have no JSON: {brief(error, 120)}") from None


def read_rows(
    path: Path, owner: RowsOwner, kv_shapes: Mapping[str, tuple[int, int]]
) -> tuple[KeptRows, list[Message]]:
    """Reads the rows of `owner`, whose KV buffers have G groups of B bytes a row, `kv_shapes`, and
    the messages.

    Raises ValueError in one line for a file that is not one of ours, or not this owner's, and
    OSError if there is none.
    """
    try:
        header, data = _read(path)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not a file of a conversation ({brief(error, 120)}), expected one that "
            "save_conversation wrote"
        ) from None
    metadata = header.get("__metadata__")
    found = metadata if isinstance(metadata, dict) else {}
    for name, expected in (("bundle", owner.bundle), ("drafter", owner.drafter)):
        if found.get(name) != expected:
            raise UserError(
                f"{path} holds a conversation of {name} {brief(str(found.get(name)), 80)}, expected"
                f" {expected}: load that {name}, or begin anew"
            )
    tokens = data.pop(TOKENS, np.zeros(0, np.int64))
    features = data.pop(FEATURES, None)
    T = len(tokens)
    expected_kv = {name: (G, T, B) for name, (G, B) in kv_shapes.items()}
    fits = {name: array.shape for name, array in data.items()} == expected_kv
    fits = fits and (tokens.shape, tokens.dtype) == ((T,), DTYPES["I64"])
    fits = fits and all(array.dtype == DTYPES["U8"] for array in data.values())
    if features is not None:
        fits = fits and features.dtype == DTYPES["F32"] and features.shape[:1] == (T,)
        fits = fits and features.ndim == 2
    if not fits:
        raise UserError(
            f"{path} holds rows of other sizes, expected those of this bundle's target: it is "
            "damaged; begin anew"
        )
    try:
        messages = json.loads(found.get(MESSAGES, "[]"))
        is_list = isinstance(messages, list)
        if not (is_list and all(isinstance(each, dict) and "role" in each for each in messages)):
            raise UserError
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"{path} holds messages that are none: it is damaged; begin anew") from None
    return KeptRows(tokens.tolist(), data, features), messages


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays by name."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise UserError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise UserError("a header that is no object")
        content = np.frombuffer(file.read(), np.uint8)
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        sizes = [begin, end, *shape]
        if not all(type(number) is int and number >= 0 for number in sizes):
            raise UserError(f"{name} of shape {shape} at {begin} to {end}")
        if end > len(content) or end - begin != math.prod(shape) * dtype.itemsize:
            raise UserError(f"{name} of shape {shape} at {begin} to {end}")
        arrays[name] = content[begin:end].view(dtype).reshape(shape)
    return header, arrays
