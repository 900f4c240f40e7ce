"""A gateway that stalls beyond its lease while another one continues its session (R19, leases; R20, takeover)."""

from __future__ import annotations

import random

import pytest
from core.takeover.test_returning_gateway import move_elsewhere, reconnect, swarm_of_pairs
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
from support.core.server import MODEL, expected

from modelswarm.protocol.messages import StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch


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
    """Each `number` of the stalled gateway draws other routes."""
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


@pytest.mark.parametrize("seconds", [2.0, 4.0, 4.8])  # half a lease are 5
@pytest.mark.parametrize("is_first", [False, True])
def test_stall_shortens_no_wait_for_servers(seconds: float, is_first: bool) -> None:
    """X waits 3 s for the servers on which Y runs the session, and is stalled for a part of the time or longer.

    `is_first`: the first event after the stall is the link of a server without sessions, before any tick.
    """
    made = swarm_of_pairs()
    first, second, old, new = move_elsewhere(made)
    started = len(made.sent(StartEpoch, first.peer))
    reconnect(made, first, old)
    made.wait(1.0)
    first.frozen = True
    made.wait(seconds)
    first.frozen = False
    if is_first:
        made.serve(0, 2)
        made.run()
    made.wait(0.5)
    for server in new:
        reconnect(made, first, [server])
        made.wait(0.4)
    assert len(made.sent(StartEpoch, first.peer)) == started, "two gateways ran the session"
    made.wait(1.0)
    assert (len(first.all(OwnershipLost)), second.view(SESSION).state) == (1, "running")


def wake(gateway: Gateway) -> None:
    gateway.frozen = False
    gateway.core.tick(gateway.network.now)
    gateway.core.on_read(SESSION, len(WHOLE), gateway.network.now)


@pytest.mark.parametrize(("seed", "number"), [(seed, 1 + 2 * (seed % 2)) for seed in range(20)])
@pytest.mark.parametrize("wakes", ["long before", "before", "after"])
def test_one_of_waking_gateway_and_new_owner_continues(seed: int, number: int, wakes: str) -> None:
    """The first gateway wakes before or after the other one, which has fetched the log, begins its turn.

    `number`: of the waking gateway; of equal counters, its epochs are below or above those of the other one.
    """
    made, draws = takeover_network(seed), random.Random(seed)
    for first_block, last_block in ((0, 1), (1, 3), (3, 4)):
        made.serve(first_block, last_block)
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    first.frozen = True
    made.wait(LEASE + 0.2)
    where = second.find(SESSION)
    log = second.fetch(where)
    if wakes != "after":
        wake(first)
        made.run(events=1_000_000 if wakes == "long before" else draws.randrange(600))
    second.core.take_over(where, MODEL, log, made.now)
    second.begin(SESSION, read, NEW)
    if wakes == "after":
        made.run(events=draws.randrange(40))
        wake(first)
    made.wait(12.0)
    left = [g for g in (first, second) if g.all(OwnershipLost)]
    assert len(left) == 1
    assert first.core.find_view(SESSION) is None or second.core.find_view(SESSION) is None
    if wakes == "long before":
        assert left == [second]
    if left == [first]:
        assert second.tokens(SESSION) == expected(read, NEW)
    else:
        assert [*PROMPT, *first.tokens(SESSION)] == WHOLE


@pytest.mark.parametrize("number", range(3, 9))
def test_gateway_whose_only_server_ended_asks_for_the_owner(number: int) -> None:
    """A gateway stalls for less than half a lease. Its session's only server ends, and another gateway opens the name.

    Each `number` of the stalled gateway draws another server. Its counter is low, and the name is opened later.
    """
    made = takeover_network()
    for _ in range(3):
        made.serve(0, 4)
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    [lost] = first.route(SESSION)
    first.frozen = True
    lose(made, lost, second)
    made.wait(0.5)
    where = second.find(SESSION, opens=True)
    assert not where.log_holders
    second.start(SESSION, PROMPT, NEW, ahead=2, above=lowest_epoch(where.epoch.counter, made.now))
    made.wait(1.0)
    first.frozen = False
    first.core.on_peer_lost(lost, made.now)
    made.wait(1.0)
    states = [each.core.find_view(SESSION) for each in (first, second)]
    assert [view.state for view in states if view is not None] == ["running"]
