"""Holds what the scripts of tools/ share: command lines, tables, and JSON files with provenance.

A script parses its flags with `command_line`, prints its table with `markdown`, writes its figures
with `write`, and is started by `run`, which tells a user's mistake in one line. Scripts are modules
of the checkout: `python -m tools.measure.compare --help`, from the root.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from spec_runtime.bundle import manifest as bundles
from spec_runtime.errors import UserError
from spec_runtime.files.writing import require_writable, write_atomically
from spec_runtime.measure import provenance

# The flags that several scripts take; `command_line` adds those that it is given the names of.
FLAGS: dict[str, dict[str, Any]] = {
    "--bundle": {"type": Path, "help": "a folder; default: the newest under ./bundles"},
    "--drafter": {"help": "default: the bundle's own"},
    "--prompts": {"type": Path, "required": True, "help": "Spec-Bench's questions, or any prompts"},
    "--limit": {"type": int, "help": "prompts in all, taken evenly over the subsets"},
    "--per-category": {"type": int, "default": 10, "help": "prompts of each subset"},
    "--max-new-tokens": {"type": int, "default": 128, "help": "tokens of an answer"},
    "--no-profile": {"action": "store_true", "help": "without what tune found"},
    "--threads": {"type": int, "help": "CPU threads; default: all CPUs"},
    "--json": {"type": Path, "help": "write the figures here"},
}


def command_line(
    doc: str | None, *flags: str, required: Sequence[str] = (), **defaults: Any
) -> argparse.ArgumentParser:
    """Returns a parser whose help is a script's docstring, with some of `FLAGS`.

    `required` are those of `flags` that must be given; `defaults` are by the name of the value:
    max_new_tokens=64.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in flags:
        parser.add_argument(flag, **FLAGS[flag] | ({"required": True} if flag in required else {}))
    parser.set_defaults(**defaults)
    return parser


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Returns the flags given; raises OSError before anything is measured if --json cannot be
    written."""
    arguments = parser.parse_args(words)
    if arguments.json is not None:
        require_writable(arguments.json)
    return arguments


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what `write` records of the flags: the threads and the file of prompts."""
    return {"threads": arguments.threads, "prompts_file": arguments.prompts}


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns; bad input is one line and exit code 2."""
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def manifest_of(folder: Path) -> bundles.Manifest:
    """Returns a bundle's manifest without reading its other files."""
    return bundles.read(folder, verify=False).manifest


def write(file: Path | None, figures: dict[str, Any], **about: Any) -> dict[str, Any]:
    """Returns the figures with their provenance in front, and writes them if a file is given.

    `about` are the arguments of `provenance.collect`. Those of a bundle's manifest are written out
    as "bundle" and "precision".
    """
    head: dict[str, Any] = {"provenance": provenance.collect(**about)}
    if (manifest := about.get("manifest")) is not None:
        head |= {"bundle": manifest.name, "precision": manifest.target.precision}
    whole = {**head, **figures}
    if file is not None:
        write_atomically(file, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return whole


def spread(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of some values, the least and the greatest."""
    return {"median": statistics.median(values), "least": min(values), "greatest": max(values)}


def spread_text(found: dict[str, float], form: str = ".2f") -> str:
    """Returns a median with its range: "1.52 (1.48 to 1.60)"."""
    median, least, greatest = (format(found[key], form) for key in ("median", "least", "greatest"))
    return f"{median} ({least} to {greatest})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table whose first `left` columns are text and all others numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows])
