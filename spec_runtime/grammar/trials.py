"""Tries grammars in processes that can be ended, before this process compiles them.

A short grammar can keep the library that compiles it busy for minutes and gigabytes, or crash it.
Neither can be stopped inside a process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from spec_runtime.grammar import trial_process
from spec_runtime.grammar.formats import format_error
from spec_runtime.interruption import Interrupted, Interruption

POLL_SECONDS = 0.02  # after which one who waits looks whether its call still goes on
START_SECONDS = 60.0  # a process that has not opened the tokenizer by then never will
KILLED = 9  # SIGKILL, which Windows has no name for
MAX_KNOWN = 4096  # grammars whose outcome is remembered; the oldest make room

log = logging.getLogger("spec_runtime")


@dataclass(frozen=True)
class TrialLimits:
    """Bounds the trial of a grammar: its seconds, its memory, and how many are tried at once.

    An ordinary grammar takes some milliseconds and a few megabytes. While others wait for their
    trial, one has `shared_seconds` only. Memory is held to on Linux.
    """

    seconds: float = 5.0
    megabytes: int = 512
    processes: int = 2
    shared_seconds: float = 1.0


class GrammarTrials:
    """Tries grammars over one tokenizer, which is described as for GrammarCompiler.

    Each process stays for the next grammar; one whose grammar does not end is ended, and another
    one starts when it is needed. Outcomes are remembered, so that a grammar is tried once. Threads
    may share it. Where no process can start, as in a frozen program, grammars are not tried, and a
    warning says so.
    """

    def __init__(
        self, definition: str, eos: Sequence[int], vocab_size: int, limits: TrialLimits
    ) -> None:
        self._limits = limits
        opening = {
            "path": sys.path,
            "definition": definition,
            "eos": list(eos),
            "vocab_size": vocab_size,
            "max_bytes": limits.megabytes << 20,
        }
        self._opening = _line(opening)
        self._known: dict[bytes, tuple[str | None]] = {}  # faults of grammars, by their hashes
        self._tried: set[bytes] = set()  # hashes of grammars that are being tried, or wait
        self._idle: list[_Process] = []
        self._places = threading.Semaphore(limits.processes)
        self._num_waiting = 0  # for a place
        self._lock = threading.Lock()  # of all that changes
        self._has_started = False  # a process, ever
        self._is_possible = True  # until the first one does not start

    def start(self) -> None:
        """Starts a process in advance, without waiting for it."""
        if self._is_possible:
            with suppress(OSError):  # the first trial meets it again
                self._give_back(_Process(self._opening))

    def close(self) -> None:
        """Ends the processes that wait for grammars; the next grammar starts another one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    @property
    def are_possible(self) -> bool:
        """Says whether processes start here, as far as that is known."""
        return self._is_possible

    def fault(
        self, grammar: str, interruption: Interruption, probes: Sequence[str] = ()
    ) -> str | None:
        """Returns why a grammar, in the library's own form, cannot be compiled within the limits,
        or be followed; None if it can. See trial_process.py for its probes.

        Raises Interrupted if the interruption has a reason before that is known, and UserError if
        no process starts any more.
        """
        line = _line([grammar, [*probes]])
        key = hashlib.sha256(line).digest()
        while (known := self._known.get(key)) is None:
            with self._lock:
                is_ours = key not in self._tried
                self._tried.add(key)
            if is_ours:
                try:
                    return self._outcome(key, line, interruption)
                finally:
                    self._tried.discard(key)
            time.sleep(POLL_SECONDS)
            if interruption.reason is not None:
                raise Interrupted
        return known[0]

    def _outcome(self, key: bytes, line: bytes, interruption: Interruption) -> str | None:
        with self.place(interruption):
            process = self._take(interruption) if self._is_possible else None
            if process is None:
                return None
            fault, is_lasting = self._try(process, line, interruption)
        if is_lasting:
            with self._lock:
                self._known[key] = (fault,)
                if len(self._known) > MAX_KNOWN:
                    del self._known[next(iter(self._known))]
        return fault

    @contextmanager
    def place(self, interruption: Interruption) -> Iterator[None]:
        """Waits until few enough grammars are tried or compiled, and counts as one while the block
        runs. Raises Interrupted if the interruption has a reason before."""
        with self._lock:
            self._num_waiting += 1
        try:
            while not self._places.acquire(timeout=POLL_SECONDS):
                if interruption.reason is not None:
                    raise Interrupted
        finally:
            with self._lock:
                self._num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    def _take(self, interruption: Interruption) -> _Process | None:
        """Returns a process that waits for a grammar; None if none can start here."""
        with self._lock:
            alive = [process for process in self._idle if process.is_alive]
            process = alive.pop() if alive else None
            self._idle = alive
        is_open: bytes | None = b""
        with suppress(OSError):  # of a start
            process = process or _Process(self._opening)
            try:
                is_open = _answer(process.opened, START_SECONDS, interruption)
            except Interrupted:
                self._give_back(process)
                raise
        if is_open:
            self._has_started = True
            return process
        if process is not None:
            process.end()
        if self._has_started:
            raise format_error(
                "response_format cannot be read now, because the process that compiles grammars "
                "does not start; try again, or generate without it"
            )
        self._is_possible = False
        log.warning(
            "grammars are compiled inside this process, which no limit of time or memory ends: "
            "no other one could be started with %r",
            sys.executable,
        )
        return None

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            self._idle.append(process)

    def _try(
        self, process: _Process, line: bytes, interruption: Interruption
    ) -> tuple[str | None, bool]:
        """Returns what is wrong with a grammar, if anything is, and whether it will always be."""
        limits = self._limits
        begun = time.monotonic()
        try:
            asked = process.ask(line)
            while True:
                answer = _answer(asked, POLL_SECONDS, interruption)
                is_shared = self._num_waiting > 0 and limits.shared_seconds < limits.seconds
                seconds = limits.shared_seconds if is_shared else limits.seconds
                if answer is not None or time.monotonic() - begun > seconds:
                    break
        except BaseException:  # Ctrl-C among them
            process.end()
            raise
        if answer:
            self._give_back(process)
            return json.loads(answer), True
        process.end()
        self.start()  # for the next grammar
        if answer is None:
            while_shared = ", while others wait" if is_shared else ""
            return f"compiling it takes more than {seconds:g} s{while_shared}", not is_shared
        fault = f"compiling it takes more than {limits.megabytes} MB, or crashes llguidance"
        return fault, not process.was_killed


class _Process:
    """Runs trial_process.py; `opened` says in the end whether it is ready for grammars. Raises
    OSError if it cannot be started."""

    def __init__(self, opening: bytes) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("no Python interpreter runs this program")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", trial_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self.end = weakref.finalize(self, _end, self._process)  # at the parent's exit at the latest
        self.opened = self.ask(opening)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Says whether somebody else, such as a system short of memory, ended the process."""
        return self._process.returncode == -KILLED

    def ask(self, line: bytes) -> Future[bytes]:
        """Sends a line. The result is the process's answer, nothing if it died."""
        answer: Future[bytes] = Future()
        arguments = (self._process, line, answer)
        threading.Thread(target=_exchange, args=arguments, daemon=True).start()
        return answer


def _exchange(process: subprocess.Popen[bytes], line: bytes, answer: Future[bytes]) -> None:
    answered = b""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError, ValueError):  # the process, or the file, is closed
        process.stdin.write(line)
        process.stdin.flush()
        answered = process.stdout.readline()
    answer.set_result(answered)


def _answer(answer: Future[bytes], seconds: float, interruption: Interruption) -> bytes | None:
    """Waits for an answer and returns it; None if it does not come in time. Raises Interrupted if
    the interruption has a reason before."""
    until = time.monotonic() + seconds
    while interruption.reason is None:
        with suppress(TimeoutError):
            return answer.result(POLL_SECONDS)
        if time.monotonic() > until:
            return None
    raise Interrupted


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and closes its files, whose readers then end, too."""
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout):
        assert file is not None
        with suppress(OSError):  # of what was not written
            file.close()


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
