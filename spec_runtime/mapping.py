"""Builds frozen dataclasses from the mappings that JSON and TOML files hold, and writes them back.

Manifests, machine profiles, recipes and drafters' configs are all read here, so that all of them
refuse an unknown key, a missing key and a value of another type in the same words:

    manifest.target: got unknown key 'window'; expected keys name, dims, precision
    recipe.toml [train].epochs: got str '2', expected float or absent
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from spec_runtime.errors import UserError

T = TypeVar("T")

MAX_DEPTH = 100  # of lists and mappings in each other; ours have fewer than ten

_LEFT_OUT = "left out where it has its default"
_UNIONS = (typing.Union, types.UnionType)


def parse_json(text: str | bytes) -> Any:
    """Returns what a JSON text says; bytes are UTF-8.

    Raises ValueError for anything that is not JSON of a sensible depth, for numbers that are not
    finite ("NaN", "1e999"), and for half a surrogate pair ("\\ud800"), which no file and no
    tokenizer can take.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        _require_shallow(value)
        if "\\ud" in text.lower() or not text.isascii():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise UnicodeError("it holds half a surrogate pair, which is no character") from None
    return value


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Returns what a TOML text says; bytes are UTF-8.

    Raises ValueError for anything that is not TOML of a sensible depth.
    """
    try:
        value = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    _require_shallow(value)
    return value


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise UserError(f"it holds {number[:20]}, expected finite numbers")
    return value


def _require_shallow(value: Any) -> None:
    """Raises ValueError if lists and mappings lie deeper in each other than MAX_DEPTH."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for each in items for item in each if isinstance(item, dict | list)]
        if not level:
            return
    raise UserError("it is nested too deeply")


def brief(data: object, limit: int = 300) -> str:
    """Returns the text of `data` as a message quotes it: one line of at most `limit` characters,
    with control characters as escapes. An error of a library and a stranger's name need it."""
    text = " ".join(str(data).split())
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def added_later(default: Any) -> Any:
    """Declares a dataclass field that came to a file's schema later.

    `to_json` leaves such a field out where it has its default, so that older readers still
    understand the file.
    """
    return dataclasses.field(default=default, metadata={_LEFT_OUT: True})


def from_mapping(
    cls: type[T], data: Any, where: str, error: type[UserError] = UserError, none: str = "null"
) -> T:
    """Returns the dataclass `cls` with the values of the mapping `data`.

    Field types may be bool, int, float, str, Literal, tuple, list, dict, Any, other dataclasses and
    unions of these, with None among them. Lists become tuples and integers become floats where the
    field is one. A field with a default may be missing.

    `where` names the mapping in messages: `where.key` is one of its values. `none` is what a
    message calls None, which TOML cannot say.

    Raises `error` on an unknown or missing key (naming those expected), on a value of another type,
    and on a value that a class itself refuses with a ValueError. An `error` that a class raises
    itself is passed on unchanged.
    """
    return _Parser(error, none).build(cls, data, where)


def check_keys(
    given: Collection[str],
    known: Collection[str],
    required: Collection[str],
    where: str,
    error: type[UserError],
) -> None:
    """Raises `error` if a given key is not known or a required one is not given."""
    wrong = [f"unknown key {key!r:.60}" for key in given if key not in known]
    wrong += [f"missing key {key!r}" for key in required if key not in given]
    if wrong:
        wrong = [*wrong[:8], *([f"{len(wrong) - 8} more"] if len(wrong) > 8 else [])]
        raise error(f"{where}: got {brief(', '.join(wrong))}; expected keys {', '.join(known)}")


def to_json(value: Any) -> Any:
    """Returns dataclasses and tuples as plain dicts and lists, ready for `json`.

    A field declared with `added_later` is left out where it has its default. A dataclass Point(x=1,
    ids=(2, 3)) becomes {"x": 1, "ids": [2, 3]}.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {
            field.name: to_json(item)
            for field, item in fields
            if not (_LEFT_OUT in field.metadata and item == field.default)
        }
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


class _Unfit(Exception):
    """The value is not of the kind that its annotation asks for."""


@dataclass(frozen=True)
class _Parser:
    """Builds dataclasses; `error` and `none` as in `from_mapping`."""

    error: type[UserError]
    none: str

    def build(self, cls: type[T], data: Any, where: str) -> T:
        """Returns the dataclass `cls` from `data`; raises `error` unless `data` fits."""
        if not isinstance(data, Mapping):
            raise self.error(f"{where}: got {_shown(data)}, expected a mapping")
        fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
        required = [name for name, field in fields.items() if _has_no_default(field)]
        check_keys(data, fields, required, where, self.error)
        hints = typing.get_type_hints(cls)
        values = {
            key: self.convert(hints[key], value, _inside(where, key)) for key, value in data.items()
        }
        try:
            return cls(**values)
        except self.error:
            raise
        except ValueError as refused:
            raise self.error(f"{where}: {brief(refused, 1000)}") from refused

    def convert(self, hint: Any, data: Any, where: str) -> Any:
        """Returns `data` as the annotation `hint` wants it; raises `error` unless it fits."""
        try:
            return self._fitted(hint, data, where)
        except _Unfit:
            expected = self._name(hint)
            raise self.error(f"{where}: got {_shown(data)}, expected {expected}") from None

    def _fitted(self, hint: Any, data: Any, where: str) -> Any:
        """Does what `convert` does, but raises _Unfit if `data` itself is of another kind."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return data
        if origin in _UNIONS:
            return self._one_of(arguments, data, where)
        if origin is Literal:
            if any(type(data) is type(option) and data == option for option in arguments):
                return data
            raise _Unfit
        if dataclasses.is_dataclass(hint):
            if not isinstance(data, Mapping):
                raise _Unfit
            return self.build(typing.cast(type, hint), data, where)
        if (origin or hint) in (tuple, list):
            return self._sequence(origin or hint, arguments, data, where)
        if (origin or hint) is dict:
            if not isinstance(data, Mapping):
                raise _Unfit
            of_key, of_value = arguments or (Any, Any)
            return {
                self.convert(of_key, key, where): self.convert(of_value, item, _inside(where, key))
                for key, item in data.items()
            }
        if hint is float and type(data) is int and abs(data) < 2**1023:
            return float(data)
        if hint is float and type(data) is float and not math.isfinite(data):
            raise _Unfit
        if type(data) is hint:  # exactly, so that true is not an integer
            return data
        raise _Unfit

    def _sequence(self, kind: type, arguments: tuple[Any, ...], data: Any, where: str) -> Any:
        """Returns a list as a tuple or list of converted items."""
        if not isinstance(data, list | tuple):
            raise _Unfit
        if not arguments:
            return kind(data)
        if kind is list or arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(data)
        if len(arguments) != len(data):
            raise _Unfit
        pairs = enumerate(zip(arguments, data, strict=True))
        return kind(self.convert(hint, item, f"{where}[{i}]") for i, (hint, item) in pairs)

    def _one_of(self, options: tuple[Any, ...], data: Any, where: str) -> Any:
        """Returns `data` as the first option that it fits.

        Its own type comes first: `int | float` leaves 3 an integer in whichever order it is
        written. A list with a wrong item is an error at that item.
        """
        if data is None and type(None) in options:
            return None
        inside: UserError | None = None
        for option in sorted(options, key=lambda option: option is not type(data)):
            try:
                return self._fitted(option, data, where)
            except _Unfit:
                continue
            except self.error as wrong:
                inside = inside or wrong
        raise inside or _Unfit

    def _name(self, hint: Any) -> str:
        """Returns what a message calls the annotation `hint`: "int or absent", "a list of str"."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is type(None):
            return self.none
        if origin in _UNIONS:
            return " or ".join(self._name(option) for option in arguments)
        if origin is Literal:
            return "one of " + ", ".join(repr(option) for option in arguments)
        if origin in (tuple, list):
            if origin is list or arguments[-1] is Ellipsis:
                return f"a list of {self._name(arguments[0])}"
            return "[" + ", ".join(self._name(option) for option in arguments) + "]"
        if dataclasses.is_dataclass(hint) or (origin or hint) is dict:
            return "a mapping"
        return getattr(hint, "__name__", str(hint))


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _inside(where: str, key: Any) -> str:
    """Returns what a message calls the value of `key`: "manifest.name", or, where a terminal would
    not print the key as it is, "manifest['a\\nb']"."""
    is_plain = isinstance(key, str) and key.isprintable() and len(key) <= 60
    return f"{where}.{key}" if is_plain else f"{where}[{key!r:.60}]"


def _shown(data: Any) -> str:
    """Returns what a message calls a value: "str 'one'", "list [0.9]", "null"."""
    if data is None:
        return "null"
    if isinstance(data, int) and data.bit_length() > 128:  # Python prints no number of any length
        return f"int of {data.bit_length()} bits"
    return f"{type(data).__name__} {data!r:.40}"
