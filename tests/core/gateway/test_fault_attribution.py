"""Fault attribution for an overdue token: by table over frozen counters, and in the recovery loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.server import expected

from modelswarm.protocol.identity import Address, Epoch
from modelswarm.protocol.messages import Counters, Grammar, Sampling
from modelswarm_gateway.core.interface.effects import Ejected, Rerouted
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.recovery.fault_attribution import attribute
from modelswarm_gateway.core.sessions.session import Hop, SessionState

EPOCH = Epoch(3, 1)
STILL = "still"  # the zone of a server that makes no steps
OWED = 21  # log entries so far: rows 0 ... 20 are due at the tail


def hop(name: str, *, still: bool = False, **changes: Any) -> Hop:
    """A hop that got and sent all rows; `changes` replaces some counters. `still`: its server makes no steps."""
    counted = Counters(
        EPOCH, received=21, sent=21, granted=100, window=100, tokens_sent=0, tokens_received=0
    )
    counters = replace(counted, **changes)
    return Hop(Address(name, ""), 0, 4, gateway_handle=1, counters=counters, zone=STILL * still)


HEAD = hop("a", granted=0, tokens_received=21)
MIDDLE = hop("b")
TAIL = hop("c", sent=0, window=0, tokens_sent=21)

TABLE = {
    "all well": ([HEAD, MIDDLE, TAIL], ()),
    "rows lost at the first link": ([HEAD, hop("b", received=20, sent=20), TAIL], ("a", "b")),
    "rows lost at the last link": (
        [HEAD, MIDDLE, hop("c", received=13, sent=0, window=0, tokens_sent=21)],
        ("b", "c"),
    ),
    "a window lost": (
        [hop("a", sent=16, window=16, tokens_received=21), hop("b", received=16, sent=16), TAIL],
        ("a", "b"),
    ),
    "the acknowledgement of bulk rows lost": (
        [hop("a", sent=20, unsent=1, tokens_received=21), hop("b", received=20, sent=20), TAIL],
        ("a", "b"),
    ),
    "the acknowledgement lost by a server that makes no steps": (
        [
            hop("a", sent=20, unsent=1, tokens_received=21, still=True),
            hop("b", received=20, sent=20),
            TAIL,
        ],
        ("a", "b"),
    ),
    "the last bulk rows wait for a window": (
        [
            hop("a", sent=16, window=16, unsent=1, tokens_received=21),
            hop("b", granted=16, received=16, sent=14),
            TAIL,
        ],
        (),
    ),
    "a later window on its way": (
        [hop("a", granted=0, window=64, tokens_received=21), MIDDLE, TAIL],
        (),
    ),
    "a token lost in the ring": (
        [hop("a", granted=0, received=20, sent=20, tokens_received=20), MIDDLE, TAIL],
        ("c", "a"),
    ),
    "the first of two lost links": (
        [HEAD, hop("b", received=20, sent=20), hop("c", received=13, sent=0, tokens_sent=21)],
        ("a", "b"),
    ),
    "rows that were not run": ([HEAD, hop("b", sent=14, still=True), TAIL], ("b",)),
    "rows that wait for their turn": ([HEAD, hop("b", sent=14), TAIL], ()),
    "rows that must not be sent on": (
        [HEAD, hop("b", sent=14, window=14, still=True), hop("c", granted=14, received=14)],
        (),
    ),
    "a tail that picks nothing": (
        [HEAD, MIDDLE, hop("c", sent=0, window=0, tokens_sent=21, still=True)],
        ("c",),
    ),
    "one server for all": ([hop("a", granted=0, window=0, sent=0, still=True)], ("a",)),
    "one server for all, at work": ([hop("a", granted=0, window=0, sent=0)], ()),
    "counters of an older epoch": (
        [HEAD, hop("b", received=9, epoch=Epoch(2, 1)), TAIL],
        (),
    ),
    "a hop that never ran": ([HEAD, replace(hop("b", still=True), counters=None), TAIL], ()),
    "a link of a server with itself": (
        [HEAD, hop("a", received=20, sent=20), hop("c", received=20, sent=0)],
        (),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_fault_attribution_of_frozen_counters(case: str) -> None:
    hops, guilty = TABLE[case]
    still = {each.peer for each in hops if each.zone == STILL}
    assert attribute(hops, still, EPOCH, OWED) == guilty


# ---- in the recovery loop


def started(swarm: Swarm, *, new: int = 40) -> None:
    swarm.gateway.start("a", [5, 6, 7], new, ahead=4)
    swarm.wait(0.5)


def causes(swarm: Swarm) -> set[str]:
    return {effect.cause for effect in swarm.gateway.all(Rerouted)}


def ejected(swarm: Swarm) -> set[str]:
    return {effect.peer for effect in swarm.gateway.all(Ejected)}


def test_slow_reader_makes_no_token_overdue() -> None:
    swarm = swarm_of(*TWICE)
    started(swarm)
    swarm.wait(100.0)
    assert causes(swarm) == set() and ejected(swarm) == set()


@pytest.mark.parametrize("back", [False, True])
def test_one_way_link_is_avoided_without_ejecting_a_server(back: bool) -> None:
    """All four servers send heartbeats and report no fault. Neither end of the link is at fault: one of them stays."""
    swarm = swarm_of(*TWICE)
    started(swarm)
    head, tail = swarm.route("a")
    sender, receiver = (tail, head) if back else (head, tail)
    swarm.drop(sender.peer, receiver.peer)
    swarm.gateway.read("a", 1000)
    for _ in range(30):
        swarm.wait(0.5)
        swarm.core.on_read("a", 1000, swarm.now)
    assert causes(swarm) == {"overdue"}
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)
    assert ejected(swarm) == set(), "the link is at fault, not a server"
    assert len({head.peer, tail.peer} & {server.peer for server in swarm.route("a")}) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_server_that_runs_no_steps_is_ejected(place: int) -> None:
    swarm = swarm_of(*TWICE)
    started(swarm)
    before = swarm.route("a")
    lazy = before[place]
    lazy.lazy = True
    swarm.gateway.read("a", 1000)
    swarm.wait(8.0)
    assert causes(swarm) == {"overdue"}
    assert ejected(swarm) == {lazy.peer}
    assert lazy not in swarm.route("a") and swarm.route("a")[1 - place] is before[1 - place]
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


@pytest.mark.parametrize("place", [0, 1])
def test_server_whose_step_never_ends_is_ejected(place: int) -> None:
    swarm = swarm_of(*TWICE)
    started(swarm)
    before = swarm.route("a")
    stuck = before[place]
    stuck.stuck = True
    swarm.gateway.read("a", 1000)
    swarm.wait(8.0)
    assert causes(swarm) == {"overdue"}
    assert ejected(swarm) == {stuck.peer}
    assert stuck not in swarm.route("a") and swarm.route("a")[1 - place] is before[1 - place]
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


@pytest.mark.parametrize("place", [0, 1])
def test_server_busy_with_other_sessions_is_not_ejected(place: int) -> None:
    """The heartbeats report steps: the rows of the session wait for their turn, and it stays on its route."""
    swarm = swarm_of(*TWICE)
    started(swarm)
    before = swarm.route("a")
    busy = before[place]
    busy.lazy = True  # for the session of this gateway
    swarm.core.on_read("a", 1000, swarm.now)
    for number in range(1, 80):
        swarm.now += 0.1
        for server in swarm.servers.values():
            heartbeat = server.core.heartbeat()
            raised = replace(
                heartbeat, steps=heartbeat.steps + number if server is busy else heartbeat.steps
            )
            swarm.core.receive(server.peer, raised, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()
    assert causes(swarm) == {"overdue"} and ejected(swarm) == set()
    assert swarm.route("a") == before
    busy.lazy = False
    swarm.run()
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


def test_other_recovery_causes_do_not_extend_token_deadline() -> None:
    swarm = swarm_of(*TWICE)
    started(swarm)
    lazy = swarm.route("a")[1]
    lazy.lazy = True
    swarm.gateway.read("a", 1000)
    for _ in range(3):
        swarm.core._recovery.on_fault(swarm.core._sessions["a"], "link_down", "x/1/y", swarm.now)
        swarm.run()
    swarm.wait(4.0)
    assert causes(swarm) == {"link_down", "overdue"}
    assert ejected(swarm) == {lazy.peer}
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


def test_server_that_goes_on_during_a_hold_is_not_ejected() -> None:
    """The overdue token comes while the session is held. The counters are frozen after that, and accuse no server."""
    swarm = swarm_of(*TWICE)
    started(swarm)
    tail = swarm.route("a")[1]
    tail.lazy = True
    swarm.gateway.read("a", 1000)
    for _ in range(GatewaySettings().attempts_without_token - 1):
        swarm.core._recovery.on_fault(swarm.core._sessions["a"], "link_down", "x/1/y", swarm.now)
        swarm.run()
    while "overdue" not in causes(swarm):
        swarm.wait(0.1)
    assert swarm.gateway.view("a").state == SessionState.HELD.value
    tail.lazy = False
    swarm.wait(5.0)
    assert ejected(swarm) == set()
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 40)


@pytest.mark.parametrize("seconds", [4.0, 60.0])
def test_tail_that_compiles_a_grammar_is_not_ejected(seconds: float) -> None:
    """Until its grammar is compiled, it has rows and makes no step. One that never compiles it is ejected."""
    swarm = swarm_of((0, 2), (2, 4), (2, 4))
    swarm.gateway.sampling = Sampling(grammar=Grammar("words", "hash"))
    for server in swarm.servers.values():
        server.holds_grammars = True
    swarm.gateway.start("a", [5, 6, 7], 20)
    swarm.wait(seconds)
    tails = {server.peer for server in swarm.servers.values() if server.hello.first == 2}
    assert causes(swarm) == {"overdue"}
    assert ejected(swarm) == (tails if seconds > 4.0 else set())
    for server in swarm.servers.values():
        server.holds_grammars = False
        server.compile_grammars(swarm.now)
    swarm.wait(10.0)
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 20, sampling=swarm.gateway.sampling)
