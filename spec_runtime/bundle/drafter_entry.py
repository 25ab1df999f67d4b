"""Checks what a manifest says about a drafter: its config, as proposers read it, and its trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST = 1024  # levels, masks, candidates or nodes: no machine verifies more at once
_LARGEST_ID = 2**31 - 1

_Check = tuple[Callable[[Any], bool], str]


def _is_count(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _count(least: int, most: int = MOST) -> _Check:
    return lambda value: _is_count(value, least, most), f"an integer from {least} to {most}"


def _optional_text(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable() and len(value) <= 100)


def _is_list_of_layers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        _is_count(each, 0, _LARGEST_ID) for each in value
    )


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


# What the runtime reads of a drafter's config and trees, by key. Other keys of a config are the
# drafter's own affair; other keys of trees are checked where the budget is made.
_CONFIG: dict[str, _Check] = {
    "num_guesses": _count(1),
    "num_masks": _count(0),
    "max_width": _count(1),
    "top_k": _count(1, _LARGEST_ID),
    "mask_token_base": _count(0, _LARGEST_ID),
    "taps": (_is_list_of_layers, "a list of layers"),
    "inputs": (_optional_text, "a text"),
    "mask_feature": (_optional_text, "a text or null"),
    "mask_reads_token": (lambda value: type(value) is bool, "true or false"),
    "markov_rank": _count(0, _LARGEST_ID),
    "parameters": _count(0, 2**63),
}
_TREES: dict[str, _Check] = {
    "max_nodes": _count(1, _LARGEST_ID),  # the scratch limits them, which is said where it is known
    "min_probability": (_is_share, "a number from 0 to 1"),
}


def config_fault(config: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with a drafter's config, None if nothing is."""
    return _fault("config", config, _CONFIG)


def trees_fault(trees: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with the sizes of a drafter's trees, None if nothing is."""
    return _fault("trees", trees, _TREES)


def _fault(where: str, values: Mapping[str, Any], checks: Mapping[str, _Check]) -> str | None:
    for key, (is_right, expected) in checks.items():
        if key in values and not is_right(values[key]):
            return f"got {where} key {key} {values[key]!r:.60}, expected {expected}"
    return None
