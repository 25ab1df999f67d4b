"""Finds the native library of ONNX Runtime operators, and builds it where there is none yet.

The library is C without dependencies, see native/library.c. An installation puts it beside its
sources. Else the first use builds it with the compiler of this machine or of the package ziglang:
there, or in the cache folder where only others may write. Its name has its sources' hash, so that
none of other sources is ever taken. Without it, the graphs run as they are.
"""

import ctypes
import logging
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from spec_runtime.errors import UserError
from spec_runtime.files.machine import cache_folder
from spec_runtime.files.mapping import brief
from spec_runtime.files.writing import holding
from spec_runtime.kernels.compiling import (
    BUILD_SECONDS,
    OFF,
    SOURCES,
    UNFINISHED,
    WANTED,
    build,
    compiler,
    file_name,
)

INSTRUCTIONS = "SPECSPLIT_INSTRUCTIONS"  # the environment's choice in place of the best set
ON = "1"  # of WANTED, beside OFF

log = logging.getLogger("spec_runtime")


def is_wanted() -> bool:
    """Returns whether the library shall be used. Raises UserError if WANTED says neither."""
    value = os.environ.get(WANTED) or ON
    if value not in (OFF, ON):
        raise UserError(f"got {WANTED}={value!r:.40}, expected {OFF} or {ON}")
    return value == ON


def instructions() -> str | None:
    """Returns the name of the instruction set that native operators use here, None without them."""
    path = library() if is_wanted() else None
    if path is None:
        return None
    here = instruction_sets(path)
    name = os.environ.get(INSTRUCTIONS, here[0])
    if name not in here:
        raise UserError(
            f"got {INSTRUCTIONS}={name!r:.40}, expected {' or '.join(here)} on this CPU"
        )
    return name


@cache
def library() -> Path | None:
    """Returns the library's file, built if need be; None, with one line in the log, without one."""
    made = SOURCES / file_name()
    try:
        if not made.is_file() and not os.access(SOURCES, os.W_OK):
            made = cache_folder() / "kernels" / made.name
        if not made.is_file():
            compiler()  # or nothing is said of compiling
            _build_once(made)
        instruction_sets(made)  # it can be loaded
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("the native operators are not used: %s", brief(reason))
        return None
    return made


def _build_once(made: Path) -> None:
    """Builds the library unless another process does, which is waited for, and removes what a build
    that was killed has left."""
    made.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = made.parent / "building.lock"
    with holding(lock, BUILD_SECONDS) as has_lock:
        if not made.is_file():
            for left in made.parent.glob(f"{UNFINISHED}*") if has_lock else ():
                shutil.rmtree(left)
            log.info("compiling the native operators, once on this machine")
            build(made)
        lock.unlink(missing_ok=True)


@cache
def instruction_sets(path: Path) -> tuple[str, ...]:
    """Returns the names of the instruction sets that library and CPU have, best first."""
    loaded = ctypes.CDLL(str(path))
    loaded.specsplit_instructions.restype = ctypes.c_char_p
    return tuple(loaded.specsplit_instructions().decode().split())
