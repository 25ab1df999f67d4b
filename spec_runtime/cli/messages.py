"""Reads and writes conversations: JSON files with a list of chat messages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief, parse_json
from spec_runtime.files.writing import require_writable, write_atomically

EXAMPLE = '[{"role": "user", "content": "…"}]'


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the messages of a file. Raises UserError unless it holds a list of them."""
    return parse(path.read_bytes(), str(path))


def parse(text: str | bytes, where: str) -> list[dict[str, Any]]:
    """Returns the messages of a JSON text, at least one.

    `where` is what an error calls the text. The engine checks what a message holds in addition to
    its role.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: got no JSON ({error}), expected {EXAMPLE}") from None
    if not isinstance(found, list) or not found:
        raise UserError(
            f"{where}: got {brief(json.dumps(found), 60)}, expected a list of messages: {EXAMPLE}"
        )
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(
                f"{where}: got message {brief(json.dumps(message), 60)}, expected one with a role "
                f"and a content, as in {EXAMPLE}"
            )
    return found


def write(path: Path, messages: Sequence[dict[str, Any]]) -> None:
    """Writes the messages, atomically.

    Raises UserError if there is another file in that place, which may hold what is not ours to
    replace: only a file of messages is written over.
    """
    if path.exists():
        try:
            read(path)
        except ValueError:
            raise UserError(
                f"{path} is there and holds no messages, expected a new file or one that /save "
                "wrote; choose another name"
            ) from None
    require_writable(path)
    write_atomically(path, json.dumps(messages, indent=1, ensure_ascii=False) + "\n")
