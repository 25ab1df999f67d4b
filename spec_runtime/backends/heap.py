"""Gives freed memory back to the system, which glibc would keep for later."""

from __future__ import annotations

import ctypes
import sys


def give_back_memory() -> None:
    """Asks the C library for its free pages; does nothing where it is not glibc."""
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl
        return
    trim(0)
