"""Compiles the native library. Imports the standard library only, for installations run it."""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared"]
FLAGS += ["-fvisibility=hidden", "-g0"]
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 1200.0  # a minute of a quick CPU, which others may be busy on
UNFINISHED = "building-"  # what the folder of an unfinished build is called, before random letters
# The environment variable that says which graphs have native operators; also read by installations.
WANTED, OFF = "SPECSPLIT_KERNELS", "0"


def file_name() -> str:
    """Returns the library's file name, which has the hash of all that it is made from."""
    sources = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
    digest = hashlib.sha256(sources + " ".join(FLAGS).encode()).hexdigest()[:16]
    return f"specsplit-{digest}-{platform.machine()}.so"


def build(target: Path) -> None:
    """Compiles the library to the file `target`.

    Raises OSError if there is no compiler, and subprocess.SubprocessError if it fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=target.parent) as folder:
        made = Path(folder) / target.name
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        command = [*compiler(), *FLAGS, "-o", str(made), *sources, "-lm"]
        places = dict.fromkeys(("TMPDIR", "ZIG_GLOBAL_CACHE_DIR"), folder)
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            env=os.environ | places,
        )
        os.replace(made, target)


def compiler() -> list[str]:
    """Returns the command of a C compiler. Raises OSError if this machine has none, or nobody wants
    the library."""
    if os.environ.get(WANTED) == OFF:
        raise OSError(f"{WANTED} is {OFF}")
    if sys.platform == "win32":
        raise OSError("they are not built on Windows")
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    if importlib.util.find_spec("ziglang"):
        oldest = ["-target", f"{platform.machine()}-linux-gnu.2.17"]
        return [sys.executable, "-m", "ziglang", "cc", *(oldest if sys.platform == "linux" else [])]
    raise OSError(f"there is no C compiler: install one or ziglang, or set {WANTED}={OFF}")


def is_portable() -> bool:
    """Returns whether what `compiler` makes runs on every Linux of this architecture."""
    return sys.platform == "linux" and "ziglang" in compiler()


def required() -> list[str]:
    """Returns the packages that a build here needs for `compiler` to find one."""
    machines = {"linux": ("x86_64", "aarch64"), "darwin": ("x86_64", "arm64")}
    is_served = platform.machine() in machines.get(sys.platform, ())
    is_served = is_served and os.environ.get(WANTED) != OFF
    return ["ziglang>=0.17"] if is_served and not any(map(shutil.which, COMPILERS)) else []
