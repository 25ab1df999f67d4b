"""Changes JSON documents, texts and bytes as hostile hands do.

Changes are JSON values themselves, drawn by the strategies below and made by the functions. Long
and deep values are written down briefly: {"$": "repeat", "text": "ab", "times": 3} is "ababab" and
{"$": "nest", "depth": 2} is [[]].
"""

import copy
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SHOWY = (
    "",
    " ",
    "\x00",
    "a\nb",
    "\x1b[31mred\x1b]0;title\x07",
    "[/b]",
    "[red]x",
    "{{ x }}",
    "../outside",
    "/etc/passwd",
    "a/../../b",
    "\ud800",
    "\u2028",
    "\ufeff",
    "\u202eevil",
    "NaN",
    "none",
    "cafe\u0301 😀",
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 8, 31, 255, 256, 257, 258, 1000, 2**15, 2**31 - 1, 2**31, 2**32, -(2**31)),
    *(2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -1.5, 1e-3, 1e-6, 1e-30, 1e-40, 5e-324, 1e30, 1e300, 1.7e308),
    *(float("nan"), float("inf"), float("-inf")),
)


def texts(max_size: int = 12) -> SearchStrategy[str]:
    """Draws strings of all characters, halves of surrogate pairs among them."""
    return st.one_of(
        st.sampled_from(SHOWY),
        st.text(st.characters(codec="ascii"), max_size=max_size),
        st.text(st.characters(exclude_categories=()), max_size=max_size),
    )


def numbers() -> SearchStrategy[int | float]:
    """Draws whole and fractional numbers, the extremes and those that are none."""
    return st.one_of(
        st.sampled_from(NUMBERS), st.integers(-5, 300), st.integers(), st.floats(), st.floats(0, 2)
    )


def long_values() -> SearchStrategy[dict[str, Any]]:
    """Draws values that `expand` makes long or deep."""
    repeated = st.fixed_dictionaries(
        {
            "$": st.just("repeat"),
            "text": st.sampled_from(("a", "ab ", "\x00", "[", "é", "\u2028")),
            "times": st.sampled_from((100, 5_000, 100_000)),
        }
    )
    nested = st.fixed_dictionaries(
        {"$": st.just("nest"), "depth": st.sampled_from((3, 60, 500, 3_000, 100_000))}
    )
    return repeated | nested


def values() -> SearchStrategy[Any]:
    """Draws JSON values of all types."""
    leaves = st.one_of(st.none(), st.booleans(), numbers(), texts())
    return st.one_of(
        leaves,
        leaves,
        st.lists(leaves, max_size=4),
        st.dictionaries(texts(6), leaves, max_size=3),
        long_values(),
    )


def edits(max_size: int = 3) -> SearchStrategy[list[dict[str, Any]]]:
    """Draws changes of a JSON document, see `edited`."""
    at = st.lists(st.integers(0, 999), min_size=1, max_size=7)
    near = st.sampled_from((-2, -1, 1, 2, 10, 1000, -1000, 2**20))
    edit = st.one_of(
        st.fixed_dictionaries({"do": st.just("set"), "at": at, "value": values()}),
        st.fixed_dictionaries({"do": st.just("shift"), "at": at, "value": near}),
        st.fixed_dictionaries({"do": st.just("copy"), "at": at, "value": at}),
        st.fixed_dictionaries({"do": st.just("delete"), "at": at}),
        st.fixed_dictionaries({"do": st.just("rename"), "at": at, "value": texts(6)}),
        st.fixed_dictionaries({"do": st.just("append"), "at": at, "value": values()}),
    )
    return st.lists(edit, min_size=1, max_size=max_size)


def expand(value: Any) -> Any:
    """Returns the value with what is long and deep written out; deep ones become a _Nested."""
    if isinstance(value, dict):
        if value.get("$") == "repeat":
            return value["text"] * value["times"]
        if value.get("$") == "nest":
            return Nested(value["depth"])
        return {key: expand(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item) for item in value]
    return value


class Nested(str):
    """Stands for `depth` lists in lists; as a string it is the text that `dump` writes."""

    def __new__(cls, depth: int) -> "Nested":
        return super().__new__(cls, "[" * depth + "]" * depth)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Nested":
        return self


def dump(document: Any) -> str:
    """Returns the document as JSON, Nested values as real lists in lists."""
    held: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Nested):
            held.append(value)
            return f"@nested{len(held) - 1}@"
        if isinstance(value, dict):
            return {key: marked(item) for key, item in value.items()}
        return [marked(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(marked(document))
    for number, nested in enumerate(held):
        text = text.replace(f'"@nested{number}@"', str(nested))
    return text


def place(document: Any, at: list[Any]) -> list[Any]:
    """Returns the path of a value: each item of `at` chooses a child, one level deeper each.

    Numbers count round, names are keys, and the path ends at a value without children: in
    {"a": 1, "b": [2, 3]} [1, 3] and ["b", 1] are ["b", 1], [3] is ["b"], and [0, 5] is ["a"].
    """
    path: list[Any] = []
    for number in at:
        if not isinstance(document, dict | list) or not document:
            break
        keys = list(document) if isinstance(document, dict) else range(len(document))
        if isinstance(number, str):
            if number not in keys:
                break
            path.append(number)
        else:
            path.append(keys[number % len(keys)])
        document = document[path[-1]]
    return path


def edited(document: Any, changes: list[dict[str, Any]]) -> Any:
    """Returns a copy of the document with the changes made at their places, see `place`.

    set: another value. shift: a number plus some. copy: another value of the document. delete,
    rename a key, append to a list (or add a key).
    """
    result = copy.deepcopy(document)
    for change in changes:
        path = place(result, change["at"])
        if path:
            parent = result
            for key in path[:-1]:
                parent = parent[key]
            _change(result, parent, path[-1], change)
    return result


def _change(document: Any, parent: Any, key: Any, change: dict[str, Any]) -> None:
    do, old = change["do"], parent[key]
    if do == "delete":
        del parent[key]
    elif do == "shift":
        is_number = isinstance(old, int | float) and not isinstance(old, bool)
        parent[key] = old + change["value"] if is_number else change["value"]
    elif do == "copy":
        value = document
        for step in place(document, change["value"]):
            value = value[step]
        parent[key] = copy.deepcopy(value)
    elif do == "rename" and isinstance(parent, dict):
        parent[change["value"]] = parent.pop(key)
    elif do == "append" and isinstance(old, list):
        old.append(expand(change["value"]))
    elif do == "append" and isinstance(old, dict):
        old["added"] = expand(change["value"])
    else:
        parent[key] = expand(change["value"])


def damages() -> SearchStrategy[list[dict[str, Any]]]:
    """Draws changes of a file's bytes, see `damaged`. Places are shares of 2²⁴, so that they fall
    anywhere in a file of any length."""
    at = st.integers(0, 2**24 - 1) | st.sampled_from((0, 1, 2**24 - 1))
    size = st.sampled_from((1, 4, 8, 64, 1000))
    damage = st.one_of(
        st.fixed_dictionaries({"do": st.just("flip"), "at": at, "bit": st.integers(0, 7)}),
        st.fixed_dictionaries({"do": st.just("cut"), "at": at}),
        st.fixed_dictionaries({"do": st.just("zero"), "at": at, "size": size}),
        st.fixed_dictionaries({"do": st.just("ones"), "at": at, "size": size}),
        st.fixed_dictionaries({"do": st.just("swap"), "at": at, "to": at, "size": size}),
        st.fixed_dictionaries({"do": st.just("drop"), "at": at, "size": size}),
        st.fixed_dictionaries(
            {"do": st.just("insert"), "at": at, "text": st.binary(max_size=9).map(bytes.hex)}
        ),
    )
    return st.lists(damage, min_size=1, max_size=3)


def damaged(content: bytes, changes: list[dict[str, Any]]) -> bytes:
    """Returns the bytes with the changes made: one bit flipped, the end cut off, a piece zeroed,
    set to ones, swapped with another, dropped, or some bytes inserted."""
    data = bytearray(content)
    for change in changes:
        at = change["at"] * (len(data) + 1) >> 24
        end = min(len(data), at + change.get("size", 1))
        if change["do"] == "flip" and at < len(data):
            data[at] ^= 1 << change["bit"]
        elif change["do"] == "cut":
            del data[at:]
        elif change["do"] in ("zero", "ones"):
            data[at:end] = bytes([255 * (change["do"] == "ones")]) * (end - at)
        elif change["do"] == "swap":
            to = min(change["to"] * (len(data) + 1) >> 24, len(data) - (end - at))
            data[at:end], data[to : to + end - at] = data[to : to + end - at], data[at:end]
        elif change["do"] == "drop":
            del data[at:end]
        elif change["do"] == "insert":
            data[at:at] = bytes.fromhex(change["text"])
    return bytes(data)
