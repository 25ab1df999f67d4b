"""Keep glibc from giving big blocks back to the system: fresh pages for every activation cost half
of a CPU step."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>


def keep_big_blocks() -> None:
    """Serve blocks up to 1 GiB from the heap and never trim it; does nothing where there is no
    glibc."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
