"""Says on the standard error how far a long command is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import rich.console
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from spec_runtime.cli.terminal import Console, visible


class StageReport:
    """Shows the stages of a command, of which there are `num_stages`.

    A terminal shows one bar, which is gone at the end. Elsewhere each stage is a line as it begins,
    with the seconds since the first:

        0.0 s  loading the target
       12.4 s  exporting the target

    What is printed by `print`, or by Python's own on the standard error, comes above the bar.
    """

    def __init__(self, num_stages: int) -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._total = num_stages
        self._task = self._bar.add_task("", total=num_stages)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def print(self, what: RenderableType) -> None:
        """Prints something of `rich` that stays."""
        self._console.print(what)

    def expect(self, num_stages: int) -> None:
        """Notes that there are so many stages more than was known at the beginning."""
        self._total += num_stages
        self._bar.update(self._task, total=self._total)

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Says that the block does `what`, such as "loading the target"."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=visible(what), refresh=True)
        else:
            seconds = time.monotonic() - self._started
            self._console.print(f"{seconds:7.1f} s  {visible(what)}", soft_wrap=True)
        yield
        self._bar.advance(self._task)


class TenthLines:
    """Prints lines that a log keeps: how far long work is, and when it ends.

    The first line comes after the first part, whose speed tells how long all will take, and one
    more after each further tenth:

        features: 31%, 52 min left, ends 16:09
    """

    def __init__(self, console: rich.console.Console, what: str, done: int = 0) -> None:
        self._console, self._what = console, what
        self._already = done  # by an earlier run
        self._started = time.monotonic()
        self._next = 0.0  # the share from which on there is a line again

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Takes in that `done` of `total` are there, more than before; `note` ends a line."""
        if done in (self._already, total) or done / total < self._next:
            return
        self._next = (10 * done // total + 1) / 10
        elapsed = time.monotonic() - self._started
        seconds_left = elapsed * (total - done) / (done - self._already)
        line = f"{self._what}: {done / total:.0%}, {expected_end(seconds_left)}{note}"
        self._console.print(line, soft_wrap=True)


def expected_end(seconds_left: float, now: datetime.datetime | None = None) -> str:
    """Returns "41 min left, ends 14:32"; the day is named if it is not today's."""
    now = now or datetime.datetime.now()
    end = now + datetime.timedelta(seconds=seconds_left)
    time_of_day = f"{end:%H:%M}" if end.date() == now.date() else f"{end:%b %d %H:%M}"
    left = f"{seconds_left / 60:.0f}" if seconds_left >= 60 else "under 1"
    return f"{left} min left, ends {time_of_day}"
