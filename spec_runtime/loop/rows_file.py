"""Writes a conversation, messages and rows, to a safetensors file, and reads it back.

The file belongs to one bundle and drafter, which its metadata name, and may have no rows. Nothing
in it is trusted: sizes and types are compared with those expected before anything is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief
from spec_runtime.files.writing import replacing
from spec_runtime.loop.row_store import ConversationRows
from spec_runtime.text.prompt import Message

TOKENS, FEATURES, MESSAGES = "tokens", "features", "messages"
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class RowsOwner:
    """Says whose rows a file holds: the SHA-256 of a bundle's manifest, and a drafter of it."""

    bundle: str
    drafter: str


def write_rows(
    path: Path, rows: ConversationRows, owner: RowsOwner, messages: Sequence[Message] = ()
) -> None:
    """Writes the file, whole or not at all. Raises UserError for messages that have no JSON or too
    much of it and if something at `path` is no file, and OSError if it cannot be written."""
    from safetensors.numpy import save

    text = _as_json(messages)
    if len(text) > MAX_MESSAGE_BYTES:
        raise UserError(
            f"got messages of {len(text)} bytes, expected at most {MAX_MESSAGE_BYTES}; save them "
            "elsewhere"
        )
    arrays = {TOKENS: np.array(rows.tokens, np.int64), **rows.kv}
    if rows.features_TF is not None:
        arrays[FEATURES] = rows.features_TF
    # The library takes the memory of an array in any order for contiguous.
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {"bundle": owner.bundle, "drafter": owner.drafter, MESSAGES: text}
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays, metadata))


def _as_json(messages: Sequence[Message]) -> str:
    try:
        return json.dumps([dict(message) for message in messages])
    except (TypeError, ValueError) as error:
        raise UserError(f"got messages that have no JSON: {brief(error, 120)}") from None


def _read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Returns the metadata of a safetensors file and its arrays by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return file.metadata() or {}, {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 -- it is no dictionary
            }
    except (SafetensorError, AttributeError, TypeError) as error:  # types that numpy has not
        raise UserError(
            f"{path} is not a file of a conversation ({brief(error, 120)}), expected one that "
            "save_conversation wrote"
        ) from None


def read_rows(
    path: Path,
    owner: RowsOwner,
    kv_shapes: Mapping[str, tuple[int, int]],
    feature_width: int | None,
) -> tuple[ConversationRows, list[Message]]:
    """Reads the rows of `owner` and the messages. `kv_shapes` names the KV buffers that are
    expected, each with its groups G and the bytes B of a row; `feature_width` is the F of the
    features f32[T, F], None if there are to be none.

    Raises UserError in one line for a file that is not one of ours, or not this owner's, and
    OSError if there is none.
    """
    metadata, arrays = _read(path)
    for name, expected in (("bundle", owner.bundle), ("drafter", owner.drafter)):
        if metadata.get(name) != expected:
            raise UserError(
                f"{path} holds a conversation of {name} {brief(str(metadata.get(name)), 80)}, "
                f"expected {expected}: load that {name}, or begin anew"
            )
    T = arrays[TOKENS].size if TOKENS in arrays else 0
    sizes: dict[str, tuple[Any, tuple[int, ...]]]
    sizes = {name: (np.dtype(np.uint8), (G, T, B)) for name, (G, B) in kv_shapes.items()}
    sizes[TOKENS] = np.dtype(np.int64), (T,)
    if feature_width is not None and T:
        sizes[FEATURES] = np.dtype(np.float32), (T, feature_width)
    if {name: (array.dtype, array.shape) for name, array in arrays.items()} != sizes:
        raise UserError(
            f"{path} holds rows of other sizes, expected those of this bundle's target: it is "
            "damaged; begin anew"
        )
    tokens = arrays.pop(TOKENS).tolist()
    features = arrays.pop(FEATURES, None)
    if features is not None and not np.isfinite(features).all():
        raise UserError(f"{path} holds features that are not finite: it is damaged; begin anew")
    return ConversationRows(tokens, arrays, features), _messages(path, metadata)


def _messages(path: Path, metadata: Mapping[str, str]) -> list[Message]:
    try:
        found = json.loads(metadata.get(MESSAGES, "[]"))
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and all(isinstance(each, dict) and "role" in each for each in found):
        return found
    raise UserError(f"{path} holds messages that are none: it is damaged; begin anew")
