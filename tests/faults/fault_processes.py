"""Runs the commands as processes that die at a chosen moment.

Each command runs in a process of its own, forked from a server that has imported torch already, so
that a kill falls into the command's work and not into three seconds of imports. A process dies by
itself right before its n-th operation on a file, which reaches every state that the disk can be in,
or is killed from outside after some time, which reaches the moments between operations.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any

PRELOADED = [
    "onnxruntime",
    "spec_export.check.calibrate",
    "spec_export.distill.answers",
    "spec_export.distill.engines",
    "spec_export.build.make_bundle",
    "spec_export.training.run",
    "spec_runtime.measure.bench",
    "spec_runtime.measure.tune",
    "tokenizers",
    "transformers.models.llama.modeling_llama",
]
# What Python tells audit hooks before it changes files (see "Audit events table" of its manual).
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
LIMIT = 120.0  # seconds after which a command hangs


@dataclass(frozen=True)
class Death:
    """The moment at which a process dies, and the signal that it dies of.

    Either `operation` n: right before its n-th operation on a file, counted from 1; or `seconds`
    after its start.
    """

    signal: signal.Signals
    operation: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        where = f"operation {self.operation}" if self.operation else f"{self.seconds:.3f} s"
        return f"{self.signal.name} at {where}"


@dataclass(frozen=True)
class Ended:
    """What a process left: `exit_code` is minus the signal that killed it, as in `subprocess`.

    `operations` are those on files, in order; `has_decoded` says that it ran the target over a
    prompt, which is what a measurement begins with.
    """

    exit_code: int
    out: str
    err: str
    seconds: float
    operations: list[str]
    has_decoded: bool

    @property
    def last_lines(self) -> str:
        """Returns the end of what it wrote to stderr, for a report."""
        return " / ".join(self.err.strip().splitlines()[-3:])[-400:]


class Running:
    """A command that runs in `place`; what it prints goes to files in `logs`."""

    def __init__(self, arguments: list[str], place: Path, logs: Path, death: Death | None = None):
        logs.mkdir(parents=True, exist_ok=True)
        for name in ("out", "err"):  # a process that is killed at once makes none
            (logs / name).touch()
        self.logs, self.death = logs, death
        self._started = time.monotonic()
        operation = death.operation if death is not None else None
        number = int(death.signal) if death is not None else 0
        self._process = _context().Process(
            target=_command, args=(arguments, place, logs, operation, number)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def num_operations(self) -> int:
        """Returns how many operations on files it has begun."""
        return len(_lines(self.logs / "operations"))

    def wait(self) -> Ended:
        """Waits for its end, or brings it about if it is to die after some time."""
        if self.death is not None and self.death.seconds is not None:
            self._process.join(max(0.0, self._started + self.death.seconds - time.monotonic()))
            if self._process.is_alive():
                os.kill(self.pid, self.death.signal)
        self._process.join(LIMIT)
        hangs = self._process.is_alive()
        if hangs:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode
        assert code is not None
        err = (self.logs / "err").read_text(errors="replace")
        operations = _lines(self.logs / "operations")
        return Ended(
            code,
            (self.logs / "out").read_text(errors="replace"),
            err + (f"\nkilled: it ran for more than {LIMIT} s" if hangs else ""),
            time.monotonic() - self._started,
            operations,
            (self.logs / "decoded").exists(),
        )


def call(function: Callable[..., None], *arguments: Any) -> None:
    """Runs a function in a process of its own; raises RuntimeError if it fails."""
    process = _context().Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}")


@cache
def _context() -> Any:
    """Returns the server of processes, which imports `PRELOADED` when it starts."""
    # Whatever a killed process left in Python's list of semaphores, the tracker frees and reports
    # as leaked at the end; that is as it should be and nothing to read.
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    ensure_running()
    os.environ.pop("PYTHONWARNINGS")
    if before is not None:
        os.environ["PYTHONWARNINGS"] = before
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _command(
    arguments: list[str], place: Path, logs: Path, operation: int | None, number: int
) -> None:
    """Runs spec-export, spec-runtime or a script, the first of the arguments, in this process."""
    for name, descriptor in (("out", 1), ("err", 2)):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(place)
    os.environ |= {"XDG_CACHE_HOME": str(place / "cache"), "HOME": str(logs)}
    _watch_decoding(logs / "decoded")
    # the hook comes last: from here on only the command's own operations are counted
    journal = os.open(logs / "operations", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.addaudithook(_Journal(journal, str(place), operation, number))
    program, *rest = arguments
    if program.endswith(".py"):  # with a planted fault
        runpy.run_path(program)
        return
    if program == "spec-export":
        from spec_export.cli import main
    else:
        from spec_runtime.cli import main
    main(rest)


class _Journal:
    """An audit hook that writes down each operation on a file and dies before one of them."""

    def __init__(self, file: int, place: str, fatal: int | None, number: int) -> None:
        self._file, self._place, self._fatal, self._signal = file, place, fatal, number
        self._pid = os.getpid()
        self._count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool(flags & WRITING) if flags else any(c in str(mode) for c in "wax+")
            if not is_writing:
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if os.getpid() != self._pid or isinstance(path, int):
            return
        name = os.fsdecode(path)
        # names without a folder are those that shutil.rmtree finds in one that it has opened
        if os.path.isabs(name) and not name.startswith(self._place):
            return
        self._count += 1
        shown = name.removeprefix(self._place)
        os.write(self._file, f"{event} {shown}\n".encode())
        if self._count == self._fatal:
            os.kill(self._pid, self._signal)


def _watch_decoding(flag: Path) -> None:
    """Makes the file `flag` appear when the target runs over a prompt."""
    from spec_runtime.loop.target import Target

    prefill = Target.prefill

    def watched(self: Target, *arguments: Any, **named: Any) -> Any:
        flag.touch()
        return prefill(self, *arguments, **named)

    Target.prefill = watched  # type: ignore[method-assign]
