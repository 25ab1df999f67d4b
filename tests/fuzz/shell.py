"""Runs a command of the project in this process, as a shell would, and judges what it prints."""

import io
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cases import Refused, Wrong, require_proper_line


@dataclass(frozen=True)
class Printed:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str


def call(main: Callable[[Sequence[str]], Any], words: Sequence[str], stdin: str = "") -> Printed:
    """Runs `main(words)` with these words on its command line.

    Its outputs are UTF-8, as a terminal's are, so that half a surrogate pair cannot be printed.
    Lets any exception but SystemExit through.
    """
    saved = sys.stdin, sys.stdout, sys.stderr
    out, err = (
        io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True, newline="\n") for _ in "12"
    )
    given = io.BytesIO(stdin.encode("utf-8", "surrogateescape"))
    sys.stdin = io.TextIOWrapper(given, "utf-8", errors="surrogateescape")
    sys.stdout, sys.stderr = out, err
    code: Any = 0
    try:
        main(list(words))
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdin, sys.stdout, sys.stderr = saved
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    if not isinstance(code, int):
        raise Wrong(f"exit code {code!r}")
    return Printed(code, *texts)


def require_kept_promises(printed: Printed, prints_text: bool) -> None:
    """Raises Refused if a command has refused its input properly, and Wrong if it broke a promise.

    Exit codes are 0 and 1, or 2 with one line "error: …"; warnings may stand before it. Nothing but
    a model's own text (`prints_text`) may bring control characters to the terminal.
    """
    if printed.code == 2:
        errors = [line for line in printed.err.split("\n") if _is_news(line)]
        if len(errors) != 1 or not errors[0].startswith("error: "):
            raise Wrong(f"a refusal in {len(errors)} lines: {printed.err[:600]}")
        require_proper_line(errors[0])
        _require_no_control(printed.err)
        raise Refused(errors[0])
    if printed.code not in (0, 1):
        raise Wrong(f"exit code {printed.code}: {printed.err[:300]}")
    _require_no_control(printed.err if prints_text else printed.out + printed.err)


def _require_no_control(shown: str) -> None:
    if bad := sorted({c for c in shown if unicodedata.category(c) == "Cc"} - set("\n\t")):
        raise Wrong(f"control characters reach the terminal: {bad[:5]!r} in {shown[:300]!r}")


def _is_news(line: str) -> bool:
    return bool(line.strip()) and not line.startswith(("warning: ", "note: ", "prompt skipped: "))
