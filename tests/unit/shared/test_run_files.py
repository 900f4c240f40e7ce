"""The run files through which processes of one machine find each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from modelswarm.process.run_files import remove_run_file, write_run_file


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
