"""Reads back the JSON files that the product keeps for itself in the cache folder."""

from pathlib import Path
from typing import Any

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import parse_json
from spec_runtime.files.writing import require_regular_file

MOST_BYTES = 1 << 20  # ours have a few thousand


def read_kept(path: Path) -> Any:
    """Returns what the JSON file at `path` says.

    Raises FileNotFoundError if there is none, and UserError or another OSError, whatever stands
    there instead: a folder, a link, a pipe without a writer, a file without end, or no JSON.
    """
    require_regular_file(path)
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise UserError(f"got more than {MOST_BYTES} bytes, expected fewer")
    return parse_json(text)
