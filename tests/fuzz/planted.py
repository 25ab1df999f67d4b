"""Holds kinds with planted faults, by which tests see that the runner finds each of them."""

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


def _hog() -> None:
    held = [bytearray(50 * 2**20) for _ in range(40)]
    raise AssertionError(f"took {len(held)} pieces")


def _refuse(message: str, kind: type[Exception] = UserError) -> None:
    with refusing():
        raise kind(message)


def _print(text: str) -> None:
    """Does what a command does that prints `text` and refuses its input."""

    def main(words: Sequence[str]) -> None:
        print(text, file=sys.stderr)
        sys.exit(2)

    require_kept_promises(call(main, []), prints_text=True)


def _leak_a_foreign_error() -> None:
    with refusing():
        int("x")


def _raise(error: BaseException) -> None:
    raise error


# By name: what happens, and what the runner has to say of it; a good refusal is no fault.
PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "crash": (partial(signal.raise_signal, signal.SIGSEGV), "the process died: by SIGSEGV"),
    "leave": (partial(os._exit, 7), "the process died: with exit code 7"),
    "hang": (partial(time.sleep, 60), "the process took more than 2 s"),
    "hog": (_hog, "MemoryError"),
    "wrong": (
        partial(_raise, Wrong("tokens differ from plain decoding")),
        "Wrong in the oracle: tokens differ from plain decoding",
    ),
    "two lines": (partial(_refuse, "got one\ngot two", OSError), "a refusal in … lines"),
    "endless line": (partial(_refuse, "x" * 5000), "a refusal of … characters"),
    "escape": (partial(_print, "error: got \x1b[31mred"), "control characters reach the terminal"),
    "box": (partial(_print, "Usage: main\n╭─ Error ─╮\n│ no │\n╰─────╯"), "a refusal in … lines"),
    "foreign": (_leak_a_foreign_error, "ValueError"),
    "panic": (
        partial(_raise, BaseException("a Rust panic is no Exception")),
        "BaseException in the oracle: a Rust panic",
    ),
    "good refusal": (partial(_refuse, "got 3, expected 4; take another"), ""),
}
CAUSES = {name: cause for name, (_, cause) in PLANTED.items() if cause}


def cases() -> SearchStrategy[Any]:
    return st.integers(0, NUM_CASES - 1)


def open_with(fault: str, folder: Path) -> Run:
    """Returns what runs a case: number BAD has the fault, even ones are refused, the rest taken."""

    def run(case: int) -> None:
        if case == BAD:
            PLANTED[fault][0]()
        elif case % 2 == 0:
            raise Refused("an even number")

    return run


def open_willing(folder: Path) -> Run:
    """Returns what takes every case."""
    return lambda case: None


def kind(fault: str) -> Kind:
    """Returns the kind in which this fault is planted."""
    return Kind(fault, cases, partial(open_with, fault), seconds=2, megabytes=200)
