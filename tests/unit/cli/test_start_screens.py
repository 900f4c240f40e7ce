"""Screens of a start: phases, bars and reasons at three widths, and a swarm that is not ready yet."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from modelswarm.cli import run
from modelswarm.cli.terminal.process_table import process_table
from modelswarm.cli.terminal.start_lines import REASON_SECONDS, PhaseLog, draw_bar, phase_cell
from modelswarm.cli.terminal.start_table import render_start
from modelswarm.local.run_folder import (
    NoSwarmError,
    RunFolder,
    StartInfo,
    SwarmStartingError,
    find_run,
    find_starting,
)
from modelswarm.local.start_state import (
    IMPORTING,
    ProcessStart,
    describe_progress,
    gateway_progress,
    read_server_progress,
    read_server_starts,
)
from modelswarm.local.supervisor import JobState, JobStatus
from modelswarm.local.swarm import LocalServer
from modelswarm.placement.slots import Slot, slots_of
from modelswarm.placement.spans import Span
from modelswarm.process.run_files import write_run_file
from modelswarm.process.start_progress import StartPhase, StartProgress
from modelswarm.protocol.wire import api_pb2

GIB = 1 << 30
WIDTHS = (60, 80, 120)
SPANS = (Span(0, 4), Span(4, 8))
SLOTS: list[Slot] = list(slots_of("counting", SPANS, 1))
NAMES = [slot.name for slot in SLOTS]
HALF = StartProgress(StartPhase.READING, 4 * GIB, 8 * GIB)
GATEWAY = JobStatus("gateway", JobState.READY, 1, 4710)
START = StartInfo("counting", 4700, {NAMES[0]: "0:4", NAMES[1]: "4:8"}, ("gateway",))


def draw(drawn: RenderableType, width: int) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    out.print(drawn)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def starting_server(index: int, progress: StartProgress) -> LocalServer:
    job = JobStatus(NAMES[index], JobState.STARTING, 1, 4711 + index)
    return LocalServer(SLOTS[index], job, None, progress)


def view(*names: str, model: api_pb2.ModelState | None = None) -> api_pb2.Snapshot:
    """Return the view of a gateway that is linked to these servers."""
    servers = [api_pb2.Server(peer=f"{name}/1/x", health="linked") for name in names]
    return api_pb2.Snapshot(servers=servers, models=[model] if model else [])


@pytest.mark.parametrize("width", WIDTHS)
def test_up_shows_phases_and_a_bar_while_it_starts(width: int) -> None:
    servers = [starting_server(0, HALF), starting_server(1, StartProgress(StartPhase.CHECKING))]
    linking = {"gateway": StartProgress(StartPhase.LINKING, 0, 2)}

    text = draw(process_table("counting", servers, [GATEWAY], None, linking), width)

    assert text.startswith("counting is starting")
    assert all(len(line) <= width for line in text.splitlines()), text
    assert re.search(r"s0-r0 +0:4 +reading weights .*50 % ", text)
    assert ("reading weights [######......] 50 %" in text) == (width > 60)
    assert re.search(r"s1-r0 +4:8 +checking ", text)
    assert re.search(r"gateway +linking servers", text)
    assert all(pid in text for pid in ("4710", "4711", "4712"))


@pytest.mark.parametrize("width", WIDTHS)
def test_status_of_a_starting_swarm_has_reasons_below(width: int) -> None:
    reason = "its tokenizer cannot be loaded: tokenizer_config.json: not valid JSON: line 2"
    waiting = StartProgress(StartPhase.TOKENIZER, reason=f"m: {reason}")
    processes = [
        ProcessStart(NAMES[0], "0:4", 4711, HALF),
        ProcessStart(NAMES[1], "4:8", 4712, StartProgress(StartPhase.READY)),
        ProcessStart("gateway", "", 4710, waiting),
    ]

    text = draw(render_start(START, processes), width)

    assert all(len(line) <= width for line in text.splitlines()), text
    assert re.search(r"s1-r0 +4:8 +ready", text)
    assert f"gateway waits: m: {reason}" in " ".join(text.split())


def test_bar_is_full_only_at_the_end() -> None:
    assert draw_bar(StartProgress(StartPhase.READING, 0, 10)) == "[............]"
    assert draw_bar(StartProgress(StartPhase.READING, 999, 1000)) == "[###########.]"
    assert draw_bar(StartProgress(StartPhase.READING, 10, 10)) == "[############]"
    assert phase_cell(StartProgress(StartPhase.FETCHING)).text == "fetching"


def test_lines_tell_each_change_of_a_phase_once() -> None:
    log = PhaseLog()

    assert log.phase_lines({"s0": IMPORTING}) == ["s0: importing"]
    assert log.phase_lines({"s0": IMPORTING}) == []
    assert log.phase_lines({"s0": HALF}) == ["s0: reading weights (4 GiB of 8 GiB)"]
    assert log.phase_lines({}) == []
    assert log.phase_lines({"s0": IMPORTING}) == ["s0: importing"], "a new process of that name"


def test_reasons_are_told_once_and_only_if_they_last() -> None:
    log = PhaseLog()
    waits = {"gateway": StartProgress(StartPhase.TOKENIZER, reason="m: no\nfile")}

    assert log.reason_lines(waits, 10.0) == []
    assert log.reason_lines({"gateway": StartProgress(StartPhase.TOKENIZER)}, 10.1) == []
    assert log.reason_lines(waits, 11.0) == []
    assert log.reason_lines(waits, 11.0 + REASON_SECONDS) == ["gateway: tokenizer: m: no file"]
    assert log.reason_lines(waits, 30.0) == []


def test_gateway_links_all_servers_before_it_loads_the_model() -> None:
    model = api_pb2.ModelState(model="m", phase="tokenizer", reason="its tokenizer waits for x")

    assert gateway_progress(view(NAMES[0], model=model), NAMES) == StartProgress(
        StartPhase.LINKING, 1, 2
    )
    assert gateway_progress(view(*NAMES, model=model), NAMES) == StartProgress(
        StartPhase.TOKENIZER, reason="m: its tokenizer waits for x"
    )
    model.ready = True
    assert gateway_progress(view(*NAMES, model=model), NAMES).is_ready


def test_gateway_names_the_servers_it_cannot_use() -> None:
    snapshot = view(NAMES[0])
    snapshot.servers[0].health = "suspected"
    snapshot.unlinked.add(peer=f"{NAMES[1]}/1/x", reason="connection refused")

    found = gateway_progress(snapshot, NAMES)

    assert (found.phase, found.done, found.total) == (StartPhase.LINKING, 0, 2)
    assert found.reason == f"cannot link to {NAMES[1]}: connection refused; {NAMES[0]} is suspected"


def test_gateway_that_does_not_answer_is_said() -> None:
    found = gateway_progress(None, NAMES, "no gateway answers at 127.0.0.1:1")

    assert describe_progress(found) == "linking servers (0 of 2): no gateway answers at 127.0.0.1:1"


def test_progress_of_an_earlier_process_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "s0.json"
    write_run_file(path, HALF.fields())

    assert read_server_progress(path, os.getpid()) == HALF
    assert read_server_progress(path, os.getpid() + 1) == IMPORTING


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the folder of a starting swarm."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder.claim("counting")
    folder.announce(START)
    return folder


def test_starting_swarm_is_found_before_it_is_published(folder: RunFolder) -> None:
    assert find_starting() == find_starting("counting") == START
    assert find_starting("other") is None
    with pytest.raises(
        SwarmStartingError, match="'counting' is still starting; `modelswarm status`"
    ):
        find_run()
    folder.release()
    assert find_starting() is None
    with pytest.raises(NoSwarmError, match="no swarm runs on this machine"):
        find_run()


def test_files_give_the_state_of_each_server(folder: RunFolder) -> None:
    write_run_file(folder.starts / f"{NAMES[0]}.json", HALF.fields())
    assert [(each.pid, each.progress) for each in read_server_starts(START)] == [
        (os.getpid(), HALF),
        (0, IMPORTING),
    ]

    write_run_file(folder.members / f"{NAMES[0]}.json", {"peer": "x"})
    assert read_server_starts(START)[0].progress.is_ready
    folder.release()


def test_status_shows_a_starting_swarm(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run_file(folder.starts / f"{NAMES[0]}.json", HALF.fields())

    assert run(["status"]) == 0
    text = capsys.readouterr().out
    assert "counting is starting (modelswarm up: pid 4700)" in text
    assert re.search(rf"{NAMES[0]} +0:4 +reading weights \[######......\] 50 % ", text)

    assert run(["status", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["starting"][0] == {
        "process": NAMES[0],
        "blocks": "0:4",
        "pid": os.getpid(),
        "phase": "reading weights",
        "done": 4 * GIB,
        "total": 8 * GIB,
        "reason": None,
    }
    assert [each["phase"] for each in facts["starting"][1:]] == ["importing", "importing"]
    assert run(["chat"]) == 1
    assert "'counting' is still starting" in capsys.readouterr().err
    folder.release()
