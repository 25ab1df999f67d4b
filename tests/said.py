"""Keeps what a command says of its work, for tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from spec_export.report import Advance, Report


class Said(Report):
    """Keeps every line, warning and row of a table, in the order in which they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shares: dict[str, list[float]] = {}  # done of all, by what was done

    def line(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.lines.append(text)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.lines += [" | ".join(row) for row in rows]

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        shares = self.shares.setdefault(what, [])
        yield lambda done, total, note="", seconds_left=None: shares.append(done / total)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)
