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
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from spec_runtime.errors import UserError
from spec_runtime.options import meant_by, require_known

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import SchemaValidator

T = TypeVar("T")

MAX_DEPTH = 100  # of lists and mappings in each other; ours have fewer than ten
MAX_KEYS = 100_000  # of a mapping whose values are checked
MAX_INTEGER = 2**63 - 1  # what arrays and random generators can hold

_LEFT_OUT = "left out where it has its default"


def parse_json(text: str | bytes) -> Any:
    """Returns what a JSON text says; bytes are UTF-8. A byte order mark is no part of the text.

    Raises UserError for anything that is not JSON of a sensible depth, for numbers that are not
    finite ("NaN", "1e999"), and for half a surrogate pair ("\\ud800"), which no file and no
    tokenizer can take.
    """
    try:
        text = _text(text)
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
    """Returns what a TOML text says; bytes are UTF-8. A byte order mark is no part of the text.

    Raises UserError for anything that is not TOML of a sensible depth, and for numbers that are
    not finite.
    """
    try:
        value = tomllib.loads(_text(text), parse_float=_finite)
    except RecursionError:
        raise UserError("it is nested too deeply") from None
    _require_shallow(value)
    return value


def _text(text: str | bytes) -> str:
    """Returns a file's text without the byte order mark that editors on Windows put before it."""
    return (text.decode() if isinstance(text, bytes) else text).removeprefix("\ufeff")


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise UserError(f"it holds {number[:20]}, expected finite numbers")
    return value


def _require_shallow(value: Any) -> None:
    """Raises UserError if lists and mappings lie deeper in each other than MAX_DEPTH."""
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


def from_mapping(
    cls: type[T], data: Any, where: str, error: type[UserError] = UserError, none: str = "null"
) -> T:
    """Returns the dataclass `cls` with the values of the mapping `data`.

    Its annotations say what fits: types, dataclasses and unions of these, and bounds such as
    `Annotated[int, Ge(1)]`. Lists become tuples and integers become floats where the field is one;
    nothing else is converted. A field with a default may be missing.

    `where` names the mapping in messages: `where.key` is one of its values. `none` is what a
    message calls None, which TOML cannot say.

    Raises `error` on an unknown or missing key (naming those expected), on a value of another type
    or out of bounds, and on a value that a class itself refuses with a ValueError. An `error` of a
    kind of its own that a class raises is passed on unchanged.
    """
    from pydantic import ValidationError

    try:
        return typing.cast(T, _validated(cls, data))
    except ValidationError as library_error:
        raise _refusal(data, library_error, where, error, none) from None


def require_types(kind: Any, data: Mapping[str, Any], where: str) -> None:
    """Raises UserError unless the values of a mapping fit the TypedDict `kind`.

    That is for the files of others: keys that are not declared are left alone.
    """
    from pydantic import ValidationError

    try:
        _validated(kind, data)
    except ValidationError as library_error:
        raise _refusal(data, library_error, where, UserError, "null") from None


def _refusal(
    data: Any, library_error: ValidationError, where: str, error: type[UserError], none: str
) -> Exception:
    """Returns the error about a value of the mapping `data` that does not fit."""
    fault = _fault(data, library_error, none)
    if error is not UserError and isinstance(fault.refused, error):
        return fault.refused
    if fault.refused is not None:
        return error(f"{where}{fault.place}: {brief(fault.refused, 1000)}")
    return error(f"{where}{fault.place}: got {_shown(fault.value)}, expected {fault.expected}")


@dataclass(frozen=True)
class Must:
    """Says in an annotation what a value has to be in addition to its type, by a test and in words:
    `Annotated[str, Must(str.isprintable, "printable characters")]`."""

    test: Callable[[Any], object]
    expected: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import PydanticCustomError, core_schema

        def check(value: Any) -> Any:
            if not self.test(value):
                raise PydanticCustomError("must", "{expected}", {"expected": self.expected})
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


class Checked:
    """Makes the constructor of a frozen dataclass check its fields by their annotations.

    Takes NumPy's scalars and arrays as Python's numbers and lists. Raises UserError, which names
    the field as its `param`: "got top_k 0, expected 1 or more or None"; and TypeError for an
    unknown name: "got unknown option 'max_tokens', expected max_new_tokens".
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        require_known(options, [field.name for field in dataclasses.fields(typing.cast(Any, cls))])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        from pydantic import ValidationError

        given = {name: _plain(value) for name, value in vars(self).items()}
        try:
            values = _validated(_fields_of(typing.cast(Any, type(self))), given, None)
        except ValidationError as library_error:
            fault = _fault(given, library_error, "None")
        else:
            self.__dict__.update(values)
            return
        got = f"got {fault.field} {_quoted(given[fault.field])}"
        raise UserError(f"{got}, expected {fault.expected}", param=fault.field)


def _plain(value: Any) -> Any:
    """Returns NumPy's scalars and arrays as Python's numbers and lists, also as a mapping's."""
    if isinstance(value, Mapping):
        return {_listed(key): _listed(item) for key, item in value.items()}
    return _listed(value)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _validated(kind: Any, data: Any, most: int | None = MAX_INTEGER) -> Any:
    """Returns `data` as the dataclass or TypedDict `kind`; raises pydantic's ValidationError."""
    return _validator(kind, most).validate_python([data])[0]


@cache
def _validator(kind: Any, most: int | None) -> SchemaValidator:
    """Returns what checks a list of `kind`: TypeAdapter takes no config with a dataclass itself.

    pydantic is imported here, by the first thing that is checked: it takes 50 ms.
    """
    from pydantic import ConfigDict, TypeAdapter
    from pydantic_core import SchemaValidator

    config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
    return SchemaValidator(_strict(TypeAdapter(list[kind], config=config).core_schema, most))


@cache
def _fields_of(cls: Any) -> Any:
    """Returns the fields of a dataclass as a TypedDict."""
    from typing_extensions import TypedDict  # before Python 3.12 pydantic takes no other

    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return TypedDict("Fields", {name: hints[name] for name in names})  # type: ignore[operator]


def _strict(schema: Any, most: int | None) -> Any:
    """Returns pydantic's schema without conversions, except for lists to tuples and int to float.

    Dataclasses refuse unknown and missing keys in our words. Mappings have at most MAX_KEYS keys,
    and integers are at most `most`, where they have no other bounds.
    """
    from pydantic_core import core_schema

    if isinstance(schema, list):
        return [_strict(each, most) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = ("metadata", "default", "serialization")
    schema = {key: item if key in kept else _strict(item, most) for key, item in schema.items()}
    kind = schema.get("type")
    if kind in ("int", "float", "str", "bool"):
        schema["strict"] = True
    if kind == "int" and most is not None:
        schema = {"ge": -most, "le": most} | schema
    if kind in ("list", "tuple"):
        schema["fail_fast"] = True
    if kind == "nullable":  # as a union, so that a message says that None is allowed
        return core_schema.union_schema([schema["schema"], core_schema.none_schema()])
    if kind == "dict":
        return core_schema.no_info_before_validator_function(_require_few, schema)
    if kind == "dataclass":
        reference = schema.pop("ref", None)
        check = partial(_with_keys, cls=schema["cls"])
        return core_schema.no_info_before_validator_function(check, schema, ref=reference)
    return schema


def _require_few(data: Any) -> Any:
    if isinstance(data, Mapping) and len(data) > MAX_KEYS:
        raise UserError(f"got {len(data)} keys, expected at most {MAX_KEYS}")
    return data


def _with_keys(data: Any, cls: Any) -> Any:
    """Returns `data`; raises UserError if it is a mapping and has not the keys of a dataclass."""
    if isinstance(data, Mapping):
        known = {field.name: field for field in dataclasses.fields(cls) if field.init}
        missing = dataclasses.MISSING
        required = [
            name
            for name, field in known.items()
            if field.default is missing and field.default_factory is missing
        ]
        require_keys(data, known, required)
    return data


def require_keys(
    given: Collection[str],
    known: Collection[str],
    required: Collection[str],
    where: str = "",
    error: type[UserError] = UserError,
) -> None:
    """Raises `error` if a given key is not known or a required one is not given."""
    wrong = [f"unknown key {key!r:.60}{_meant(key, known)}" for key in given if key not in known]
    wrong += [f"missing key {key!r}" for key in required if key not in given]
    if wrong:
        wrong = [*wrong[:8], *([f"{len(wrong) - 8} more"] if len(wrong) > 8 else [])]
        got = f"{where}{': ' if where else ''}got {brief(', '.join(wrong))}"
        raise error(f"{got}; expected keys {', '.join(known)}")


def _meant(key: object, known: Collection[str]) -> str:
    meant = meant_by(str(key), known)
    return f" (meant: {meant})" if meant is not None else ""


class _Fault(NamedTuple):
    """Says which value does not fit, where it is (".graphs.target", in the field "graphs"), and
    what was expected there, or by which error a class of ours refused it."""

    field: str
    place: str
    value: Any
    expected: str
    refused: Exception | None


# Says in our words what pydantic found, where its own are long.
_WORDS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "int_type": "int",
    "float_type": "float",
    "finite_number": "a finite float",
    "string_type": "str",
    "bool_type": "bool",
    "none_required": "{none}",
    "callable_type": "a function",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "missing": "more items",
    "too_short": "{min_length} or more items",
    "too_long": "at most {max_length} items",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "at most {max_length} characters",
}


def expected_by(problem: Mapping[str, Any], none: str) -> str:
    """Returns what one of pydantic's problems expected; `none` is how None is written."""
    if problem["type"] in _WORDS:
        return _WORDS[problem["type"]].format(**_numbers(problem.get("ctx", {})), none=none)
    return str(problem["msg"]).removeprefix("Input should be ")


def _fault(data: Any, error: ValidationError, none: str) -> _Fault:
    """Returns the deepest of pydantic's problems: of a list with a wrong item, the item. Where the
    alternatives of a union all refuse a value, says what each of them expected."""
    found = error.errors(include_url=False)
    problems = [(_follow([data], each["loc"]), each) for each in found]
    (place, value), problem = max(problems, key=lambda each: len(each[0][0]))
    refused = problem.get("ctx", {}).get("error")
    if isinstance(refused, AssertionError):
        raise refused
    alike = [each for (other, _), each in problems if other == place]
    words = (expected_by(each, none) for each in alike)
    if problem["loc"][-1:] == ("[key]",):
        value = problem["input"]
    *first, last = dict.fromkeys(words)
    expected = f"{', '.join(first)} or {last}" if first else last
    field = str(problem["loc"][1]) if problem["loc"][1:] else ""
    return _Fault(field, "".join(place[1:]), value, expected, refused)


def _numbers(context: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bounds as messages write them: 1e+09 rather than 1000000000.0."""
    return {key: f"{x:g}" if isinstance(x, float) else x for key, x in context.items()}


def _follow(data: Any, loc: Sequence[Any]) -> tuple[list[str], Any]:
    """Follows a place as far as the data has it: pydantic's names of a union's alternatives are
    skipped. Returns the parts, as messages write them, and the value there."""
    place = []
    for part in loc[:-2] if loc[-1:] == ("[key]",) else loc:
        is_item = isinstance(part, int) and isinstance(data, list | tuple) and part < len(data)
        if is_item or (isinstance(data, Mapping) and part in data):
            data = data[part]
            place.append(f"[{part}]" if is_item else _key(part))
    return place, data


def _key(key: Any) -> str:
    """Returns what a message calls the place of `key`: ".name", or, where a terminal would not
    print the key as it is, "['a\\nb']"."""
    is_plain = isinstance(key, str) and key.isprintable() and len(key) <= 60
    return f".{key}" if is_plain else f"[{key!r:.60}]"


def _shown(data: Any) -> str:
    """Returns what a message calls a value: "str 'one'", "list [0.9]", "null"."""
    if data is None:
        return "null"
    if isinstance(data, int) and data.bit_length() > 128:
        return f"int of {data.bit_length()} bits"
    return f"{type(data).__name__} {data!r:.40}"


def _quoted(value: Any) -> str:
    """Returns an argument as a message quotes it: on one line, and not long."""
    try:
        return brief(repr(value), 60)
    except ValueError:  # Python prints no integer of any length
        return f"{type(value).__name__} that is too large to print"
