"""Collects what the parts of tools/gpu/check.py find and writes it as JSON.

This file imports only the standard library, so that it works even where packages are broken.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TableRow = dict[str, Any]  # by column
OK, FAILED, LEFT_OUT = "ok", "FAILED", "left out"


class LeftOut(Exception):
    """Says why this machine, these bundles or this run do not have something; no failure."""


@dataclass
class Findings:
    """What a part brought: tables by name, pieces left out, and failures.

    Numbers that are off are failures too, unless `is_dry_run`: then they are only counted, in
    `unjudged`. `figure` is what the line of verdict shows. No further piece is begun after
    `deadline`, a value of time.monotonic(). `on_change` is called after every change, and `doing`
    names the piece that runs, so that a part that is killed leaves what it had found.
    """

    deadline: float = math.inf
    is_dry_run: bool = False
    on_change: Callable[[Findings], None] = lambda found: None
    tables: dict[str, list[TableRow]] = field(default_factory=dict)
    missing: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    note: str = ""
    figure: str = ""
    doing: str = ""

    def add(self, row: TableRow, table: str = "measured") -> None:
        self.tables.setdefault(table, []).append(row)
        self.on_change(self)

    def miss(self, what: str, why: str) -> None:
        self.missing.append({"what": what, "why": why})
        self.on_change(self)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self.on_change(self)

    def fail_number(self, what: str) -> None:
        """Notes a number that is not what it has to be."""
        (self.unjudged if self.is_dry_run else self.failures).append(what)
        self.on_change(self)

    def attempt(self, what: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """Returns what one piece of a part returns, or None if it raises or the time is over.

        Whatever a piece raises but LeftOut is a failure, and the part goes on. The traceback goes
        to stderr.
        """
        if time.monotonic() > self.deadline:
            self.miss(what, "the part's time was over")
            return None
        self.doing = what
        self.on_change(self)
        try:
            return work(*arguments)
        except LeftOut as reason:
            self.miss(what, one_line(reason))
        except Exception as error:
            traceback.print_exception(error, file=sys.stderr)
            self.fail(f"{what}: {one_line(error)}")
        finally:
            self.doing = ""
        return None

    @property
    def status(self) -> str:
        if self.failures:
            return FAILED
        return OK if any(self.tables.values()) else LEFT_OUT

    def as_dict(self, seconds: float) -> TableRow:
        return {
            "status": self.status,
            "seconds": round(seconds, 2),
            "figure": self.figure,
            "note": self.note,
            "tables": self.tables,
            "missing": self.missing,
            "failures": self.failures,
            "unjudged": self.unjudged,
        }


def left_out(why: str) -> TableRow:
    """Returns the entry of a part that was not begun."""
    found = Findings()
    found.miss("the part", why)
    return found.as_dict(0.0)


def one_line(error: BaseException) -> str:
    """Returns the error's text, after its type unless its text needs none."""
    text = " ".join(str(error).split())[:400]
    says_all = isinstance(error, (ValueError, LeftOut)) and text
    return text if says_all else f"{type(error).__name__}: {text}"


def verdict(name: str, entry: TableRow) -> str:
    """Returns the part's line on stdout: name, verdict, seconds, and the figure or the reason."""
    reasons = entry["failures"] or [each["why"] for each in entry["missing"]]
    says = entry["figure"] if entry["status"] == OK else reasons[0]
    if entry["status"] == FAILED and len(reasons) > 1:
        says += f" (and {len(reasons) - 1} more)"
    if entry["unjudged"]:
        says += f"; {len(entry['unjudged'])} numbers off, not judged"
    if entry["status"] == OK and entry["missing"]:
        says += f"; {len(entry['missing'])} left out"
    return f"{name:<13} {entry['status']:<8} {entry['seconds']:6.1f} s  {says}"


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that nobody ever reads half of it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def as_json(value: Any) -> str:
    """Returns JSON, with null for the numbers that JSON does not have."""
    return json.dumps(_plain(value), indent=1, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
