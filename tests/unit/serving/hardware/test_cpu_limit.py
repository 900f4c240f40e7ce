"""The CPUs of a process, read from files as Linux writes them: the number of threads of `--threads auto`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelswarm.process.cpu_limit import read_cpu_limit, usable_cpus


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def use_cpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))


@pytest.mark.parametrize(
    ("limit", "threads"),
    [("250000 100000", 2), ("50000 100000", 1), ("400000 50000", 8), ("max 100000", 16)],
)
def test_limit_of_version_two_is_rounded_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, threads: int
) -> None:
    use_cpus(monkeypatch, 16)
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", limit)
    assert usable_cpus(tmp_path) == threads


@pytest.mark.parametrize(("quota", "limit"), [("350000", 3.5), ("-1", None), ("0", None)])
def test_limit_of_version_one_is_quota_over_period(
    tmp_path: Path, quota: str, limit: float | None
) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/a")
    write(tmp_path, "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota)
    write(tmp_path, "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    assert read_cpu_limit(tmp_path) == limit


def test_smallest_cpu_limit_of_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pods/a")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/pods/cpu.max", "300000 100000")
    write(tmp_path, "sys/fs/cgroup/pods/a/cpu.max", "400000 100000")
    assert read_cpu_limit(tmp_path) == 3


def test_cpuset_smaller_than_the_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpus(monkeypatch, 2)
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "800000 100000")
    assert usable_cpus(tmp_path) == 2


@pytest.mark.parametrize("text", ["", "100000", "x 100000", "100000 0"])
def test_unreadable_cpu_limit_counts_as_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert read_cpu_limit(tmp_path) is None


def test_system_without_control_groups_uses_its_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cpus(monkeypatch, 3)
    assert usable_cpus(tmp_path) == 3
