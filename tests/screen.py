"""Runs a command on a terminal of its own, as a person would use it."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 30.0  # after which a test that waits for the screen fails
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|[=>]|\][^\x07]*\x07)")
READS = "\x1b[?2004h"  # asks the terminal to bracket what is pasted, as each prompt does
PASTE = "\x1b[200~{}\x1b[201~"  # as terminals bracket what is pasted
ALT_ENTER, CTRL_C, CTRL_D, UP = "\x1b\r", "\x03", "\x04", "\x1b[A"


class Screen:
    """What a command has drawn, and the keyboard in front of it."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._master = master
        self._raw = b""
        self._num_prompts = 0

    @property
    def text(self) -> str:
        """All that was drawn, without escape sequences."""
        return ESCAPES.sub("", self.raw)

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    def type(self, text: str) -> None:
        """Types the text; a long one as fast as the command reads it."""
        data = text.encode()
        while data:
            _, writable, _ = select.select([], [self._master], [], SECONDS)
            assert writable, "the command reads no more"
            data = data[os.write(self._master, data[:512]) :]
            self._read(0)

    def wait(self, wanted: str | Callable[[str], bool]) -> str:
        """Waits until the text is on the screen, or a function says so; returns all of it."""
        is_there = wanted if callable(wanted) else (lambda text: wanted in text)
        end = time.monotonic() + SECONDS
        while not is_there(self.text):
            assert time.monotonic() < end, f"{wanted!r} is not in {self.text[-2000:]!r}"
            if not self._read(0.05):
                assert self.process.poll() is None, f"it ended: {self.text[-2000:]!r}"
        return self.text

    def prompt(self) -> None:
        """Waits until the command reads the next turn."""
        self._num_prompts += 1
        self.wait(lambda text: self.raw.count(READS) >= self._num_prompts)

    def press(self, key: str, wanted: Callable[[str], bool]) -> None:
        """Presses the key until the screen is as wanted: Python's readline overlooks a signal that
        comes while it draws."""
        end = time.monotonic() + SECONDS
        while not wanted(self.text):
            assert time.monotonic() < end, f"nothing comes of it: {self.text[-2000:]!r}"
            self.type(key)
            while self._read(0.2):
                pass

    def end(self) -> int:
        """Waits until the command has ended; returns its exit code."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.text[-2000:]!r}"
            self._read(0.05)
        self._read(0)
        return self.process.returncode

    @property
    def echoes(self) -> bool:
        """Says whether the terminal is as it was: one that repeats what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def _read(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._raw += piece
        return bool(piece)


@contextmanager
def screen(program: str, *words: object, **env: str) -> Iterator[Screen]:
    """Runs Python's `program` with these words on a terminal of 40 lines, whose signals it gets."""
    master, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **env}
    for name in ("NO_COLOR", "COLUMNS"):  # the latter of pytest's processes
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        cwd=Path(__file__).parents[1],
    )
    try:
        yield Screen(master, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
        os.close(theirs)
