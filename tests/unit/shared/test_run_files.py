"""The run files through which processes of one machine find each other."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from modelswarm.process.run_files import clear_run_file, remove_run_file, write_run_file


def test_run_file_is_written_whole_with_pid_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "made" / "too" / "s0.json"
    write_run_file(path, {"target": "127.0.0.1:1", "first": 0})
    assert json.loads(path.read_text()) == {"target": "127.0.0.1:1", "first": 0, "pid": os.getpid()}
    assert [found.name for found in path.parent.iterdir()] == ["s0.json"], "no partial file is left"
    remove_run_file(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("content", ['{"pid": 1}', "{}", "half a fi"])
def test_run_file_of_another_process_is_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s0.json"
    path.write_text(content)
    remove_run_file(path)
    assert path.read_text() == content


def test_removing_a_missing_run_file_raises_nothing(tmp_path: Path) -> None:
    remove_run_file(tmp_path / "s0.json")
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "s0.json"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (0, before[1])
    )  # every write fails, as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            write_run_file(path, {"target": "127.0.0.1:1"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_ended_process_leaves_neither_file_nor_partial_file(tmp_path: Path) -> None:
    for name in ("s0.json", ".s0.json.71.tmp", ".s0.json.72.tmp", "s1.json", ".s1.json.73.tmp"):
        (tmp_path / name).write_text("{")
    clear_run_file(tmp_path / "s0.json")
    clear_run_file(tmp_path / "absent.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s1.json.73.tmp", "s1.json"]
