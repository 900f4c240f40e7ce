"""The memory limit of a process, read from files as Linux writes them, and a server's error when it does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelswarm.errors import MemoryLimitError
from modelswarm.placement.memory import PROCESS_BYTES, MemoryModel
from modelswarm.placement.plan import pages_for_sessions
from modelswarm.placement.quantity import bytes_of
from modelswarm.process.memory_limit import read_memory_limit, read_resident_bytes
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.runtime.memory_check import check_memory_limit

GIB = 1 << 30
MEMORY = MemoryModel(PROCESS_BYTES, 8 << 20, 32 << 20, kv_per_page=128 << 10, retained_per_page=0)


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def shape_of(pages: int, max_length: int = 4096) -> ModelShape:
    return ModelShape(0, 8, 8, row_bytes=512, page_size=16, total_pages=pages,
                      max_length=max_length, vocab_size=261)  # fmt: skip


def refusal(pages: int, limit: int) -> str:
    with pytest.raises(MemoryLimitError) as refused:
        check_memory_limit(MEMORY, shape_of(pages), limit)
    return str(refused.value)


def test_limit_of_version_two_is_that_of_the_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pods/a")
    write(tmp_path, "sys/fs/cgroup/pods/a/memory.max", "1073741824")
    assert read_memory_limit(tmp_path) == GIB


def test_limit_of_version_two_in_a_container_is_at_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/")
    write(tmp_path, "sys/fs/cgroup/memory.max", "734003200")
    assert read_memory_limit(tmp_path) == 700 << 20


def test_limit_of_version_one_is_that_of_the_memory_controller(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/b")
    write(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1073741824")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/a/memory.limit_in_bytes", "1")
    assert read_memory_limit(tmp_path) == GIB


def test_limit_of_version_one_in_a_container_is_at_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/kubepods/pod1/c1")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824")
    assert read_memory_limit(tmp_path) == GIB


def test_smallest_limit_of_the_groups_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/pods/a/c")
    write(tmp_path, "sys/fs/cgroup/pods/a/c/memory.max", "max")
    write(tmp_path, "sys/fs/cgroup/pods/a/memory.max", str(GIB))
    write(tmp_path, "sys/fs/cgroup/pods/memory.max", str(2 * GIB))
    assert read_memory_limit(tmp_path) == GIB


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("sys/fs/cgroup/memory.max", "max"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
        ("sys/fs/cgroup/other", "1"),
    ],
)
def test_group_without_limit_has_none(tmp_path: Path, file: str, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n0::/")
    write(tmp_path, file, text)
    assert read_memory_limit(tmp_path) is None


def test_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert read_memory_limit(tmp_path) is None
    assert read_resident_bytes(tmp_path) is None


def test_resident_size_is_read_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/status", "VmPeak:\t  900 kB\nVmRSS:\t     727 kB\nThreads:\t1")
    assert read_resident_bytes(tmp_path) == 727 << 10


def test_server_within_its_limit_passes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    check_memory_limit(MEMORY, shape_of(100), MEMORY.needed(100))
    check_memory_limit(MEMORY, shape_of(10_000), None)
    assert "process 768 MiB" in caplog.text and "no memory limit" in caplog.text


def test_server_one_byte_above_its_limit_is_refused() -> None:
    said = refusal(7524, MEMORY.needed(7524) - 1)
    assert "process 768 MiB, weights 8 MiB" in said and "KV 940 MiB" in said


def test_refused_server_names_sessions_that_fit() -> None:
    said = refusal(7524, GIB)
    found = re.search(
        r"memory limit of 1 GiB; set spec\.sessions\.concurrent to (\d+), or "
        r"spec\.sessions\.concurrent to (\d+) and resources\.limits\.memory of its pool to (\d+Mi)",
        said,
    )
    assert found is not None
    fewer, same = (pages_for_sessions(int(number), 4096) for number in (found[1], found[2]))
    assert MEMORY.needed(fewer) <= GIB < MEMORY.needed(pages_for_sessions(int(found[1]) + 1, 4096))
    assert MEMORY.needed(same) <= bytes_of(found[3], "memory")


def test_refused_server_without_room_names_a_limit_for_one() -> None:
    said = refusal(100, 700 << 20)
    found = re.search(r"set spec\.sessions\.concurrent to 1 and resources\.limits\.memory of its "
                      r"pool to (\d+Mi)$", said)  # fmt: skip
    assert found is not None
    assert MEMORY.needed(pages_for_sessions(1, 4096)) <= bytes_of(found[1], "memory")
