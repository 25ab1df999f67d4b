"""Keeps glibc from giving big blocks back to the system.

Fresh pages for every activation would cost half of a training step on a CPU.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>


def keep_big_blocks() -> None:
    """Makes glibc serve blocks of up to 1 GiB from its heap and never trim the heap.

    Does nothing where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
