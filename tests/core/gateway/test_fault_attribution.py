"""Who is blamed for a token that did not come: by table over frozen counters, and in the gateway's loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.review_swarm import MODEL, Server, Swarm, expected

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import Counters, Sampling
from modelswarm_gateway.core.interface.effects import Ejected, Rerouted
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.core.recovery.fault_attribution import HopEvidence, attribute

EPOCH = Epoch(3, 1)
OWED = 21  # log entries so far: rows 0 ... 20 are due at the tail


def hop(
    name: str,
    *,
    received: int = 21,
    sent: int = 21,
    granted: int = 100,
    window: int = 100,
    tokens_sent: int = 0,
    tokens_received: int = 0,
    epoch: Epoch = EPOCH,
    still: bool = False,
) -> HopEvidence:
    counted = Counters(epoch, received, sent, granted, window, tokens_sent, tokens_received)
    return HopEvidence(name, counted, still)


HEAD = hop("a", granted=0, tokens_received=21)
MIDDLE = hop("b")
TAIL = hop("c", sent=0, window=0, tokens_sent=21)

TABLE = {
    "all well": ([HEAD, MIDDLE, TAIL], None),
    "rows lost at the first link": ([HEAD, hop("b", received=20, sent=20), TAIL], ("a", "b")),
    "rows lost at the last link": (
        [HEAD, MIDDLE, hop("c", received=13, sent=0, window=0, tokens_sent=21)],
        ("b", "c"),
    ),
    "a window lost": (
        [hop("a", sent=16, window=16, tokens_received=21), hop("b", received=16, sent=16), TAIL],
        ("a", "b"),
    ),
    "a later window on its way": (
        [hop("a", granted=0, window=64, tokens_received=21), MIDDLE, TAIL],
        None,
    ),
    "a token lost in the ring": (
        [hop("a", granted=0, received=20, sent=20, tokens_received=20), MIDDLE, TAIL],
        ("c", "a"),
    ),
    "the first of two lost links": (
        [HEAD, hop("b", received=20, sent=20), hop("c", received=13, sent=0, tokens_sent=21)],
        ("a", "b"),
    ),
    "rows that nobody ran": ([HEAD, hop("b", sent=14, still=True), TAIL], ("b",)),
    "rows that wait for their turn": ([HEAD, hop("b", sent=14), TAIL], None),
    "rows that must not be sent on": (
        [HEAD, hop("b", sent=14, window=14, still=True), hop("c", granted=14, received=14)],
        None,
    ),
    "a tail that picks nothing": (
        [HEAD, MIDDLE, hop("c", sent=0, window=0, tokens_sent=21, still=True)],
        ("c",),
    ),
    "one server for all": ([hop("a", granted=0, window=0, sent=0, still=True)], ("a",)),
    "one server for all, at work": ([hop("a", granted=0, window=0, sent=0)], None),
    "counters of an older epoch": (
        [HEAD, hop("b", received=9, epoch=Epoch(2, 1)), TAIL],
        None,
    ),
    "a hop that never ran": ([HEAD, HopEvidence("b", None, is_idle=True), TAIL], None),
    "a link of a server with itself": (
        [HEAD, hop("a", received=20, sent=20), hop("c", received=20, sent=0)],
        None,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_blame_by_table(case: str) -> None:
    hops, guilty = TABLE[case]
    found = attribute(hops, EPOCH, OWED)
    assert (None if found is None else found.peers) == guilty


# ---- in the loop


def started(swarm: Swarm, *, new: int = 40) -> None:
    swarm.core.open_session("a", MODEL, swarm.now)
    request = TurnRequest((5, 6, 7), new, Sampling(), credit_ahead=4)
    swarm.core.start_turn("a", request, swarm.now)
    swarm.run()
    swarm.wait(0.5)


def route(swarm: Swarm) -> list[Server]:
    view = swarm.core.find_view("a")
    assert view is not None
    return [swarm.servers[hop.peer] for hop in view.route]


def causes(swarm: Swarm) -> set[str]:
    return {effect.cause for effect in swarm.effects if isinstance(effect, Rerouted)}


def ejected(swarm: Swarm) -> set[str]:
    return {effect.peer for effect in swarm.effects if isinstance(effect, Ejected)}


def swarm_of_two() -> Swarm:
    swarm = Swarm()
    for first, last in ((0, 2), (0, 2), (2, 4), (2, 4)):
        swarm.serve(first, last)
    return swarm


def test_a_slow_reader_makes_nothing_overdue() -> None:
    swarm = swarm_of_two()
    started(swarm)
    swarm.wait(100.0)
    assert causes(swarm) == set() and ejected(swarm) == set()


@pytest.mark.parametrize("back", [False, True])
def test_a_link_that_swallows_one_direction_is_blamed_and_avoided(back: bool) -> None:
    """All four servers beat, and nobody reports anything. Neither of the two is at fault: one of them goes on."""
    swarm = swarm_of_two()
    started(swarm)
    head, tail = route(swarm)
    swarm.swallow(tail if back else head, head if back else tail)
    swarm.core.on_read("a", 1000, swarm.now)
    swarm.run()
    for _ in range(30):
        swarm.wait(0.5)
        swarm.core.on_read("a", 1000, swarm.now)
    assert causes(swarm) == {"overdue"}
    assert swarm.answer("a") == expected([5, 6, 7], 40)
    assert ejected(swarm) == set(), "a link is at fault, no server"
    assert len({head.peer, tail.peer} & {server.peer for server in route(swarm)}) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_beats_and_does_no_work_is_blamed(place: int) -> None:
    swarm = swarm_of_two()
    started(swarm)
    before = route(swarm)
    lazy = before[place]
    lazy.lazy = True
    swarm.core.on_read("a", 1000, swarm.now)
    swarm.run()
    swarm.wait(8.0)
    assert causes(swarm) == {"overdue"}
    assert ejected(swarm) == {lazy.peer}
    assert lazy not in route(swarm) and route(swarm)[1 - place] is before[1 - place]
    assert swarm.answer("a") == expected([5, 6, 7], 40)


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_whose_step_never_ends_is_blamed(place: int) -> None:
    swarm = swarm_of_two()
    started(swarm)
    before = route(swarm)
    stuck = before[place]
    stuck.stuck = True
    swarm.core.on_read("a", 1000, swarm.now)
    swarm.run()
    swarm.wait(8.0)
    assert causes(swarm) == {"overdue"}
    assert ejected(swarm) == {stuck.peer}
    assert stuck not in route(swarm) and route(swarm)[1 - place] is before[1 - place]
    assert swarm.answer("a") == expected([5, 6, 7], 40)


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_that_works_for_others_meanwhile_is_not_blamed(place: int) -> None:
    """Its beats tell of steps: the session's rows wait for their turn, and go on where they are."""
    swarm = swarm_of_two()
    started(swarm)
    before = route(swarm)
    busy = before[place]
    busy.lazy = True  # for us
    swarm.core.on_read("a", 1000, swarm.now)
    for number in range(1, 80):
        swarm.now += 0.1
        for server in swarm.servers.values():
            beat = server.core.heartbeat()
            told = replace(beat, steps=beat.steps + number if server is busy else beat.steps)
            swarm.core.receive(server.peer, told, swarm.now)
        swarm.core.tick(swarm.now)
        swarm.run()
    assert causes(swarm) == {"overdue"} and ejected(swarm) == set()
    assert route(swarm) == before
    busy.lazy = False
    swarm.run()
    assert swarm.answer("a") == expected([5, 6, 7], 40)


def test_loops_for_other_causes_make_nobody_wait_longer_for_a_token() -> None:
    swarm = swarm_of_two()
    started(swarm)
    lazy = route(swarm)[1]
    lazy.lazy = True
    swarm.core.on_read("a", 1000, swarm.now)
    swarm.run()
    for _ in range(3):
        swarm.core._recovery.on_fault(swarm.core._sessions["a"], "link_down", "x/1/y", swarm.now)
        swarm.run()
    swarm.wait(4.0)
    assert causes(swarm) == {"link_down", "overdue"}
    assert ejected(swarm) == {lazy.peer}
    assert swarm.answer("a") == expected([5, 6, 7], 40)
