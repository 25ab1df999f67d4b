"""Writes files so that nobody ever sees half of one, and hashes them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path` to write to; renames it to `path` at the end.

    The temporary name keeps the suffix, by which some writers choose a format. If the block raises,
    the temporary file is removed and whatever was at `path` stays.
    """
    final = Path(path)
    temporary = final.with_name(f".{final.stem}.{os.getpid()}.tmp{final.suffix}")
    try:
        yield temporary
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Writes `content` (a string as UTF-8) to `path` by way of a temporary file and a rename.

    Raises OSError if the folder is missing or cannot be written to.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def sha256(path: str | Path) -> str:
    """Returns the SHA-256 of a file in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
