"""A gateway that stood still for longer than its lease, while others went on with what was its own (R19, R20)."""

from __future__ import annotations

import pytest
from core.takeover.test_takeover import (
    PROMPT,
    SESSION,
    WHOLE,
    adopt,
    go_on,
    half_way,
    owners,
    swarm,
)
from support.core.gateways import LEASE, Gateway, Gateways
from support.core.review_swarm import MODEL, Server

from modelswarm.protocol.messages import Role
from modelswarm_gateway.core.interface.effects import OwnershipLost


def more_servers(made: Gateways) -> list[Server]:
    """Two of each span, linked to every gateway there is."""
    more = [made.serve(0, 2), made.serve(2, 4), made.serve(0, 2), made.serve(2, 4)]
    for server in more:
        for name, gateway in made.gateways.items():
            server.core.on_peer_connected(name, Role.GATEWAY, made.now, f"{name}:8000")
            gateway.core.on_peer_connected(server.hello, made.now)
    return more


def lose(made: Gateways, server: str, *gateways: Gateway) -> None:
    made.servers.pop(server, None)
    for other in made.servers.values():
        other.core.on_peer_lost(server, made.now)
    for gateway in gateways:
        gateway.core.on_peer_lost(server, made.now)


def moved_while_asleep(made: Gateways, first: Gateway, second: Gateway) -> None:
    """The second one has adopted the session, and none of the servers that had it is left."""
    old = list(made.servers)
    more_servers(made)
    made.frozen.add(first.name)
    made.wait(LEASE + 0.2)
    log = adopt(made, second)
    made.turn(second, SESSION, log, len(WHOLE) - len(log), ahead=2)
    made.run()
    for server in old:
        lose(made, server, second)
    made.wait(0.5)
    assert owners(made) == {second.name}
    made.frozen.discard(first.name)
    first.core.tick(made.now)
    for server in old:
        first.core.on_peer_lost(server, made.now)


@pytest.mark.parametrize("number", range(3, 11))
def test_a_gateway_wakes_and_its_session_runs_elsewhere_on_servers_that_never_heard_of_it(
    number: int,
) -> None:
    """`number`: each draws other routes."""
    made = swarm()
    first, second = half_way(made, number), made.gateway(2)
    moved_while_asleep(made, first, second)
    made.wait(2.0)
    assert isinstance(first.last(OwnershipLost), OwnershipLost)
    assert first.core.find_view(SESSION) is None
    assert owners(made) == {second.name}
    assert first.tokens(SESSION) == WHOLE[len(PROMPT) :][: len(first.tokens(SESSION))]
    second.core.on_read(SESSION, len(WHOLE), made.now)
    made.wait(2.0)
    view = second.core.find_view(SESSION)
    assert view is not None and view.length == len(WHOLE)


@pytest.mark.parametrize(("seed", "number"), [(seed, 1 + 2 * (seed % 2)) for seed in range(30)])
def test_of_a_gateway_that_wakes_and_one_that_adopts_meanwhile_one_goes_on(
    seed: int, number: int
) -> None:
    """`number`: of the one that wakes; whose is higher wins when both have come to the same epoch."""
    made = swarm(seed)
    first, second = half_way(made, number), made.gateway(2)
    made.frozen.add(first.name)
    made.wait(LEASE + 0.2)
    where = made.find(second, SESSION)
    log = made.fetch(second, where)
    second.core.take_over(where, MODEL, log, made.now)
    go_on(made, second, list(log.tokens))
    made.frozen.discard(first.name)
    first.core.tick(made.now)
    first.core.on_read(SESSION, len(WHOLE), made.now)
    made.run()
    made.wait(12.0)
    left = [g for g in (first, second) if any(isinstance(e, OwnershipLost) for e in g.effects)]
    assert len(left) == 1
    assert first.core.find_view(SESSION) is None or second.core.find_view(SESSION) is None
    if left == [first]:
        assert [*log.tokens, *second.tokens(SESSION)] == WHOLE
    else:
        assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
