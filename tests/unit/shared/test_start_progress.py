"""The progress of a start: its file, its body for /ready, and the rate at which the file is written."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from modelswarm.process.start_progress import (
    StartFile,
    StartPhase,
    StartProgress,
    read_start_file,
)
from modelswarm.process.start_reporter import WRITE_SECONDS, StartReporter


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
