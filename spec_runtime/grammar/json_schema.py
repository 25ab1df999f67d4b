"""Checks JSON schemas before llguidance compiles them, and rewrites what it does not read.

Whatever fits a rewritten schema fits the one it was made of. Raises ValueError for schemas that
llguidance would follow wrongly, or not to the end.
"""

import json
import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

# llguidance holds numbers as doubles, which represent integers exactly up to this one.
EXACT = 2**53
# The largest double below 10^18, beyond which llguidance follows no bounds.
MOST = 999_999_999_999_999_872
MAX_MULTIPLE = 1000  # of bounded numbers; llguidance's automata grow with it
MAX_PROBES = 64  # of the names of objects; more are not looked at
MAX_ROUNDS = 32  # of looking for endless references; what takes more is not looked for
MAX_REFERENCES = 100  # that lead to each other, before a schema
MAX_WRITTEN = 1_000_000  # characters of a schema whose propertyNames are written out

_UPPER = ("maximum", "exclusiveMaximum")
_BOUNDS = ("minimum", "exclusiveMinimum", *_UPPER)
VALUES = ("const", "enum", "default", "examples", "example")  # hold no schemas
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # by name
_HINTS = ("password", "binary")  # formats that allow every string
_NOTES = ("type", "title", "description", "default", "examples", "$comment")
_FOLLOWED = (  # keywords whose schemas an answer may have to fit
    "items",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "prefixItems",
    "properties",
    "patternProperties",
)
# Keywords whose schemas describe the same object as the keywords beside them.
_SHARING = frozenset(("allOf", "not", "if", "then", "else", "dependentSchemas"))
# Those, and keywords whose schema may also be all that describes the object.
_JOINING = _SHARING | {"anyOf", "oneOf", "$ref"}
# Keywords that say which further properties an object has.
_SAYING = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))
# All keywords that describe an object.
_COMBINED = _JOINING | _SAYING | {"properties", "required"}


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON schema as llguidance reads it.

    - Objects hold nothing but the properties that they name, unless additionalProperties or
      patternProperties say otherwise, or their schema is one part of several.
    - Bounds of numbers beyond ±`MOST`, such as those of 64-bit integers, are narrowed to that, and
      bounds that are no doubles to the next one inside.
    - `propertyNames` becomes `properties` or `patternProperties`, where it is names, one pattern or
      lengths; formats that allow every string, and "uniqueItems": false, are left out.

    Raises ValueError for numbers in `const` or `enum` that would lose digits, for bounds that leave
    nothing, for a `multipleOf` that is too large, for a reference that leads back to itself in
    every value that fits, and for `propertyNames` that are too long as other keywords. Takes as
    long as the schema is.
    """
    try:
        rewritten: dict[str, Any] = _Rewriting(schema).rewritten(schema)
        _close(rewritten)
        if endless := _endless(rewritten):
            raise ValueError(f"every value of {max(endless)} holds another one, without an end")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return rewritten


class _Rewriting:
    """Rewrites one schema; `size` counts the characters of all that is written so far."""

    def __init__(self, root: Any) -> None:
        self.references = References(root)
        self.size = 0

    def rewritten(self, value: Any) -> Any:
        """Returns a value, and what it holds, as llguidance reads it."""
        if isinstance(value, list):
            return [self.rewritten(each) for each in value]
        if not isinstance(value, dict):
            self.size += len(json.dumps(value))
            return value
        schema: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        for key, each in value.items():
            before = self.size
            if key in VALUES:
                self.size += len(json.dumps(each))
                schema[key] = each
            elif key in _BOUNDS:
                schema[key] = _narrowed(key, each)
            elif key in NAMED and isinstance(each, dict):
                schema[key] = {name: self.rewritten(inner) for name, inner in each.items()}
                self.size += sum(map(len, each))
            else:
                schema[key] = self.rewritten(each)
            self.size += len(key)
            sizes[key] = self.size - before
        for key in ("const", "enum"):
            _require_exact(key, schema.get(key))
        if any(key in schema for key in _BOUNDS):
            _require_small(schema.get("multipleOf"))
        if schema.get("format") in _HINTS:
            del schema["format"]
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        return self._with_names(schema, sizes.get("additionalProperties", 0))

    def _with_names(self, schema: dict[str, Any], size: int) -> dict[str, Any]:
        """Returns a schema with other keywords for its `propertyNames`; itself if there is none, or
        if it says more than other keywords can, which llguidance then refuses. `size` is that of
        its `additionalProperties`.

        Example: {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": S} becomes
        {"properties": {"a": S, "b": S}, "additionalProperties": false}.
        """
        if "propertyNames" not in schema:
            return schema
        names = self.references.resolved(schema["propertyNames"])
        others = {key: each for key, each in schema.items() if key != "propertyNames"}
        known, more = others.get("properties", {}), others.get("additionalProperties", True)
        if not isinstance(names, dict):
            return others if names is True else schema
        self._write(len(names))
        limits = {key: each for key, each in names.items() if key not in _NOTES}
        if names.get("type", "string") != "string" or not isinstance(known, dict):
            return schema
        if not limits:
            return others
        if "patternProperties" in schema:
            return schema
        if limits.keys() in ({"enum"}, {"const"}):
            allowed = limits.get("enum", [limits.get("const")])
            if not isinstance(allowed, list):
                return schema
            self._write((len(allowed) - 1) * (size + 1))
            if not all(isinstance(each, str) for each in allowed):
                return schema
            self._write(sum(map(len, allowed)))
            chosen = dict.fromkeys(allowed)
            ordered = [*(name for name in known if name in chosen), *chosen]
            properties = {name: known.get(name, more) for name in ordered}
            return {**others, "properties": properties, "additionalProperties": False}
        pattern = _pattern(limits)
        if pattern is None or known:
            return schema
        self._write(len(pattern))
        return {**others, "patternProperties": {pattern: more}, "additionalProperties": False}

    def _write(self, num_characters: int) -> None:
        """Counts what is written in place of `propertyNames`: once for each of the names, and once
        for each object that refers to them."""
        self.size += num_characters
        if self.size > MAX_WRITTEN:
            raise ValueError(
                f"it takes more than {MAX_WRITTEN:,} characters with its propertyNames written as "
                "properties"
            )


def _require_exact(key: str, value: Any) -> None:
    """Raises ValueError if a value of JSON holds a number that llguidance would write otherwise; it
    crashes at the most negative ones."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, int | float) and abs(item) > EXACT:
            raise ValueError(
                f"{key} holds {item}, beyond ±2^53, where numbers lose digits: use a string"
            )
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()


def _require_small(multiple: Any) -> None:
    """Raises ValueError for a `multipleOf` whose automaton outgrows llguidance in mid-answer."""
    if not isinstance(multiple, int | float):
        return
    digits = f"{multiple:.15g}".partition("e")[0].replace(".", "").strip("-0")
    if int(digits or 0) > MAX_MULTIPLE or multiple > MAX_MULTIPLE:
        raise ValueError(f"multipleOf {multiple} beside bounds, expected at most {MAX_MULTIPLE}")


def _narrowed(key: str, bound: Any) -> Any:
    """Returns a bound as a double that llguidance keeps to.

    Examples: a maximum of 2^63 - 1 becomes `MOST`, one of 2^53 + 1 becomes 2^53.
    """
    is_number = isinstance(bound, int | float) and not isinstance(bound, bool)
    is_exclusive = key.startswith("exclusive")
    if not is_number or abs(bound) < EXACT + (not is_exclusive):
        return bound
    sign = -1 if key in _UPPER else 1  # of the direction of what is allowed
    inside = float(max(-2 * MOST, min(2 * MOST, bound)))
    if is_exclusive or sign * inside < sign * bound:
        inside = math.nextafter(inside, sign * math.inf)
    inside = sign * max(sign * inside, -MOST)
    if sign * inside > MOST:
        raise ValueError(f"{key} {bound} leaves no number of less than 10^18")
    return int(inside)


# ---- objects ----


def _close(root: dict[str, Any]) -> None:
    """Adds "additionalProperties": false to the schemas that name properties, so that a model makes
    up no others. What is one part of several schemas, as below "allOf", stays open: other parts may
    name further properties of the same object."""
    found: dict[int, dict[str, Any]] = {}
    parts, waiting, seen = set[int](), [(root, False)], set[tuple[int, bool]]()
    references = References(root)
    while waiting:
        schema, is_part = waiting.pop()
        if (id(schema), is_part) in seen:
            continue
        seen.add((id(schema), is_part))
        if isinstance(schema, list):
            waiting += [(each, is_part) for each in schema]
        if not isinstance(schema, dict):
            continue
        found[id(schema)] = schema
        if is_part or not _JOINING.isdisjoint(schema):
            parts.add(id(schema))
        for key, each in schema.items():
            if key in VALUES:
                continue
            is_one = key in _JOINING and (is_part or len(_COMBINED & schema.keys()) > 1)
            is_alone = key == "allOf" and isinstance(each, list) and len(each) == 1
            is_one = is_one or (key in _SHARING and not is_alone)
            if key == "$ref" and isinstance(each, str):
                waiting.append((references[each], is_one))
            inner = each.values() if key in NAMED and isinstance(each, dict) else [each]
            waiting += [(one, is_one) for one in inner]
    for number, schema in found.items():
        names, required = schema.get("properties"), schema.get("required", [])
        if number in parts or not _SAYING.isdisjoint(schema):
            continue
        if not isinstance(names, dict) or not isinstance(required, list):
            continue
        if all(isinstance(name, str) and name in names for name in required):
            schema["additionalProperties"] = False


def _pattern(limits: dict[str, Any]) -> str | None:
    """Returns one pattern for a string's pattern or its lengths, None if that is not all."""
    if limits.keys() == {"pattern"} and isinstance(limits["pattern"], str):
        return limits["pattern"]
    low, high = limits.get("minLength", 0), limits.get("maxLength", "")
    if limits.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{low},{high}}}$"
    return None


# ---- references ----


class References(dict[str, Any]):
    """Holds what the references of a schema, such as "#/$defs/a", stand for, each of which is
    looked up once; None for one that is not in `root`."""

    def __init__(self, root: Any) -> None:
        super().__init__({"#": root})
        self._root = root

    def __missing__(self, reference: str) -> Any:
        target = self._root if reference.startswith("#/") else None
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal():
                target = target[int(name)] if int(name) < len(target) else None
            else:
                target = target.get(name) if isinstance(target, dict) else None
        self[reference] = target
        return target

    def resolved(self, schema: Any) -> Any:
        """Returns what the references of a schema lead to, itself if it is none."""
        for _ in range(MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str):
                return schema
            schema = self[reference]
        return None


def _objects(waiting: list[Any]) -> Iterator[dict[str, Any]]:
    """Yields each object in `waiting` and in its lists once. Whoever reads adds what is to follow
    to `waiting`."""
    seen = set[int]()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, list):
            waiting += item
        if isinstance(item, dict):
            yield item


def _endless(root: Any) -> set[str]:
    """Returns the references in use that no finite value fits: those of {"a": …} where "a" has to
    be there and refers to the same again."""
    targets = References(root)
    waiting = [root]
    for item in _objects(waiting):
        reference = item.get("$ref")
        if isinstance(reference, str):
            waiting.append(targets[reference])
        for key in _FOLLOWED:
            inner: Any = item.get(key)
            waiting += inner.values() if key in NAMED and isinstance(inner, dict) else [inner]
    order, open_ones = sorted(targets), set(targets)
    for _ in range(MAX_ROUNDS):
        num_open, known = len(open_ones), dict[int, bool]()
        for reference in order:
            if reference in open_ones and _has_value(targets[reference], open_ones, known):
                open_ones.discard(reference)
        if len(open_ones) == num_open:
            return open_ones
        order.reverse()
    return set()


def _has_value(schema: Any, open_ones: set[str], known: dict[int, bool]) -> bool:
    """Returns whether a finite value may fit a schema, if one fits each reference but these; asks
    and fills `known` by the schemas' identities."""
    if not isinstance(schema, dict):
        return True  # llguidance itself says what no value fits
    if id(schema) not in known:
        known[id(schema)] = all(
            any(_has_value(each, open_ones, known) for each in choices)
            for choices in _needs(schema, open_ones)
        )
    return known[id(schema)]


def _needs(schema: dict[str, Any], open_ones: set[str]) -> Iterator[list[Any]]:
    """Yields lists of schemas. This schema can have a value only if one schema of each list has."""
    reference, kind = schema.get("$ref"), schema.get("type")
    if isinstance(reference, str) and reference in open_ones:
        yield []
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            yield schema[key]
    if isinstance(schema.get("allOf"), list):
        yield from ([each] for each in schema["allOf"])
    properties, required = schema.get("properties", {}), schema.get("required")
    if kind == "object" and isinstance(properties, dict) and isinstance(required, list):
        more = schema.get("additionalProperties", True)
        yield from ([properties.get(name, more)] for name in required if isinstance(name, str))
    first, least = schema.get("prefixItems", []), schema.get("minItems")
    if kind == "array" and isinstance(first, list) and isinstance(least, int):
        yield from ([each] for each in first[: max(0, least)])
        if least > len(first):
            yield [schema.get("items", True)]


# ---- names that are left ----


def probes_of_names(schema: Any) -> list[str]:
    """Returns, as JSON, a schema for each object whose names are given by patterns beside others:
    an object of which '{"' can begin if the patterns leave any name but those others.

    llguidance finds out in mid-answer, after the comma, if they do not.
    """
    found, waiting = dict[str, None](), [schema]
    for item in _objects(waiting):
        if len(found) >= MAX_PROBES:
            break
        waiting += [each for key, each in item.items() if key not in VALUES]
        patterns, known = item.get("patternProperties"), item.get("properties", {})
        required = item.get("required", [])
        if not isinstance(patterns, dict):
            continue
        if isinstance(known, dict) and isinstance(required, list) and (known or required):
            probe = {
                "type": "object",
                "properties": dict.fromkeys([*known, *map(str, required)], False),
                "patternProperties": {key: each is not False for key, each in patterns.items()},
                "additionalProperties": item.get("additionalProperties", True) is not False,
            }
            found[json.dumps(probe)] = None
    return list(found)
