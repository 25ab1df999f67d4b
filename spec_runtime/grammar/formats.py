"""Reads `response_format`: OpenAI's mapping, our own kinds, a bare JSON schema or a class that has
one, as a `Grammar`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import brief

# The further keys of each type; the types after json_schema are our own, but vLLM's structural_tag.
_KNOWN: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "regex": ("regex",),
    "ebnf": ("grammar",),
    "tagged_json": ("begin", "schema", "end"),
    "any_of": ("formats",),
    "triggered_json": ("triggers",),
    "structural_tag": ("structures", "triggers"),
}
# What a bare JSON schema is known by.
_JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_JSON_KEYWORDS = frozenset(
    ("properties", "items", "prefixItems", "anyOf", "oneOf", "allOf", "enum", "const", "$ref")
)
# What OpenAI's "json_schema" holds; only `schema` changes what is allowed.
_SCHEMA_KEYS = ("name", "schema", "description", "strict")
_FREE = ("triggered_json", "structural_tag")  # whose text is free outside of JSON
_ANY_OBJECT = json.dumps({"type": "object"})


@dataclass(frozen=True)
class Grammar:
    """A grammar as its author wrote it: a JSON schema (as JSON), a regular expression, or a
    context-free grammar (Lark's or GBNF's notation).

    JSON may stand between two fixed texts, `begin` and `end`, in which the names of a tokenizer's
    special tokens stand for these tokens. A text of kind any_of fits one of the `choices`, which
    are no context-free grammars. A text of kind triggered_json is free, but the `choices` are JSON
    schemas with regular expressions as `begin`: what fits one is followed by JSON of its schema, or
    by one of its own `choices`, which are JSON between fixed texts.
    """

    kind: Literal["json_schema", "regex", "ebnf", "any_of", "triggered_json"]
    text: str
    begin: str = ""
    end: str = ""
    choices: tuple[Grammar, ...] = ()


def format_error(message: str) -> UserError:
    """Returns the error of a `response_format` that no answer can follow."""
    return UserError(message, param="response_format")


def read_format(response_format: Any) -> Grammar | None:
    """Returns the grammar that a `response_format` asks for, None for free text.

    Raises UserError, in one line, for what has not the form of one. Whether the grammar itself is
    valid shows when it is compiled. A class, of pydantic or a dataclass, stands for its schema.

    Example: {"type": "regex", "regex": "[0-9]+"} is Grammar("regex", "[0-9]+").
    """
    if response_format is None:
        return None
    if isinstance(response_format, type):
        return Grammar("json_schema", schema_text(_schema_of(response_format)))
    if not isinstance(response_format, Mapping):
        raise format_error(f"got response_format {_shown(response_format)}, expected a mapping")
    kind = response_format.get("type")
    if _is_schema(response_format):
        return Grammar("json_schema", schema_text(response_format))
    if not isinstance(kind, str) or kind not in _KNOWN:
        raise format_error(
            f"got response_format of type {_shown(kind)}, expected one of {', '.join(_KNOWN)}"
        )
    _require_keys("response_format", response_format, ("type", *_KNOWN[kind]))
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", _ANY_OBJECT)
    if kind == "json_schema":
        return Grammar("json_schema", _schema(response_format.get("json_schema")))
    if kind == "tagged_json":
        return _tagged(response_format)
    if kind == "any_of":
        return _any_of(response_format.get("formats"))
    if kind == "triggered_json":
        return _triggered(response_format.get("triggers"))
    if kind == "structural_tag":
        return _structural(response_format.get("structures"), response_format.get("triggers"))
    value = response_format.get(_KNOWN[kind][0])
    if not isinstance(value, str):
        raise format_error(f"got {_KNOWN[kind][0]} {_shown(value)}, expected a string")
    return Grammar("regex" if kind == "regex" else "ebnf", value)


def _is_schema(response_format: Mapping[Any, Any]) -> bool:
    """Returns whether a mapping is a JSON schema itself."""
    kind = response_format.get("type")
    if isinstance(kind, str):
        return kind in _JSON_TYPES
    return isinstance(kind, list) or not _JSON_KEYWORDS.isdisjoint(response_format)


def _schema_of(kind: type) -> Any:
    """Returns the JSON schema of what a class holds."""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        return TypeAdapter(kind).json_schema()
    except PydanticUserError as error:
        raise format_error(
            f"got class {kind.__name__} as response_format ({brief(error, 80)}), expected one with "
            "a JSON schema, such as a pydantic model or a dataclass"
        ) from None


def _any_of(formats: Any) -> Grammar:
    """Returns the grammar of a text that fits one of these formats."""
    if not isinstance(formats, list | tuple) or not formats:
        raise format_error(f"got formats {_shown(formats)}, expected a list of at least one")
    found = []
    for each in formats:
        kind = each.get("type") if isinstance(each, Mapping) else None
        grammar = None if kind in ("ebnf", "any_of", *_FREE) else read_format(each)
        if grammar is None:
            raise format_error(
                f"got response_format of type {_shown(kind)} as one of several, or beside tools; "
                "expected JSON or a regex there"
            )
        found.append(grammar)
    text = " | ".join(each.text for each in found)
    return Grammar("any_of", text, choices=tuple(found))


def _triggered(triggers: Any) -> Grammar:
    """Returns the grammar of a free text in which JSON follows whatever fits a trigger's regex."""
    if not isinstance(triggers, list | tuple) or not triggers:
        raise format_error(f"got triggers {_shown(triggers)}, expected a list of at least one")
    found = []
    for each in triggers:
        regex = each.get("regex") if isinstance(each, Mapping) else None
        if not isinstance(regex, str):
            raise format_error(f"got trigger {_shown(each)}, expected a regex and a schema")
        _require_keys("trigger", each, ("regex", "schema"))
        found.append(Grammar("json_schema", schema_text(each.get("schema")), begin=regex))
    text = " | ".join(each.text for each in found)
    return Grammar("triggered_json", text, choices=tuple(found))


def _structural(structures: Any, triggers: Any) -> Grammar:
    """Returns the grammar of a free text in which each trigger begins one of the structures: two
    texts, the first of which begins with the trigger, and JSON between them."""
    if not isinstance(structures, list | tuple) or not structures:
        raise format_error(f"got structures {_shown(structures)}, expected a list of at least one")
    texts = triggers if isinstance(triggers, list | tuple) else [None]
    if not all(isinstance(each, str) and each for each in texts):
        raise format_error(f"got triggers {_shown(triggers)}, expected a list of texts")
    found: dict[str, list[Grammar]] = {}
    for each in structures:
        if not isinstance(each, Mapping):
            raise format_error(f"got structure {_shown(each)}, expected begin, schema and end")
        _require_keys("structure", each, ("begin", "schema", "end"))
        tagged = _tagged(each)
        trigger = next((one for one in triggers if tagged.begin.startswith(one)), None)
        if trigger is None:
            raise format_error(f"got begin {_shown(tagged.begin)}, expected a trigger at its start")
        rest = replace(tagged, begin=tagged.begin.removeprefix(trigger))
        found.setdefault(trigger, []).append(rest)
    text = " | ".join(each.text for tags in found.values() for each in tags)
    forms = [Grammar("any_of", "", one, choices=tuple(tags)) for one, tags in found.items()]
    return Grammar("triggered_json", text, choices=tuple(forms))


def _schema(entry: Any) -> str:
    """Returns the schema of OpenAI's "json_schema" as JSON."""
    if not isinstance(entry, Mapping):
        raise format_error(
            f"got json_schema {_shown(entry)}, expected a mapping with a name and a schema"
        )
    _require_keys("json_schema", entry, _SCHEMA_KEYS)
    return schema_text(entry.get("schema"))


def _tagged(entry: Mapping[str, Any]) -> Grammar:
    """Returns the grammar of JSON between two texts, as tool calls have it."""
    begin, end = entry.get("begin"), entry.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise format_error(
            f"got tagged_json from {_shown(begin)} to {_shown(end)}, expected two strings"
        )
    return Grammar("json_schema", schema_text(entry.get("schema")), begin, end)


def schema_text(schema: Any) -> str:
    """Returns a JSON schema as JSON, an object also for true, which any value fits; raises
    UserError for false, which none fits, and for what is no schema."""
    if schema is True:
        return "{}"
    if not isinstance(schema, Mapping):
        raise format_error(
            f"got schema {_shown(schema)}, expected a JSON schema, which is an object or true"
        )
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise format_error(
            f"got a schema that cannot be written as JSON ({brief(error)}), expected objects, "
            "arrays, strings, numbers, booleans and null"
        ) from None


def _require_keys(where: str, mapping: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in mapping if key not in known]
    if unknown:
        raise format_error(f"got {where} with {_shown(unknown[0])}, expected {', '.join(known)}")


def _shown(value: Any) -> str:
    return brief(repr(value), 80)
