"""Holds kinds with planted faults, by which tests see that the runner finds each of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cases import Kind, Refused, Run, Wrong, refusing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from shell import call, require_kept_promises

from spec_runtime.errors import UserError

BAD, NUM_CASES = 3, 8  # the case at which a fault is planted, and how many there are


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave() -> None:
    os._exit(7)


def _hang() -> None:
    time.sleep(60)


def _hog() -> None:
    held = [bytearray(50 * 2**20) for _ in range(40)]
    raise AssertionError(f"took {len(held)} pieces")


def _answer_wrongly() -> None:
    raise Wrong("tokens differ from plain decoding")


def _refuse(message: str) -> None:
    with refusing():
        raise UserError(message)


def _print(text: str) -> None:
    """Does what a command does that prints `text` and refuses its input."""

    def main(words: Sequence[str]) -> None:
        print(text, file=sys.stderr)
        sys.exit(2)

    require_kept_promises(call(main, []), prints_text=True)


def _leak_a_foreign_error() -> None:
    with refusing():
        int("x")


def _panic() -> None:
    raise BaseException("a Rust panic is no Exception")


FAULTS: dict[str, Callable[[], None]] = {
    "crash": _crash,
    "leave": _leave,
    "hang": _hang,
    "hog": _hog,
    "wrong": _answer_wrongly,
    "two lines": partial(_refuse, "got one\ngot two"),
    "endless line": partial(_refuse, "x" * 5000),
    "escape": partial(_print, "error: got \x1b[31mred"),
    "box": partial(_print, "Usage: main\n╭─ Error ─╮\n│ no │\n╰─────╯"),
    "foreign": _leak_a_foreign_error,
    "panic": _panic,
    "good refusal": partial(_refuse, "got 3, expected 4; take another"),
}


def cases() -> SearchStrategy[Any]:
    return st.integers(0, NUM_CASES - 1)


def open_with(fault: str, folder: Path) -> Run:
    """Returns what runs a case: number BAD has the fault, even ones are refused, the rest taken."""

    def run(case: int) -> None:
        if case == BAD:
            FAULTS[fault]()
        elif case % 2 == 0:
            raise Refused("an even number")

    return run


def kind(fault: str) -> Kind:
    """Returns the kind in which this fault is planted."""
    return Kind(fault, "planted", cases, partial(open_with, fault), seconds=2, megabytes=200)
