"""Ends a command: by what it raised, with one line or with a traceback, and with which exit code.

An error is the user's to mend if it is a UserError, which says in one line what was got, what was
expected and what to do, or if it comes from outside of the program: OSError and MemoryError tell of
files, disks, networks and memory. Any other exception is a bug. It keeps its traceback, under which
a line asks to report it.
"""

import io
import os
import platform
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TextIO, cast

import typer

from spec_runtime.cli.terminal import visible
from spec_runtime.errors import UserError
from spec_runtime.files.installed import install
from spec_runtime.files.mapping import brief

INTERRUPTED, TERMINATED, NO_READER = (
    128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
)
REFUSED = 2
RESEND_SECONDS = 0.01
MAX_LINE = 1200  # characters of an error; most errors quote less

# Names the extra of the distribution that brings a module which may be absent.
EXTRAS = {
    "onnxruntime": "cpu",
    "tensorrt_rtx_bindings": "tensorrt-rtx",
    "openvino_genai": "distill",
    "huggingface_hub": "hub",
    **dict.fromkeys(
        ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"), "export"
    ),
    **dict.fromkeys(("accelerate", "peft"), "export"),
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "prometheus_client"), "serve"),
    "tensorboard": "tensorboard",
    "llguidance": "grammar",
    "prompt_toolkit": "chat",
}

# What typer raises for any wrong command line. It has no name of its own for it, and takes it from
# different modules in different versions; BadParameter is the kind that it does name.
UsageError = typer.BadParameter.__base__


def end(command: Sequence[str], work: Callable[[], int]) -> NoReturn:
    """Runs `work` and raises SystemExit with the exit code that it returns.

    What ends in one line or none raises SystemExit as well: 2 for what the user can mend, 130 on
    Ctrl-C, 143 on SIGTERM, 141 where the output's reader has left (`… | head`). Mistakes of
    ours are raised as they are, with a note that asks to report them; `command` is part of it.
    """
    _prepare_streams()
    try:
        with _raising_on_sigterm():
            code = work()
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit:
        raise
    except BaseException as error:  # so that a panic of a Rust library gets its note as well
        if isinstance(error, BrokenPipeError) and any(map(_has_no_reader, _outputs())):
            code = NO_READER
        elif (message := _message(error)) is not None:
            _print_error(message)
            code = REFUSED
        else:
            error.add_note(_request(command))
            raise
    finally:
        for stream in _outputs():
            _discard_unwritten(stream)
    raise SystemExit(code)


def _message(error: BaseException) -> str | None:
    """Returns the one line for an error that the user can mend; None for a mistake of ours."""
    if isinstance(error, ModuleNotFoundError):
        module_name = (error.name or "").partition(".")[0]
        if module_name not in EXTRAS:
            return None
        return (
            f"{module_name} is not installed, which this command needs; "
            f"run {install(EXTRAS[module_name])}"
        )
    if UsageError is not None and isinstance(error, UsageError):
        return _usage(cast(typer.BadParameter, error))
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if isinstance(error, UserError):
        return f"{error}; {error.hint}" if error.hint else str(error)
    return str(error) if isinstance(error, OSError) else None


def _usage(error: typer.BadParameter) -> str:
    """Returns typer's message about a wrong command line, and where the right one is explained."""
    message = error.format_message().replace("Value error, ", "").rstrip(".")
    return message if error.ctx is None else f"{message}; see {error.ctx.command_path} --help"


def _request(command: Sequence[str]) -> str:
    """Returns the line that asks to report a mistake of ours."""
    from spec_runtime.files.machine import versions
    from spec_runtime.measure.provenance import PACKAGES

    packages = (*PACKAGES, "torch", "transformers", "onnx")
    found = {**versions(packages), "system": platform.platform()}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return (
        "This is a mistake in specsplit, not in what you gave it. Please report it to the "
        f"project's issue tracker with this traceback, the command ({visible(shlex.join(command))})"
        f" and the versions ({listed})."
    )


def _print_error(message: str) -> None:
    """Prints one line to standard error, if that still takes one."""
    with suppress(OSError):
        print(f"error: {visible(brief(message, MAX_LINE))}", file=sys.stderr)


@contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Lets the first SIGTERM raise SystemExit in the block, so that it cleans up as on Ctrl-C.

    A second SIGTERM ends the process at once. Keeps a handler that somebody else has set, and
    does nothing in threads other than the main one, which get no signals.

    A signal may come while a destructor runs, whose exceptions Python drops: SIGTERM or Ctrl-C
    would be lost. There the signal is sent again a moment later.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(TERMINATED)

    def send_later(number: int) -> None:
        to_main = (threading.main_thread().ident, number)
        threading.Timer(RESEND_SECONDS, signal.pthread_kill, to_main).start()

    def send_again(dropped: "sys.UnraisableHookArgs") -> None:
        if isinstance(dropped.exc_value, SystemExit) and dropped.exc_value.code == TERMINATED:
            signal.signal(signal.SIGTERM, stop)
            send_later(signal.SIGTERM)
        elif isinstance(dropped.exc_value, KeyboardInterrupt):
            send_later(signal.SIGINT)
        else:
            show_dropped(dropped)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    show_dropped, sys.unraisablehook = sys.unraisablehook, send_again
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = show_dropped


def _prepare_streams() -> None:
    """Makes the standard streams take and give any text.

    A stream that the caller closed (`<&-`) is None in Python. Its descriptor would go to the next
    file that is opened, which prints of a library would then damage: the null device takes it. A
    closed output is that device; a closed input stays None, so that its readers can say so.
    Characters that the output's encoding lacks are printed as "?", for an escape would look like
    the answer's own text; input that is not UTF-8 is kept as half surrogates, which the readers
    refuse.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = _null_device()
    if sys.stderr is None:
        sys.stderr = _null_device()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _null_device() -> TextIO:
    """Returns a text file that swallows all; it stays open as long as the process."""
    return open(os.devnull, "w", encoding="utf-8")


def _outputs() -> tuple[TextIO, TextIO]:
    return sys.stdout, sys.stderr


def _has_no_reader(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe whose other end is closed."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # a stand-in without a file, or a closed one
        return False
    poller = select.poll()
    poller.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poller.poll(0))


def _discard_unwritten(stream: TextIO) -> None:
    """Empties a stream that cannot be written to, which Python would complain about at its end."""
    try:
        stream.flush()
    except ValueError:  # it is closed
        pass
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()
