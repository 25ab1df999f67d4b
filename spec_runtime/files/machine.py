"""Describes the machine: the CPUs that this process may use, the CPU's name, and the cache folder.

Also bounds the threads of an engine, and gives freed memory back to the system.
"""

import ctypes
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spec_runtime.errors import UserError

# By their numbers in <malloc.h>: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, in bytes.
MALLOC_BOUNDS = {-3: 4 << 20, -1: 8 << 20}
MOST_PER_CPU = 4  # threads; an engine with a hundred thousand would take the whole machine with it

log = logging.getLogger("spec_runtime")


def default_threads() -> int:
    """Returns how many threads an engine should use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    quota = cgroup_quota()
    return available if quota is None else max(1, min(available, int(quota)))


def require_threads(threads: int | None) -> None:
    """Raises UserError unless `threads` is None or from 1 to four times the CPUs."""
    if threads is None:
        return
    most = MOST_PER_CPU * default_threads()
    if type(threads) is not int or not 1 <= threads <= most:
        raise UserError(
            f"got threads {threads!r:.40}, expected 1 to {most}, four times the CPUs that this "
            "process may use, or None for as many as those",
            param="threads",
        )


def warn_of_threads(threads: int | None) -> None:
    """Warns of more threads than CPUs: they take turns, which is slower than fewer."""
    num_cpus = default_threads()
    if threads is not None and threads > num_cpus:
        log.warning(
            "%d threads share the %d CPUs that this process may use, which is slower than %d",
            threads,
            num_cpus,
            num_cpus,
        )


def cgroup_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Returns the smallest CPU quota between this process's group and the root, in CPUs.

    Returns None if there is no limit, or no Linux. Reads cgroup v2 (`cpu.max`: "150000 100000" is
    1.5) and v1 (`cpu.cfs_quota_us` over `cpu.cfs_period_us`).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        folder = base / group.lstrip("/")
        # Inside a container the path may name the host's hierarchy; the mounted root still counts.
        for candidate in (folder, *folder.parents):
            if candidate == base or base in candidate.parents:
                quotas.append(_quota(candidate))
    return min((q for q in quotas if q is not None), default=None)


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except OSError:
        return None
    if quota in ("max", "-1"):
        return None
    return int(quota) / int(period)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, on Linux with family, model and stepping, because clouds
    shorten the name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        first = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        first = ""
    pairs = [line.partition(":") for line in first.splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    found = [fields[name] for name in wanted if name in fields]
    return " ".join(found) or platform.processor() or platform.machine()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns Python's version and those of the distributions that are installed, without importing
    any of them."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def cache_folder() -> Path:
    """Returns specsplit's folder in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    return own_folder("XDG_CACHE_HOME", ".cache", "files")


def own_folder(variable: str, default: str, what: str) -> Path:
    """Returns specsplit's folder below the one that a variable names, or below a default in the
    user's home; raises UserError where both are missing, as in some containers, and says what
    would be kept there."""
    if root := os.environ.get(variable):
        return Path(root) / "specsplit"
    try:
        return Path.home() / default / "specsplit"
    except RuntimeError:
        raise UserError(
            f"got neither {variable} nor a home folder, expected one of them to keep {what} in; "
            f"set {variable} to a folder"
        ) from None


def cpu_ticks(stat: Path = Path("/proc/stat")) -> tuple[float, float]:
    """Returns the clock ticks for which other programs kept CPUs busy since the machine was
    started, and those of all CPUs, idle or not; 0 and 0 where this is no Linux."""
    try:
        ticks = [int(each) for each in stat.read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    own = os.sysconf("SC_CLK_TCK") * time.process_time()
    return sum(ticks) - sum(ticks[3:5]) - own, sum(ticks)  # 3 is idle, 4 waits for a disk


def return_big_blocks() -> None:
    """Makes the C library return blocks of 4 MiB and more to the system as soon as they are freed.

    glibc raises this bound to the largest block that was ever freed; from then on each of its
    arenas, several for each CPU, keeps up to 64 MB of what threads that ended have freed there.
    Does nothing where it is not glibc.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option, num_bytes in MALLOC_BOUNDS.items():
            mallopt(option, num_bytes)


def give_back_memory() -> None:
    """Asks the C library for its free pages; does nothing where it is not glibc."""
    if sys.platform != "linux":
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl
        return
    trim(0)


def require_utf8(path: Path) -> None:
    """Raises UserError for a path with half surrogates, which libraries in C++ and Rust cannot
    open: its bytes are not UTF-8, or Python was started for another encoding."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"got {path}, whose name is not UTF-8 here, expected one that is; rename it, or set "
            "PYTHONUTF8=1"
        ) from None
