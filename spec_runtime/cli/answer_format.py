"""Reads the flags that keep an answer inside a JSON schema, a regular expression or a grammar."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

JsonSchema = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="Answer by JSON that fits this schema"),
]
Regex = Annotated[
    str | None, typer.Option("--regex", help="Answer by a text that fits this regular expression")
]
GrammarFile = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="Answer by a text of this grammar: Lark, GBNF"),
]


def response_format(
    json_schema: Path | None, regex: str | None, grammar: Path | None
) -> dict[str, Any] | None:
    """Returns the `response_format` that these flags ask for, None without one of them.

    Raises UserError for two flags at once and for a file that is not text or not JSON.
    """
    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    flags = [flag for flag, value in given.items() if value is not None]
    if len(flags) > 1:
        raise UserError(f"got {' and '.join(flags)}, expected one of them")
    if json_schema is not None:
        return {"type": "json_schema", "json_schema": {"schema": _json(json_schema)}}
    if regex is not None:
        return {"type": "regex", "regex": regex}
    if grammar is not None:
        return {"type": "ebnf", "grammar": _text(grammar)}
    return None


def _json(path: Path) -> Any:
    text = _text(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: got no JSON ({brief(error)}), expected a JSON schema") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: got bytes that are not UTF-8 ({error}), expected text") from None
