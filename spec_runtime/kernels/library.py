"""Finds the native library of ONNX Runtime operators, and builds it where there is none yet.

The library is C without dependencies, see native/library.c. It is taken from beside its sources,
where an installation may have put it, else from the cache folder, where the first use builds it
with the compiler of this machine or of the package ziglang. Without it, the graphs run as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from spec_runtime.errors import UserError
from spec_runtime.files.machine import cache_folder
from spec_runtime.files.mapping import brief
from spec_runtime.kernels.compiling import FLAGS, NAME, SOURCES, build

# Environment variables: which products run by the library, and the instruction set in place of the
# best one.
WANTED, INSTRUCTIONS = "SPECSPLIT_KERNELS", "SPECSPLIT_INSTRUCTIONS"
OFF, ON, ALL = "0", "1", "all"  # none; those that gain by it; also those that do not

log = logging.getLogger("spec_runtime")


def wanted() -> str:
    """Returns which products shall run by the library: OFF, ON or ALL."""
    value = os.environ.get(WANTED) or OFF
    if value not in (OFF, ON, ALL):
        raise UserError(f"got {WANTED}={value!r:.40}, expected {OFF}, {ON} or {ALL}")
    return value


def instructions() -> str | None:
    """Returns the name of the instruction set that is asked for, None for the best one."""
    return os.environ.get(INSTRUCTIONS)


@cache
def library() -> Path | None:
    """Returns the library's file, built if need be; None, with one line in the log, without one."""
    installed = SOURCES / NAME
    if installed.is_file():
        return installed
    sources = sorted(SOURCES.glob("*.[ch]"))
    text = b"".join(path.read_bytes() for path in sources) + " ".join(FLAGS).encode()
    name = f"{hashlib.sha256(text).hexdigest()[:24]}-{platform.machine()}"
    built = cache_folder() / "kernels" / name / NAME
    try:
        if not built.is_file():
            build(built)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("the native operators are not used: %s", brief(reason))
        return None
    return built


@cache
def instruction_sets(path: Path) -> tuple[str, ...]:
    """Returns the names of the instruction sets that library and CPU have, best first."""
    loaded = ctypes.CDLL(str(path))
    loaded.specsplit_instructions.restype = ctypes.c_char_p
    return tuple(loaded.specsplit_instructions().decode().split())
