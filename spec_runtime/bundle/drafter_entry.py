"""Declares what the runtime reads of a manifest's drafter: keys of its config and of its trees."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen

from spec_runtime.errors import UserError
from spec_runtime.files.mapping import Must, from_mapping

MOST = 1024  # levels, masks, candidates or nodes: no machine verifies more at once
_LARGEST_ID = 2**31 - 1

_Count = Annotated[int, Ge(0), Le(MOST)]
_AtLeastOne = Annotated[int, Ge(1), Le(MOST)]
_Id = Annotated[int, Ge(0), Le(_LARGEST_ID)]
_Share = Annotated[float, Ge(0), Le(1)]
_AtLeastZero = Annotated[float, Ge(0)]
_Text = Annotated[str, MaxLen(100), Must(str.isprintable, "a printable text")]


@dataclass(frozen=True)
class KnownConfig:
    """Holds what the runtime reads of a drafter's config; other keys are the drafter's own affair.

    The defaults only say that a key may be missing.
    """

    num_guesses: _AtLeastOne = 1
    num_masks: _Count = 0
    block_size: _Count = 0
    first_row: _Count = 0
    max_width: _AtLeastOne = 1
    top_k: Annotated[int, Ge(1), Le(_LARGEST_ID)] = 1
    mask_token_base: _Id = 0
    features: tuple[_Text, ...] = ()
    taps: tuple[_Id, ...] = ()  # of bundles without `features`
    inputs: _Text | None = None
    mask_feature: _Text | None = None
    parameters: Annotated[int, Ge(0), Le(2**63 - 1)] = 0


@dataclass(frozen=True)
class KnownTrees:
    """Holds the sizes of a drafter's trees; other keys are checked where the budget is made."""

    max_nodes: Annotated[int, Ge(1), Le(_LARGEST_ID)] = 1  # the scratch limits them, see Engine
    min_probability: _Share = 0.0
    lookup_nodes: _Count = 0


def _are_shares_of_one(rows: tuple[tuple[float, ...], ...]) -> bool:
    widths = {len(row) for row in rows}
    return len(widths) == 1 and 0 not in widths and all(sum(row) < 1.001 for row in rows)


@dataclass(frozen=True)
class Calibration:
    """Holds what `spec-export calibrate` found of a drafter, on `positions` of `prompts`.

    accuracy [k][r]: of the positions where the tokens before depth k + 1 were among the drafter's
    guesses, the share where the target's token at that depth was its r-th guess. reliability: rows
    of (path probability by the drafter, share of such nodes that were accepted, their number), with
    rising probability. accepted_length: by the number of nodes of a grown tree, {"16": 1.9}.
    """

    prompts: int
    positions: Annotated[int, Ge(1)]
    accuracy: Annotated[
        tuple[tuple[_Share, ...], ...],
        Must(_are_shares_of_one, "rows of equal length, of shares whose sum is at most 1"),
    ]
    reliability: Annotated[tuple[tuple[_Share, _Share, _AtLeastZero], ...], MinLen(1)]
    accepted_length: dict[Annotated[str, Must(str.isdecimal, "a number of nodes")], _AtLeastZero]
    # What older versions stored of one-pass drafters as well; nothing reads it.
    depth_scales: Any = None
    ece: Any = None


def check_known(known: type, values: Mapping[str, Any], where: str, error: type[UserError]) -> None:
    """Raises `error` if a value of a key that `known` declares does not fit."""
    names = {field.name for field in dataclasses.fields(known)}
    found = {key: value for key, value in values.items() if key in names}
    from_mapping(known, found, where, error)
