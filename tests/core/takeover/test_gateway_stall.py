"""A gateway that stalls beyond its lease while another one continues its session (R19, leases; R20, takeover)."""

from __future__ import annotations

import random

import pytest
from core.takeover.test_takeover import (
    NEW,
    PROMPT,
    SESSION,
    WHOLE,
    adopt,
    owners,
    start_partial_turn,
    swarm,
)
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import expected

from modelswarm_gateway.core.interface.effects import OwnershipLost


def lose(made: Network, server: str, *gateways: Gateway) -> None:
    """A server ends; of the gateways, only these are told."""
    made.remove(server)
    for actor in (*made.servers.values(), *gateways):
        actor.disconnect(server, made.now)


def move_during_stall(made: Network, first: Gateway, second: Gateway) -> None:
    """Let the second gateway take the session over while the first one stalls, and remove all servers that had it."""
    old = list(made.servers)
    for first_block in (0, 2, 0, 2):
        made.serve(first_block, first_block + 2)
    first.frozen = True
    made.wait(LEASE + 0.2)
    log = adopt(made, second)
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=2)
    for server in old:
        lose(made, server, second)
    made.wait(0.5)
    assert owners(made) == {second.peer}
    first.frozen = False
    first.core.tick(made.now)
    for server in old:
        first.core.on_peer_lost(server, made.now)


@pytest.mark.parametrize("number", range(3, 11))
def test_waking_gateway_releases_session_on_other_servers(number: int) -> None:
    """`number`: of the stalled gateway; each draws other routes."""
    made = swarm()
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    move_during_stall(made, first, second)
    made.wait(2.0)
    assert isinstance(first.last(OwnershipLost), OwnershipLost)
    assert first.core.find_view(SESSION) is None
    assert owners(made) == {second.peer}
    assert first.tokens(SESSION) == WHOLE[len(PROMPT) :][: len(first.tokens(SESSION))]
    second.core.on_read(SESSION, len(WHOLE), made.now)
    made.wait(2.0)
    view = second.core.find_view(SESSION)
    assert view is not None and view.length == len(WHOLE)


@pytest.mark.parametrize(("seed", "number"), [(seed, 1 + 2 * (seed % 2)) for seed in range(30)])
def test_one_of_waking_gateway_and_new_owner_continues(seed: int, number: int) -> None:
    """The first gateway wakes at some moment of the takeover.

    `number`: of the waking gateway; the higher one wins when both have reached the same epoch.
    """
    made = takeover_network(seed)
    for first_block, last_block in ((0, 1), (1, 3), (3, 4)):
        made.serve(first_block, last_block)
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    first.frozen = True
    made.wait(LEASE + 0.2)
    where = second.find(SESSION)
    second.adopt(where)
    second.begin(SESSION, read, NEW)
    made.run(events=random.Random(seed).randrange(40))
    first.frozen = False
    first.core.tick(made.now)
    first.read(SESSION, len(WHOLE))
    made.wait(12.0)
    left = [g for g in (first, second) if g.all(OwnershipLost)]
    assert len(left) == 1
    assert first.core.find_view(SESSION) is None or second.core.find_view(SESSION) is None
    if left == [first]:
        assert second.tokens(SESSION) == expected(read, NEW)
    else:
        assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
