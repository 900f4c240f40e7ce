"""`modelswarm logs`: the newest log of each process, those of failed and killed runs, and new lines."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelswarm.cli import run
from modelswarm.local.child_process import shorten_log
from modelswarm.local.log_files import LogReader, find_logs, list_logs
from modelswarm.local.run_folder import FAILED_FOLDER, RunFolder, StartInfo, list_starts


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / f"modelswarm-{os.getuid()}"


def claim(name: str) -> RunFolder:
    """Return the folder of a run with a server that has started twice."""
    folder = RunFolder.claim(name)
    folder.announce(StartInfo(name, 1, {f"{name}-s0-r0": "0:4"}, ("gateway",)))
    (folder.logs / "gateway-1.log").write_text("one\ntwo\nthree\n")
    (folder.logs / f"{name}-s0-r0-9.log").write_text("old\n")
    (folder.logs / f"{name}-s0-r0-10.log").write_text("new\n")
    return folder


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    folder = claim("one")
    yield folder
    folder.release()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(["logs", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["logs", *arguments]) in (1, 2)
    return capsys.readouterr().err


def test_logs_prints_the_folder_and_the_newest_log_of_each(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "--lines", "2") == [
        f"logs of one: {folder.logs}",
        "== gateway (gateway-1.log)",
        "two",
        "three",
        "== one-s0-r0 (one-s0-r0-10.log)",
        "new",
    ]
    assert [log.incarnation for log in list_logs(folder.logs)] == [1, 9, 10]


def test_logs_of_one_process_take_its_short_name(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "one", "--process", "s0-r0")[1:] == [
        "== one-s0-r0 (one-s0-r0-10.log)",
        "new",
    ]
    error = refused(capsys, "--process", "s9-r9")
    assert "--process: 's9-r9' has no log; allowed: gateway, one-s0-r0" in error


def test_logs_as_json_have_path_and_lines(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    [line] = printed(capsys, "--process", "gateway", "--json", "--lines", "1")
    assert json.loads(line) == {
        "swarm": "one",
        "process": "gateway",
        "incarnation": 1,
        "path": str(folder.logs / "gateway-1.log"),
        "lines": ["three"],
    }


def test_reader_returns_only_new_whole_lines(folder: RunFolder) -> None:
    reader = LogReader(folder.logs, "gateway")
    [tail] = reader.read_tails(1)
    assert tail.lines == ["three"]
    assert reader.read_new() == []
    with (folder.logs / "gateway-1.log").open("a") as log:
        log.write("four\nfi")
        log.flush()
        assert [part.lines for part in reader.read_new()] == [["four"]]
        log.write("ve\n")
    assert [part.lines for part in reader.read_new()] == [["five"]]
    (folder.logs / "gateway-2.log").write_text("again\n")
    [part] = reader.read_new()
    assert (part.log.incarnation, part.lines) == (2, ["again"])


def test_log_that_grows_too_long_keeps_its_last_lines(folder: RunFolder) -> None:
    path = folder.logs / "gateway-1.log"
    reader = LogReader(folder.logs, "gateway")
    with path.open("ab", buffering=0) as log:  # as its process does
        log.write(b"".join(b"line %d\n" % number for number in range(1000)))
        reader.read_tails(1)
        size = path.stat().st_size
        shorten_log(path, most=size, kept=100)
        assert path.stat().st_size == size
        log.write(b"last\n")
        shorten_log(path, most=size, kept=100)
        lines = path.read_text().splitlines()
        assert (lines[0], lines[-2:]) == ("line 990", ["line 999", "last"])
        assert reader.read_new() == []
        log.write(b"more\n")
    assert path.read_text().splitlines() == [*lines, "more"]
    assert [part.lines for part in reader.read_new()] == [["more"]]
    shorten_log(folder.logs / "no-such.log")


def test_several_swarms_need_a_name(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    other = claim("two")
    try:
        assert "NAME: several swarms run here; allowed: one of one, two" in refused(capsys)
        assert printed(capsys, "two")[0] == f"logs of two: {other.logs}"
        assert "there are no logs of a swarm 'x'; allowed: one, two" in refused(capsys, "x")
    finally:
        other.release()


def test_logs_of_a_failed_start_stay_until_the_next_one(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no swarm runs on this machine" in refused(capsys)
    folder = claim("one")
    kept = folder.keep_logs()
    folder.release()
    assert kept == runs / FAILED_FOLDER / "one"

    shown = printed(capsys, "--follow", "--lines", "0")
    assert shown[0] == f"logs of one: {kept}; its last start failed, or was killed"
    claim("one").release()
    assert not kept.exists()
    assert "no swarm runs on this machine" in refused(capsys)


def test_logs_of_a_killed_run_are_found() -> None:
    folder = claim("one")
    os.close(folder._lock)  # as the kernel does at the end of the process

    found = find_logs("one")

    assert (found.path, found.has_ended) == (folder.logs, True)


def test_swarm_whose_name_is_lock_disturbs_no_other() -> None:
    """The logs of its failed start are at `.failed/lock`."""
    folder = claim("lock")
    folder.keep_logs()
    folder.release()
    claim("one").release()
    assert list_starts() == []


def test_folder_that_others_have_removed_is_released() -> None:
    folder = claim("one")
    shutil.rmtree(folder.path)
    folder.release()
    claim("one").release()
