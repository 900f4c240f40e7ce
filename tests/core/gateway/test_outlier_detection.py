"""Servers whose steps take time, and links that work one way only: who is blamed, and what it costs the sessions.

Time is made up; what servers say of their steps is what their cores measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.server import MODEL, expected

from modelswarm_gateway.core.interface.effects import Ejected, Emitted, MigrationEnded, Rerouted

STEP = 0.01  # seconds; the world is looked at so often
SESSIONS = 4
TOKENS = 200
PROMPT = [5, 6, 7]


def paced_swarm() -> Swarm:
    swarm = swarm_of(*TWICE)
    for server in swarm.servers.values():
        server.step_seconds = STEP
    return swarm


def start(swarm: Swarm) -> None:
    for number in range(SESSIONS):
        name = f"a{number}"
        swarm.gateway.begin(name, [*PROMPT, number], TOKENS)
    swarm.run()


def hops(swarm: Swarm, place: int) -> list[str]:
    return [view.route[place].peer for view in swarm.core.session_views()]


def ask(swarm: Swarm, log: Sequence[int]) -> None:
    """A turn whose reader is never more than four tokens behind."""
    swarm.gateway.begin("a0", log, TOKENS, ahead=4)


def read(swarm: Swarm, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        if said := swarm.gateway.all(Emitted):
            swarm.core.on_read("a0", said[-1].position + 1, swarm.now)
        swarm.wait(0.1, STEP)


def route(swarm: Swarm) -> list[str]:
    """Of the only session."""
    [view] = swarm.core.session_views()
    return [hop.peer for hop in view.route]


def all_right(swarm: Swarm) -> bool:
    return all(
        swarm.gateway.tokens(f"a{number}") == expected([*PROMPT, number], TOKENS)
        for number in range(SESSIONS)
    )


def ejected(swarm: Swarm) -> set[tuple[str, str]]:
    return {(each.peer, each.cause) for each in swarm.gateway.all(Ejected)}


@pytest.mark.parametrize("place", [0, 1])
def test_a_server_twenty_times_slower_is_drained_from_and_its_sessions_see_no_fault(
    place: int,
) -> None:
    swarm = paced_swarm()
    start(swarm)
    swarm.wait(0.5, STEP)
    slow = swarm.servers[hops(swarm, place)[0]]
    slow.step_seconds = 20 * STEP
    swarm.wait(20.0, STEP)
    assert ejected(swarm) == {(slow.peer, "slow")}
    assert not swarm.gateway.all(Rerouted)
    moved = swarm.gateway.all(MigrationEnded)
    assert moved and {(each.peer, each.outcome) for each in moved} == {(slow.peer, "migrated")}
    assert slow.peer in swarm.servers and swarm.core._registry.is_connected(slow.peer), "it lives"
    assert all_right(swarm)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("born", [True, False])
def test_the_server_of_the_only_session_is_found_although_its_equal_rests(
    place: int, born: bool
) -> None:
    """Nothing it does can be compared: the session goes to the equal first, and its reader notices only the speed."""
    swarm = paced_swarm()
    swarm.gateway.start("a0", [*PROMPT, 0], 2 * TOKENS)
    if not born:
        swarm.wait(1.0, STEP)
    slow = swarm.servers[route(swarm)[place]]
    slow.step_seconds = 20 * STEP
    swarm.wait(30.0, STEP)
    assert ejected(swarm) == {(slow.peer, "slow")}
    assert not swarm.gateway.all(Rerouted)
    moved = swarm.gateway.all(MigrationEnded)
    assert [(each.peer, each.outcome) for each in moved] == [(slow.peer, "migrated")]
    assert swarm.gateway.tokens("a0") == expected([*PROMPT, 0], 2 * TOKENS)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_only_session_stays_where_it_is_while_nothing_looks_slow(factor: float) -> None:
    """Of a type that is slower, and is no fault."""
    swarm = paced_swarm()
    swarm.gateway.start("a0", [*PROMPT, 0], TOKENS)
    server = swarm.servers[route(swarm)[0]]
    server.step_seconds = factor * STEP
    swarm.wait(30.0, STEP)
    assert not ejected(swarm)
    assert not [each for each in swarm.effects if isinstance(each, MigrationEnded | Rerouted)]
    assert swarm.gateway.tokens("a0") == expected([*PROMPT, 0], TOKENS)


def test_a_machine_that_is_twice_as_slow_is_no_reason_to_move() -> None:
    swarm = paced_swarm()
    start(swarm)
    for number, server in enumerate(swarm.servers.values()):
        server.step_seconds = STEP * (1 + number % 2)
    swarm.wait(10.0, STEP)
    assert not ejected(swarm)
    assert not [each for each in swarm.effects if isinstance(each, MigrationEnded | Rerouted)]
    assert all_right(swarm)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("deaf", [True, False])
def test_a_server_with_a_link_to_the_gateway_that_works_one_way_is_blamed(
    place: int, deaf: bool
) -> None:
    """It hears nothing of the gateway, and says that it lives; or the gateway hears nothing of it.

    A head hears of the gateway only when a route begins: one that is deaf serves its turn to the end, and is found at
    the next.
    """
    swarm = paced_swarm()
    swarm.core.open_session("a0", MODEL, swarm.now)
    ask(swarm, (*PROMPT, 0))
    swarm.wait(0.5, STEP)
    before = route(swarm)
    bad = before[place]
    sender, receiver = (swarm.gateway.peer, bad) if deaf else (bad, swarm.gateway.peer)
    swarm.drop(sender, receiver)
    read(swarm, 20.0)
    log = [*PROMPT, 0, *swarm.gateway.tokens("a0")]
    assert log == [*PROMPT, 0, *expected([*PROMPT, 0], TOKENS)]
    if deaf and place == 0:
        assert route(swarm) == before and not ejected(swarm)
        swarm.effects.clear()
        ask(swarm, [*log, 3])
        read(swarm, 20.0)
        assert swarm.gateway.tokens("a0") == expected([*log, 3], TOKENS)
    assert {peer for peer, _ in ejected(swarm)} == {bad}
    assert route(swarm)[1 - place] == before[1 - place] and bad not in route(swarm)
