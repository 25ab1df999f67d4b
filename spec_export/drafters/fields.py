"""Names the kinds of fields that drafters' configs have, with their bounds.

A config is a frozen dataclass and `Checked`, so that its annotations are all it needs to refuse a
field that is out of bounds.
"""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from spec_runtime.files.mapping import Must

AtLeastZero = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Heads = Literal["own", "shared"]  # trained output matrices, or the target's own frozen one


def _is_empty(taps: tuple[int, ...]) -> bool:
    return not taps


NoTaps = Annotated[tuple[int, ...], Must(_is_empty, "none: it reads no target layer but the last")]
