"""The files by which processes of one machine find each other and read the progress of a start."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from modelswarm.errors import UserError
from modelswarm.process.run_files import (
    clear_run_file,
    publish_addresses,
    remove_run_file,
    write_run_file,
)
from modelswarm.process.start_progress import (
    StartFile,
    StartPhase,
    StartProgress,
    read_start_file,
)
from modelswarm.process.start_reporter import WRITE_SECONDS, StartReporter


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


def test_addresses_that_cannot_be_written_name_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "run.json"):  # a folder, and one in a file
        with pytest.raises(UserError, match=rf"^--run-file: {path} cannot be written: \w"):
            publish_addresses(path, {"http": "127.0.0.1:1"})


def test_ended_process_leaves_neither_file_nor_partial_file(tmp_path: Path) -> None:
    for name in ("s0.json", ".s0.json.71.tmp", ".s0.json.72.tmp", "s1.json", ".s1.json.73.tmp"):
        (tmp_path / name).write_text("{")
    clear_run_file(tmp_path / "s0.json")
    clear_run_file(tmp_path / "absent.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".s1.json.73.tmp", "s1.json"]


class ReporterHarness:
    """A reporter with a clock that tests move, and its file."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.path = folder / "starts" / "s0.json"
        self.reporter = StartReporter(self.path, lambda: self.now)

    def read(self) -> StartProgress:
        found = read_start_file(self.path)
        assert found is not None
        assert found.pid == os.getpid()
        return found.progress


def test_body_of_ready_has_exactly_the_agreed_fields() -> None:
    progress = StartProgress(StartPhase.READING, 3, 8, "slow disk")

    assert json.loads(json.dumps(progress.response_body())) == {
        "status": "starting",
        "phase": "reading weights",
        "done": 3,
        "total": 8,
        "reason": "slow disk",
    }


def test_start_file_begins_with_importing(tmp_path: Path) -> None:
    assert ReporterHarness(tmp_path).read() == StartProgress(StartPhase.IMPORTING)


def test_new_phases_are_written_at_once(tmp_path: Path) -> None:
    harness = ReporterHarness(tmp_path)

    harness.reporter.report(StartPhase.READING, 0, 10)
    assert harness.read() == StartProgress(StartPhase.READING, 0, 10)
    harness.reporter.report(StartPhase.CHECKING)
    assert harness.read() == StartProgress(StartPhase.CHECKING)


def test_steps_of_a_phase_are_written_at_a_bounded_rate(tmp_path: Path) -> None:
    harness = ReporterHarness(tmp_path)
    harness.reporter.report(StartPhase.READING, 0, 10)

    harness.reporter.report(StartPhase.READING, 3, 10)
    assert harness.read().done == 0
    assert harness.reporter.progress.done == 3
    harness.now += WRITE_SECONDS
    harness.reporter.report(StartPhase.READING, 4, 10)
    assert harness.read().done == 4
    harness.reporter.report(StartPhase.READING, 10, 10)
    assert harness.read().done == 10


def test_full_disk_does_not_end_the_start(tmp_path: Path) -> None:
    harness = ReporterHarness(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        harness.reporter.report(StartPhase.CHECKING)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert harness.reporter.progress == StartProgress(StartPhase.CHECKING)
    assert harness.read() == StartProgress(StartPhase.IMPORTING)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"phase": 1}', '{"phase": "checking", "reason": "", "pid": 1}']
)
def test_unreadable_start_file_counts_as_missing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s0.json"
    path.write_text(content)

    assert read_start_file(path) is None
    assert read_start_file(tmp_path / "none.json") is None


def test_phase_of_another_version_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "s0.json"
    fields = {"phase": "warming", "done": 1, "total": 2, "reason": "", "pid": 7}
    path.write_text(json.dumps(fields))

    assert read_start_file(path) == StartFile(StartProgress("warming", 1, 2), 7)
