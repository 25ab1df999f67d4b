"""Says on the standard error how far a long command is: a bar on a terminal, lines in a log."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from spec_export.report import Advance, Report, expected_end
from spec_runtime.cli.terminal import Console, visible

_NAME = TextColumn("{task.description}", markup=False)
_NOTE = TextColumn("{task.fields[note]}", markup=False)
LONGEST_SILENCE = 300.0  # seconds without a line about long work


class TerminalReport(Report):
    """Writes what a command says to the standard error.

    A terminal shows one bar for all stages of a command, and the bar is gone at the end. Elsewhere
    each stage is a line as it begins, with the seconds since the first:

        0.0 s  loading the target
       12.4 s  exporting the target

    Lines, tables, and what Python itself prints on the standard error come above the bar.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None  # of the stages
        self._started = 0.0

    def line(self, text: str) -> None:
        self._console.print(visible(text), soft_wrap=True)

    def warning(self, text: str) -> None:
        self._console.print(visible(text), style="bold red", soft_wrap=True)

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(*heads)
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    @contextmanager
    def status(self, what: str) -> Iterator[None]:
        with self._console.status(Text(visible(what))):
            yield

    @contextmanager
    def stages(self, number: int) -> Iterator[None]:
        columns = BarColumn(bar_width=24), MofNCompleteColumn(), _NAME, TimeElapsedColumn()
        is_hidden = not self._console.is_terminal
        self._started = time.monotonic()
        with Progress(*columns, console=self._console, transient=True, disable=is_hidden) as bar:
            bar.add_task("", total=number)
            self._bar = bar
            yield

    def expect(self, number: int) -> None:
        bar, task = self._stages
        bar.update(task, total=number + (bar.tasks[0].total or 0))

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        bar, task = self._stages
        if self._console.is_terminal:
            bar.update(task, description=visible(what), refresh=True)
        else:
            self.line(f"{time.monotonic() - self._started:7.1f} s  {what}")
        yield
        bar.advance(task)

    @property
    def _stages(self) -> tuple[Progress, TaskID]:
        assert self._bar is not None, "a stage outside of `stages`"
        return self._bar, self._bar.tasks[0].id

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        columns = _NAME, BarColumn(), MofNCompleteColumn(), _NOTE
        lines: ProgressLines | None = None
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(visible(what), total=None, note="")

            def advance(
                done: int, total: int, note: str = "", seconds_left: float | None = None
            ) -> None:
                nonlocal lines
                if lines is None:
                    lines = ProgressLines(self, what, done)
                note = lines(done, total, note, seconds_left)
                bar.update(task, completed=done, total=total, note=note)

            yield advance


class ProgressLines:
    """Says how far long work is and when it ends, in lines that a log keeps.

    The first line comes after the first part, whose speed tells how long all will take, and one
    more after each further tenth, or where five minutes have passed since the last:

        features: 310 of 1,000 (31%), 52 min left, ends 16:09
    """

    def __init__(self, report: Report, what: str, done: int = 0) -> None:
        """`done`: what an earlier run has done already."""
        self._report, self._what, self._already = report, what, done
        self._started = self._said = time.monotonic()
        self._next = 0.0  # the share of all work from which on there is a line again

    def __call__(
        self, done: int, total: int, note: str = "", seconds_left: float | None = None
    ) -> str:
        """Reports a line if it is due, and returns what it says of the end, with the note."""
        now = time.monotonic()
        if done == total or (done == self._already and seconds_left is None):
            return note
        if seconds_left is None:
            seconds_left = (now - self._started) * (total - done) / (done - self._already)
        said = expected_end(seconds_left) + (note and f", {note}")
        if done / total >= self._next or now - self._said >= LONGEST_SILENCE:
            self._next, self._said = (10 * done // total + 1) / 10, now
            share = f"{done:,} of {total:,} ({done / total:.0%})"
            self._report.line(f"{self._what}: {share}, {said}")
        return said
