"""Screens of `status`, `routes`, `plan` and `up` at three widths, with fixed data: words, colours, no cut text."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from modelswarm.cli.demo.example import load_example
from modelswarm.cli.plan import render_plan
from modelswarm.cli.screens.routes import render_routes
from modelswarm.cli.screens.status import render_status
from modelswarm.cli.terminal.process_table import process_table
from modelswarm.cli.terminal.states import server_state
from modelswarm.local.planning import plan_document
from modelswarm.local.supervisor import JobState, JobStatus
from modelswarm.local.swarm import LocalServer
from modelswarm.placement.quantity import human_bytes
from modelswarm.placement.slots import slots_of
from modelswarm.placement.spans import Span
from modelswarm.process.run_files import ServerFile
from modelswarm.protocol.wire import api_pb2

WIDTHS = (60, 80, 120)
SPANS = (Span(0, 4), Span(4, 8))
SLOTS = slots_of("counting", SPANS, 2)
SESSION = "0123456789abcdef0123456789abcdef"
PEERS = {slot.name: f"{slot.name}/1/4dcd" for slot in SLOTS}


def server(name: str, **fields: Any) -> api_pb2.Server:
    slot = next(slot for slot in SLOTS if slot.name == name)
    values: dict[str, Any] = {
        "peer": PEERS[name],
        "target": "127.0.0.1:41234",
        "first": slot.span.first,
        "last": slot.span.last,
        "health": "linked",
        "free_pages": 2020,
        "total_pages": 2276,
        "score": 1.0,
        "step_ms": 2.9,
    }
    return api_pb2.Server(**{**values, **fields})


SNAPSHOT = api_pb2.Snapshot(
    models=[api_pb2.ModelState(model="counting", ready=True, n_blocks=8)],
    servers=[
        server("counting-s0-r0", health="draining", sessions=3),
        server("counting-s0-r1"),
        server("counting-s1-r0", health="suspected"),
        server("counting-s1-r1", health="draining"),
    ],
    sessions=[
        api_pb2.Session(
            id=f"named:{SESSION}",
            state="running",
            waits_for_reader=True,
            length=696,
            route=[
                api_pb2.Hop(peer=PEERS["counting-s0-r1"], first=0, last=4),
                api_pb2.Hop(peer=PEERS["counting-s1-r0"], first=4, last=8),
            ],
        ),
        api_pb2.Session(
            id=f"named:{SESSION[::-1]}", state="held", hold_reason="no server holds blocks 4:8"
        ),
    ],
)
ROUTES = api_pb2.RoutesReply(
    servers=[
        api_pb2.ServerCost(
            peer=peer, model="counting", block_ms=1e9, hop_ms=1e9, state="failing", score=0.5
        )
        for peer in PEERS.values()
    ],
    sessions=[
        api_pb2.RouteReason(
            id=f"named:{SESSION}",
            state="running",
            hops=[
                api_pb2.HopReason(
                    peer=PEERS["counting-s0-r1"],
                    last=4,
                    chosen_ms=3.0,
                    best_ms=2.0,
                    best=PEERS["counting-s0-r0"],
                    options=2,
                )
            ],
        )
    ],
)


def local_server(index: int, job: JobStatus | None = None) -> LocalServer:
    slot = SLOTS[index]
    status = job or JobStatus(slot.name, JobState.READY, 1, 23900 + index)
    member = ServerFile(peer=PEERS[slot.name], target="127.0.0.1:1")
    return LocalServer(slot, status, member if status.state is JobState.READY else None)


GATEWAY = JobStatus("gateway", JobState.READY, 1, 23899)
KILLED = JobStatus(
    "counting-s1-r1", JobState.WAITING, 1, 0, restart_in=0.5, exit_reason="killed by SIGKILL"
)


def draw(drawn: RenderableType, width: int, *, colours: bool = False) -> str:
    out = Console(
        file=io.StringIO(), width=width, highlight=False, markup=False,
        force_terminal=colours, color_system="standard" if colours else None,
    )  # fmt: skip
    out.print(drawn)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def assert_fits(text: str, width: int) -> None:
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines()), text


@pytest.mark.parametrize("width", WIDTHS)
def test_status_shows_whole_names_states_and_ids(width: int) -> None:
    text = draw(render_status(SNAPSHOT), width)

    assert_fits(text, width)
    for name, word in [
        ("counting-s0-r0", "draining"),
        ("counting-s0-r1", "ready"),
        ("counting-s1-r0", "suspected"),
        ("counting-s1-r1", "drained"),
    ]:
        assert re.search(rf"^{name} +\d:\d +{word} ", text, re.MULTILINE)
    assert re.search(rf"^{SESSION}\b", text, re.MULTILINE)
    assert "waiting for its reader" in text
    assert "is held: no server holds" in text
    assert ("127.0.0.1:41234" in text) == (width == 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_routes_shows_the_states_of_status(width: int) -> None:
    text = draw(render_routes(ROUTES, SNAPSHOT), width)

    assert_fits(text, width)
    for ending, word in [("s0-r0", "draining"), ("s0-r1", "failing"), ("s1-r0", "suspected")]:
        assert re.search(rf"{ending} .* {word}$", text, re.MULTILINE)
    words = " ".join(text.split())
    assert f"{SESSION} waiting for its reader: a server of its route was lost" in words
    assert "counting-s0-r1 [0:4] chosen at 3.00 ms of 2: the best was counting-s0-r0 at" in words


@pytest.mark.parametrize("width", WIDTHS)
def test_up_shows_the_gateways_view_of_its_processes(width: int) -> None:
    servers = [*(local_server(index) for index in range(3)), local_server(3, KILLED)]
    text = draw(process_table("counting", servers, [GATEWAY], SNAPSHOT), width)

    assert_fits(text, width)
    found = {
        line.split()[0].removeprefix("counting-"): line.split()[1:3]
        for line in text.splitlines()
        if re.match(r"counting-s|s\d|gateway", line)
    }
    assert found == {
        "s0-r0": ["0:4", "draining"],
        "s1-r0": ["4:8", "suspected"],
        "s0-r1": ["0:4", "ready"],
        "s1-r1": ["4:8", "exited"],
        "gateway": ["ready", "23899"],
    }
    assert "counting: no ready server for some block" in text
    for pid in (23899, 23900, 23901, 23902):
        assert str(pid) in text
    assert "killed by SIGKILL" in text
    assert ("killed by SIGKILL, restarts in 0.5 s" in text) == (width == 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_plan_keeps_spans_totals_and_free_tokens(width: int) -> None:
    words_of_warning = "the chat template does not compile: " + "word " * 40
    plan = replace(plan_document(load_example()), warnings=(words_of_warning,))
    text = draw(render_plan(plan), width)

    assert_fits(text, width)
    for index, found in enumerate(plan.servers):
        total = human_bytes(found.memory.total)
        assert re.search(rf"^ +{index}  {found.span} .* {total} +{found.free_tokens}$", text, re.M)
    words = " ".join(text.split())
    assert "A page holds 16 tokens; a tenth of the pages is reserved for recovery." in words
    assert f"warning: {words_of_warning}" in words
    assert f"Servers compute on {plan.hardware}." in words


def test_up_counts_ready_servers_with_the_right_plural() -> None:
    servers = [local_server(index) for index in range(4)]
    linked = api_pb2.Snapshot(servers=[server(name) for name in PEERS])
    both = draw(process_table("counting", servers, [GATEWAY], linked), 80)
    linked.servers[0].health = "ejected"
    one = draw(process_table("counting", servers, [GATEWAY], linked), 80)

    assert "at least 2 ready servers for every block" in both
    assert "at least 1 ready server for every block" in one


def test_up_does_not_call_unlinked_servers_ready() -> None:
    servers = [local_server(0)]
    other_process = api_pb2.Snapshot(servers=[server("counting-s0-r0", peer="counting-s0-r0/2/1")])
    assert "not linked" in draw(process_table("c", servers, [GATEWAY], other_process), 80)
    assert "no gateway" in draw(process_table("c", servers, [GATEWAY], None), 80)


@pytest.mark.parametrize(
    ("health", "sessions", "word"),
    [
        ("linked", 2, "ready"),
        ("draining", 2, "draining"),
        ("draining", 0, "drained"),
        ("suspected", 0, "suspected"),
        ("ejected", 1, "ejected"),
    ],
)
def test_server_state_has_one_word(health: str, sessions: int, word: str) -> None:
    assert server_state(api_pb2.Server(health=health, sessions=sessions)) == word


def test_states_have_colours_only_on_a_terminal() -> None:
    coloured = draw(render_status(SNAPSHOT), 80, colours=True)
    assert "\x1b[33mdraining\x1b[0m" in coloured
    assert "\x1b[31msuspected\x1b[0m" in coloured
    assert "\x1b" not in draw(render_status(SNAPSHOT), 80)
