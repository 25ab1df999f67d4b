"""Tests the thread count, from affinity and cgroup quota."""

import os
from pathlib import Path

import pytest

from spec_runtime.files import machine as threads

V2 = {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}
V1 = {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"}
V1 |= {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b", V2 | {"../cpu.max": "100 100000"}, 1.5),  # above the root: not ours
        ("0::/a/b", V2 | {"cpu.max": "50000 100000"}, 0.5),  # the smallest on the way up
        ("0::/docker/abc", {"cpu.max": "300000 100000"}, 3),  # a container sees only its own root
        ("7:memory:/x\n4:cpu,cpuacct:/x", V1, 2),
    ],
)
def test_quotas(tmp_path: Path, membership: str, files: dict[str, str], quota: float) -> None:
    (tmp_path / "membership").write_text(f"{membership}\n")
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert threads.cgroup_quota(tmp_path / "root", tmp_path / "membership") == quota


def test_no_cgroups(tmp_path: Path) -> None:
    assert threads.cgroup_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "wanted"), [(None, 6), (2.5, 2), (0.3, 1), (16.0, 6)], ids=str)
def test_default_threads(monkeypatch: pytest.MonkeyPatch, quota: float | None, wanted: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: quota)
    assert threads.default_threads() == wanted
