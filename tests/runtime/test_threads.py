"""Tests the thread count, from affinity and cgroup quota."""

import os
from pathlib import Path

import pytest

from spec_runtime.files import machine as threads


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_v2_takes_the_smallest_quota_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/a/b\n")
    root = tmp_path / "root"
    write(root / "a/cpu.max", "150000 100000\n")
    write(root / "a/b/cpu.max", "max 100000\n")
    write(tmp_path / "cpu.max", "100 100000\n")  # above the root: not ours
    assert threads.cgroup_quota(root, tmp_path / "membership") == 1.5
    write(root / "cpu.max", "50000 100000\n")
    assert threads.cgroup_quota(root, tmp_path / "membership") == 0.5


def test_v2_in_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    write(tmp_path / "membership", "0::/docker/abc\n")
    write(tmp_path / "root/cpu.max", "300000 100000\n")
    assert threads.cgroup_quota(tmp_path / "root", tmp_path / "membership") == 3


def test_v1(tmp_path: Path) -> None:
    write(tmp_path / "membership", "7:memory:/x\n4:cpu,cpuacct:/x\n")
    root = tmp_path / "root"
    write(root / "cpu/x/cpu.cfs_quota_us", "200000\n")
    write(root / "cpu/x/cpu.cfs_period_us", "100000\n")
    write(root / "cpu/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    assert threads.cgroup_quota(root, tmp_path / "membership") == 2


def test_no_cgroups(tmp_path: Path) -> None:
    assert threads.cgroup_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "wanted"), [(None, 6), (2.5, 2), (0.3, 1), (16.0, 6)], ids=str)
def test_default_threads(monkeypatch: pytest.MonkeyPatch, quota: float | None, wanted: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: quota)
    assert threads.default_threads() == wanted
