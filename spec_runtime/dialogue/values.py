"""Reads the values of a call's parameters: by the tool's schema, as Python's, or as Gemma 4's."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any

from spec_runtime.files.mapping import parse_json
from spec_runtime.grammar.json_schema import References

_BARE_KEY = re.compile(r"(?<![\w.$-])[\w.$-]++(?=\s*+:)")
_MAX_DEPTH = 32  # of references and alternatives in a schema


def literal(text: str, quote: str = "") -> Any:
    """Returns the value of a Python literal that JSON can hold, None for any other text."""
    try:
        return parse_json(json.dumps(ast.literal_eval(text)))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _quoted(text: str, quote: str) -> Any:
    """Returns the value of JSON without quotes around keys, None for any other text: a string
    stands between two of these quotes, and no key has any."""
    pieces = text.split(quote)
    pieces[1::2] = map(json.dumps, pieces[1::2])
    pieces[::2] = (_BARE_KEY.sub(r'"\g<0>"', piece) for piece in pieces[::2])
    try:
        return parse_json("".join(pieces))
    except ValueError:
        return None


# How the contents of templates say values that are no JSON.
READERS: dict[str, Callable[[str, str], Any]] = {"python": literal, "quoted": _quoted}


def typed(value: str, allowed: Set[str]) -> Any:
    """Returns the value of a parameter that stands as text between tags.

    Reads the text as JSON, or a list or an object as Python, and returns that if its type is
    `allowed`, as all are if none is named. Otherwise, and where strings alone are allowed, returns
    the text itself.

    Example: "5" is the number 5 for {"integer"} and for no types, but "5" for {"string"}; "5.0" is
    5 and "TRUE" is true where no other types are allowed.
    """
    if allowed == {"string"}:
        return value
    plain = value.strip()
    word = plain.lower() if allowed and "string" not in allowed else plain
    try:
        read = parse_json(_WORDS.get(word, plain))
    except ValueError:
        # as templates write them that leave it to Python, Seed-OSS's for instance
        read = literal(plain) if plain.startswith(("[", "{")) else None
        if read is None:
            return value
    if "integer" in allowed and type(read) is float and read.is_integer():
        read = int(read)
    return read if not allowed or allowed & _KINDS[type(read)] else value


# As templates and models write them; the small ones where no text is meant.
_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS |= {"true": "true", "false": "false", "null": "null", "none": "null"}
_KINDS: dict[type, set[str]] = {
    **{bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}},
    **{list: {"array"}, dict: {"object"}, type(None): {"null"}},
}


def parameter_types(schema: Mapping[str, Any]) -> dict[str, Set[str]]:
    """Returns the types that a tool's schema allows for each parameter, none if it allows any.
    Takes as long as the schema is, whatever refers to what in it."""
    properties, references = schema.get("properties"), References(schema)
    known: dict[int, Set[str]] = {}
    if not isinstance(properties, Mapping):
        return {}
    return {key: _types(each, references, known, 0) for key, each in properties.items()}


def _types(schema: Any, references: References, known: dict[int, Set[str]], depth: int) -> Set[str]:
    """Returns the types that a schema allows, asks and fills `known` by the schemas' identities."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if id(schema) not in known:
        known[id(schema)] = frozenset()  # of one that is an alternative of itself
        known[id(schema)] = _types_of(schema, references, known, depth + 1)
    return known[id(schema)]


def _types_of(
    schema: Mapping[str, Any], references: References, known: dict[int, Set[str]], depth: int
) -> Set[str]:
    named, values = schema.get("type"), schema.get("enum", [schema.get("const", ...)])
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    if isinstance(values, list) and values != [...]:
        return set[str]().union(*(_KINDS[kind] for kind in set(map(type, values))))
    if isinstance(schema.get("$ref"), str):
        return _types(references.resolved(schema), references, known, depth)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [_types(each, references, known, depth) for each in schema[key]]
            return set[str]().union(*parts) if all(parts) else set()
    if isinstance(schema.get("allOf"), list):
        parts = [_types(each, references, known, depth) for each in schema["allOf"]]
        return set.intersection(*map(set, filter(None, parts))) if any(parts) else set()
    return set()
