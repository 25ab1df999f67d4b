"""Says on the standard error how far a long command is, on a terminal and in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from spec_runtime.cli.terminal import Console, visible


class StageReport:
    """Prints a line as each stage of a command begins, with the seconds since the first.

    A terminal shows a spinner too, while the stage runs; a log file gets the line alone:

        0.0 s  loading the target
       12.4 s  exporting the target
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._started = time.monotonic()

    @contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Says that the block does `what`, such as "loading the target"."""
        seconds = time.monotonic() - self._started
        self._console.print(f"{seconds:7.1f} s  {visible(what)}", soft_wrap=True)
        with self._console.status("") if self._console.is_terminal else nullcontext():
            yield
