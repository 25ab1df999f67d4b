"""Reads measured figures from JSON, and fills them into the cells of tables.

A cell is a template: `{speedup.all.median:.2f}` is the value at this path of a row, with two
decimals. A path that ends with "?" may lead nowhere; the cell is then blank.
"""

import json
import re
import string
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tools.figures import spread_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes/smollm2-135m/results"
BUILDS = ROOT / "docs/deploy"  # figures of builds, not of one target

Row = dict[str, Any]


class FigureError(ValueError):
    """A table that cannot be rendered: what was asked, what is there, what to do."""


@cache
def load(name: str) -> Any:
    """Returns the parsed results/NAME.json, or docs/deploy/NAME.json."""
    return json.loads(file_of(name).read_text(encoding="utf-8"))


def file_of(name: str) -> Path:
    """Returns the file of a result by its name; raises FigureError if there is none."""
    for folder in (RESULTS, BUILDS):
        file = folder / f"{name}.json"
        if file.is_file():
            return file
    known = ", ".join(sorted(file.stem for file in RESULTS.glob("*.json")))
    raise FigureError(f"got results file {name!r}, expected one of {known}")


def value(data: Any, path: str, file: str) -> Any:
    """Follows `path` ("overall.speedup", "rows.0.speedup") through parsed JSON.

    Keys that hold a dot or a blank are quoted: `contenders."4 nodes".nodes`. The row of a list that
    has these values is `rows."temperature=0.7,rule=plain"`.
    """
    for part in re.findall(r'"[^"]+"|[^.\[\]]+', path):
        part = part.strip('"')
        if isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        elif isinstance(data, list) and len(rows := _rows_with(data, part)) == 1:
            data = rows[0]
        elif isinstance(data, dict) and part in data:
            data = data[part]
        else:
            there = ", ".join(data) if isinstance(data, dict) else type(data).__name__
            raise FigureError(
                f"{file}.json has no {path!r}: at {part!r} there is {there}; measure the file anew "
                "or change the name in the document"
            )
    return data


def _rows_with(rows: list[Any], wanted: str) -> list[Any]:
    """Returns the rows that have all of `wanted`, "key=value,key=value"."""
    if "=" not in wanted:
        return []
    pairs = [pair.partition("=")[::2] for pair in wanted.split(",")]
    return [row for row in rows if all(str(row.get(key)) == value for key, value in pairs)]


def rows_of(file: str, path: str) -> list[Row]:
    """Returns the rows at `path` of a file; those of an object have its keys as "key"."""
    found = value(load(file), path, file)
    if isinstance(found, list):
        return found
    return [
        {"key": key, **(each if isinstance(each, dict) else {"value": each})}
        for key, each in found.items()
        if key != "provenance"
    ]


def pivot(rows: list[Row], by: str, across: str) -> list[Row]:
    """Returns a row for each value of `by`, with "across": the row for each value of `across`.

    Rows {d: a, t: 0, n: 1}, {d: a, t: 1, n: 2} by d across t are one row {key: a, across: {"0":
    {…, n: 1}, "1": {…, n: 2}}}.
    """
    found: dict[str, Row] = {}
    for row in rows:
        one = found.setdefault(row[by], {"key": row[by], "across": {}})
        one["across"][str(row[across])] = row
    return list(found.values())


# Formats of cells, in addition to Python's own.
FORMS: dict[str, Callable[[Any], str]] = {
    "M": lambda count: f"{count / 1e6:.1f} M" if count else "",
    "MB": lambda count: f"{count / 1e6:.0f}",
    "GB": lambda megabytes: f"{megabytes / 1000:.1f}",
    "range": spread_text,
    "range.1f": lambda found: spread_text(found, ".1f"),
    "each%": lambda shares: " ".join(f"{share:.1%}" for share in shares),
    "each": lambda numbers: ", ".join(f"{name} {each:.1f}" for name, each in numbers.items()),
    "same": lambda found: f"{found['identical']} of {found['prompts']}",
}


class Cells(string.Formatter):
    """Formats a row's cell by its template."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        path = field_name.removesuffix("?")
        try:
            return value(args[0], path, "row of a results file"), path
        except FigureError:
            if path == field_name:
                raise
            return None, path

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        return FORMS[format_spec](value) if format_spec in FORMS else format(value, format_spec)


def cell(template: str, row: Row) -> str:
    """Returns a template filled in from a row."""
    return Cells().format(template, row)


def source(name: str) -> str:
    """Returns where a file's figures come from: file, commit, date, CPU, command and note."""
    data = load(name)
    found = data.get("provenance", data)
    command, note = found.get("command"), found.get("note")
    commit, date = found.get("commit"), found.get("date")
    parts = [
        f"`{file_of(name).relative_to(ROOT)}`",
        f"commit `{commit[:9]}`" if commit else "commit not recorded",
        str(date)[:10] if date else "date not recorded",
        found.get("cpu") or "CPU not recorded",
    ]
    if command:
        parts.append(f"`{' '.join(command) if isinstance(command, list) else command}`")
    if note:
        parts.append(note.partition("; not recorded")[0])
    return " · ".join(parts)
