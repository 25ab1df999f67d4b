"""Defines what a long command can say about its work; the `Report` here says nothing.

Library code takes a report and never prints. `cli/report.py` has the one that writes to a terminal.
"""

import datetime
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Advance(Protocol):
    """Notes that `done` parts of `total` are there; a log's line ends with `note`.

    seconds_left: until the end; None means that the parts so far tell it.
    """

    def __call__(
        self, done: int, total: int, note: str = "", seconds_left: float | None = None
    ) -> None: ...


class Report:
    """Drops everything it is told. Texts are plain and may hold names of other people's files."""

    def line(self, text: str) -> None:
        """Says something that stays to be read, such as a result."""

    def warning(self, text: str) -> None:
        """Says what the user should look into."""

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Shows a table that stays."""

    def status(self, what: str) -> AbstractContextManager[None]:
        """Shows that the block does `what`, on a terminal only."""
        return nullcontext()

    def stages(self, number: int) -> AbstractContextManager[None]:
        """Announces that the block has this many calls of `stage`."""
        return nullcontext()

    def expect(self, number: int) -> None:
        """Adds to the number of stages that `stages` has announced."""

    def stage(self, what: str) -> AbstractContextManager[None]:
        """Says that the block is a stage that does `what`, such as "loading the target"."""
        return nullcontext()

    def progress(self, what: str) -> AbstractContextManager[Advance]:
        """Shows how far the block is with `what`, such as "features".

        The first call of `Advance` tells what an earlier run has done already.
        """
        return nullcontext(_ignore)


def _ignore(done: int, total: int, note: str = "", seconds_left: float | None = None) -> None:
    """Does nothing: the `Advance` of a silent report."""


SILENT = Report()


def expected_end(seconds_left: float, now: datetime.datetime | None = None) -> str:
    """Returns "41 min left, ends 14:32"; the day is named if it is not today's."""
    now = now or datetime.datetime.now()
    end = now + datetime.timedelta(seconds=seconds_left)
    time_of_day = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%b %d %H:%M}"
    left = f"{seconds_left / 60:.0f}" if seconds_left >= 60 else "under 1"
    return f"{left} min left, ends {time_of_day}"
