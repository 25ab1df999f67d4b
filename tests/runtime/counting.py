"""Counts the work of a function, so that tests need no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls_in(function: Callable[[], Any], counts: list[int] | None = None) -> int:
    """Returns how many functions one calls, those in C too; `counts` always holds the last sum."""
    counted = [0] if counts is None else counts

    def see(frame: Any, event: str, argument: Any) -> None:
        counted[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return counted[0]
