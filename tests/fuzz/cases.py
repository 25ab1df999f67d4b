"""Says what a kind of case is, and what counts as accepted, refused and failed.

A case is a JSON value, so that it can be stored and run again. A kind draws cases and runs them: it
does what a user would do. A case is *accepted* if everything that was done with it went well,
*refused* if the first thing that went wrong was a proper refusal (see `refusing`), and everything
else is a *failure*.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from spec_runtime.errors import UserError

ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"
MAX_MESSAGE = 1500  # characters of one line, paths included
ROOT = Path(__file__).parents[2]
OWN_CODE = ("spec_runtime", "spec_export")
Run = Callable[[Any], None]


@dataclass(frozen=True)
class Kind:
    """Draws and runs one kind of case.

    `cases` returns a strategy of JSON values. `open` is given an empty folder, once a process, and
    returns what runs a case in it: that returns if all went well and raises Refused or anything
    else. `weight` is the share of cases beside the other kinds' weights; `seconds` and `megabytes`
    are what one case may take.
    """

    name: str
    cases: Callable[[], SearchStrategy[Any]]
    open: Callable[[Path], Run]
    weight: float = 1.0
    seconds: float = 10.0
    megabytes: int = 1024


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `cause` groups failures: the error and the line it came from."""

    verdict: str
    cause: str = ""
    detail: str = ""


class Refused(Exception):
    """The project has refused the case as it should."""


class Wrong(AssertionError):
    """The project has taken or refused the case in a way that it must not."""


def require_proper_line(line: str) -> None:
    """Raises Wrong unless a message is one line of bounded length that can be printed.

    Control characters other than line ends are the command line's to escape, see shell.py.
    """
    if not line.strip():
        raise Wrong("a refusal without a message")
    if len(line) > MAX_MESSAGE:
        raise Wrong(f"a refusal of {len(line)} characters: {line[:200]!r}")
    if len(line.splitlines()) > 1:
        raise Wrong(f"a refusal in {len(line.splitlines())} lines: {line[:300]!r}")


@contextmanager
def refusing() -> Iterator[None]:
    """Turns a proper refusal inside of the block into Refused, and an improper one into Wrong.

    A proper one is an OSError or a UserError with one line as its message.
    """
    try:
        yield
    except (UserError, OSError) as error:
        require_proper_line(str(error))
        raise Refused(str(error)) from error


def judge(run: Run, case: Any) -> Outcome:
    """Runs a case in this process and returns what became of it."""
    try:
        run(case)
    except Refused as refused:
        return Outcome(REFUSED, detail=str(refused)[:300])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Rust panics and SystemExit are no Exceptions
        text = "".join(traceback.format_exception(error)).replace(f"{ROOT}/", "")
        return Outcome(FAILED, _cause(error), text[-4000:])
    return Outcome(ACCEPTED)


def _cause(error: BaseException) -> str:
    """Returns the error's class, the project's innermost line and the message without its data."""
    own = ""
    for frame in traceback.extract_tb(error.__traceback__):
        place = next((name for name in OWN_CODE if f"/{name}/" in frame.filename), None)
        if place is not None:
            file = frame.filename.rpartition(f"/{place}/")[2]
            own = f"{place}/{file}:{frame.name}"
    message = " ".join(str(error).split())
    if isinstance(error, Wrong):
        message = message.partition(":")[0]
    message = re.sub(r"'[^']*'|\d[\w.]*", "…", message)  # data
    return f"{type(error).__name__} in {own or 'the oracle'}: {message[:80]}"


def draw(kind: Kind, count: int, seed: int) -> list[Any]:
    """Returns `count` cases of this kind; the same seed and count give the same cases.

    There are fewer if hypothesis finds that no more exist.
    """
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(kind.cases())
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found[:count]
