"""Counts the CPUs that this process may really use: its affinity, capped by its cgroup quota."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """Returns how many threads an engine should use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        available = len(os.sched_getaffinity(0))
    else:
        available = os.cpu_count() or 1
    quota = cgroup_quota()
    return available if quota is None else max(1, min(available, int(quota)))


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
