"""Outlier detection and one-way links: the servers that are ejected, and the effect on their sessions.

Time is virtual. Servers report the step times that their cores measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.server import MODEL, expected

from modelswarm_gateway.core.interface.effects import Ejected, Emitted, MigrationEnded, Rerouted

STEP = 0.01  # seconds per step, and between two looks at the swarm
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


def start_turn(swarm: Swarm, log: Sequence[int]) -> None:
    """Start a turn whose reader is never more than four tokens behind."""
    swarm.gateway.begin("a0", log, TOKENS, ahead=4)


def read(swarm: Swarm, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        if tokens := swarm.gateway.all(Emitted):
            swarm.core.on_read("a0", tokens[-1].position + 1, swarm.now)
        swarm.wait(0.1, STEP)


def route(swarm: Swarm) -> list[str]:
    """Return the peers on the route of the only session."""
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
def test_slow_server_is_ejected_and_its_sessions_migrate(place: int) -> None:
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
    assert slow.peer in swarm.servers and swarm.core._registry.is_connected(slow.peer), (
        "it still runs"
    )
    assert all_right(swarm)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("born", [True, False])
def test_slow_server_is_found_although_its_replica_is_idle(place: int, born: bool) -> None:
    """No step times can be compared, so the session first migrates to the replica. The reader only notices speed."""
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
def test_only_session_stays_while_its_server_is_not_suspected(factor: float) -> None:
    """A server of a type that is three times slower is not faulty."""
    swarm = paced_swarm()
    swarm.gateway.start("a0", [*PROMPT, 0], TOKENS)
    server = swarm.servers[route(swarm)[0]]
    server.step_seconds = factor * STEP
    swarm.wait(30.0, STEP)
    assert not ejected(swarm)
    assert not [each for each in swarm.effects if isinstance(each, MigrationEnded | Rerouted)]
    assert swarm.gateway.tokens("a0") == expected([*PROMPT, 0], TOKENS)


def test_server_twice_as_slow_causes_no_migration() -> None:
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
def test_server_with_one_way_gateway_link_is_ejected(place: int, deaf: bool) -> None:
    """The server hears nothing of the gateway but sends heartbeats, or the gateway hears nothing of the server.

    A head hears of the gateway only when an epoch starts. A deaf head finishes its turn, and is found at the next.
    """
    swarm = paced_swarm()
    swarm.core.open_session("a0", MODEL, swarm.now)
    start_turn(swarm, (*PROMPT, 0))
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
        start_turn(swarm, [*log, 3])
        read(swarm, 20.0)
        assert swarm.gateway.tokens("a0") == expected([*log, 3], TOKENS)
    assert {peer for peer, _ in ejected(swarm)} == {bad}
    assert route(swarm)[1 - place] == before[1 - place] and bad not in route(swarm)
