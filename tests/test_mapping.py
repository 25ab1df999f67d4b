"""Dataclasses from mappings and back: what is converted, what is refused and in which words."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, MinLen

from spec_runtime.errors import UserError
from spec_runtime.files import mapping
from spec_runtime.files.mapping import (
    Checked,
    Must,
    added_later,
    brief,
    from_mapping,
    parse_json,
    parse_toml,
    to_json,
)


class Refused(UserError):
    """The error class of a caller."""


@dataclass(frozen=True)
class Leaf:
    size: int
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"got size {self.size}, expected 0 or more")
        if self.size > 9:
            raise Refused(f"leaf: got size {self.size}, expected at most 9")


@dataclass(frozen=True)
class Branch:
    name: str
    leaves: dict[str, Leaf]
    first: Leaf | None
    pairs: tuple[tuple[int, float], ...] = ()
    kind: Literal["a", 1] = "a"
    limit: float | int | None = None
    paths: str | tuple[str, ...] = ()
    words: list[str] = field(default_factory=list)
    anything: Any = None
    newer: str = added_later("none")


DATA: dict[str, Any] = {
    "name": "oak",
    "leaves": {"left": {"size": 2, "ratio": 3}},
    "first": None,
    "pairs": [[1, 2]],
    "limit": 3,
    "paths": ["x", "y"],
    "anything": {"free": [1]},
}


def test_json_becomes_dataclasses_and_back() -> None:
    got = from_mapping(Branch, DATA, "tree")
    assert got.leaves == {"left": Leaf(2, 3.0)}
    assert got.pairs == ((1, 2.0),)
    assert [type(x) for x in (got.limit, got.pairs[0][1], got.leaves["left"].ratio)] == [
        int,
        float,
        float,
    ]
    assert (got.paths, got.words, got.newer) == (("x", "y"), [], "none")
    written = to_json(got)
    assert json.loads(json.dumps(written)) == written
    assert "newer" not in written
    assert written["limit"] == 3
    assert from_mapping(Branch, written, "tree") == got
    assert to_json(from_mapping(Branch, DATA | {"newer": "x"}, "tree"))["newer"] == "x"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": None}, "tree.name: got null, expected str"),
        ({"name": 5}, "tree.name: got int 5, expected str"),
        ({"leaves": []}, "tree.leaves: got list [], expected a mapping"),
        ({"leaves": {"up": 1}}, "tree.leaves.up: got int 1, expected a mapping"),
        ({"leaves": {"up": {}}}, "tree.leaves.up: got missing key 'size'; expected keys size, rat"),
        (
            {"first": {"size": 1, "age": 2, "colour": 3}},
            "tree.first: got unknown key 'age', unknown key 'colour'; expected keys size, ratio",
        ),
        ({"first": {"size": True}}, "tree.first.size: got bool True, expected int"),
        ({"first": {"size": -1}}, "tree.first: got size -1, expected 0 or more"),
        ({"first": {"size": 10}}, "leaf: got size 10, expected at most 9"),
        ({"first": 3}, "tree.first: got int 3, expected a mapping or null"),
        ({"pairs": [[1, 2], [1]]}, "tree.pairs[1]: got list [1], expected more items"),
        ({"pairs": [[1, "2"]]}, "tree.pairs[0][1]: got str '2', expected float"),
        ({"pairs": [[1, 2, 3]]}, "tree.pairs[0]: got list [1, 2, 3], expected at most 2 items"),
        ({"pairs": 1}, "tree.pairs: got int 1, expected a list"),
        ({"kind": "b"}, "tree.kind: got str 'b', expected 'a' or 1"),
        ({"limit": "3"}, "tree.limit: got str '3', expected float, int or null"),
        ({"paths": ["x", 2]}, "tree.paths[1]: got int 2, expected str"),
        ({"words": "ab"}, "tree.words: got str 'ab', expected a list"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as caught:
        from_mapping(Branch, DATA | changed, "tree", Refused)
    assert str(caught.value).startswith(message)


def test_a_mapping_is_expected() -> None:
    with pytest.raises(ValueError, match=r"tree: got list \[\], expected a mapping"):
        from_mapping(Leaf, [], "tree")
    with pytest.raises(Refused, match="expected a mapping or absent"):
        from_mapping(Branch, DATA | {"first": 3}, "tree", Refused, none="absent")


@dataclass(frozen=True)
class Bounded(Checked):
    count: Annotated[int, Ge(1), Le(9)] = 1
    share: Annotated[float | None, Gt(0)] = None
    names: Annotated[tuple[str, ...] | list[str], MinLen(1)] = ("a",)
    word: Annotated[str, Must(str.isprintable, "printable characters")] = "x"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 0, "1 or more"),
        ("count", 10, "at most 9"),
        ("count", True, "int"),
        ("share", 0.0, "more than 0 or None"),
        ("share", "1", "float or None"),
        ("names", (), "1 or more items"),
        ("word", "\n", "printable characters"),
    ],
)
def test_bounds_hold_for_constructors_and_mappings(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        Bounded(**{name: value})
    assert str(caught.value) == f"got {name} {value!r}, expected {expected}"
    assert caught.value.param == name
    with pytest.raises(Refused, match=f"^top.{name}: got .*, expected {expected}$"):
        from_mapping(Bounded, {name: value}, "top", Refused, none="None")


def test_an_integer_that_cannot_be_printed_is_refused() -> None:
    with pytest.raises(UserError, match="got count int that is too large to print, expected at m"):
        Bounded(10**5000)


def test_constructors_take_numpys_numbers() -> None:
    got = Bounded(np.int32(3), np.float32(0.5), np.array(["a", "b"]))  # type: ignore[arg-type]
    assert got == Bounded(3, 0.5, ["a", "b"])
    assert [type(got.count), type(got.share)] == [int, float]


def test_a_mapping_of_too_many_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MAX_KEYS", 2)
    with pytest.raises(UserError, match=r"^top\.words: got 3 keys, expected at most 2$"):
        from_mapping(Numbers, {"words": dict.fromkeys("abc", 1)}, "top")


@dataclass(frozen=True)
class Numbers:
    ratio: float = 1.0
    words: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "it holds NaN, expected finite numbers"),
        ('{"a": [-Infinity]}', "it holds -Infinity, expected finite"),
        ('{"a": 1e999}', "it holds 1e999, expected finite"),
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"\\ud800": 1}', "half a surrogate pair"),
        ("9" * 5000, "limit"),
    ],
)
def test_json_that_nothing_can_be_done_with(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_json_of_a_sensible_depth_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100) is not None
    assert parse_json(b'{"a": [1, 2.5, "\\ud83d\\ude00"]}') == {"a": [1, 2.5, "😀"]}
    assert parse_json("3") == 3


def test_a_byte_order_mark_is_no_part_of_a_text() -> None:
    for text in ('\ufeff{"a": "\ufeff"}', '\ufeff{"a": "\ufeff"}'.encode()):
        assert parse_json(text) == {"a": "\ufeff"}
    for text in ('\ufeffa = "\ufeff"', '\ufeffa = "\ufeff"'.encode()):
        assert parse_toml(text) == {"a": "\ufeff"}


@pytest.mark.parametrize("text", ["a = " + "[" * 101 + "]" * 101, ".".join("a" * 200) + " = 1"])
def test_toml_that_is_nested_too_deeply(text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"ratio": 10**400}, r"^top\.ratio: got int of 1329 bits, expected float$"),
        ({"ratio": float("inf")}, r"^top\.ratio: got float inf, expected a finite float$"),
        ({"ratio": float("nan")}, r"^top\.ratio: got float nan, expected a finite float$"),
        ({"words": {"\x1b[31m": "x"}}, r"^top\.words\['\\x1b\[31m'\]: got str 'x', expected int$"),
        ({"words": {5: 1}}, r"^top\.words: got int 5, expected str$"),
        ({5: 1}, r"^top: got unknown key 5; expected keys ratio, words$"),
        ({"x" * 9999: 1}, r"^top: got unknown key 'x{59}; expected keys"),
        ({str(i): 1 for i in range(99)}, r"'7', 91 more; expected keys ratio, words$"),
    ],
)
def test_messages_of_hostile_values_are_short_and_printable(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        from_mapping(Numbers, data, "top")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_foreign_text_is_quoted_in_one_short_line() -> None:
    assert brief("one\n  two\tthree") == "one two three"
    assert brief("red \x1b[31m\u202e \x0b") == "red \\x1b[31m\\u202e"
    assert brief("x" * 400) == "x" * 299 + "…"
    assert brief(ValueError("x" * 9), 5) == "xxxx…"
