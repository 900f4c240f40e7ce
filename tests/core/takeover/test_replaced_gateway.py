"""A gateway whose process has ended is named by its successor: servers need not wait for its lease (R19, leases)."""

from __future__ import annotations

import random

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import expected

from modelswarm.protocol.identity import NO_HANDLE, Epoch
from modelswarm.protocol.messages import Create, Fence, Lane, Role, Turn
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_serving.core.hops.peers import MAX_ENDED_GATEWAYS, Peers

PROMPT = [random.Random(at).randrange(97) for at in range(12)]
NEW = 40
WHOLE = [*PROMPT, *expected(PROMPT, NEW)]
SESSION = "named"


def swarm() -> tuple[Network, Gateway]:
    """Return two servers, and a gateway in the middle of an answer."""
    made = takeover_network()
    made.serve(0, 2)
    made.serve(2, 4)
    first = add_gateway(made, 1)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    assert 0 < len(first.tokens(SESSION)) < NEW
    return made, first


def owners(made: Network) -> set[str]:
    return {hop.gateway for s in made.servers.values() for hop in s.core._fencing.hops}


@pytest.mark.parametrize("link_is_up", [False, True])
def test_successor_takes_over_without_waiting_for_a_lease(link_is_up: bool) -> None:
    made, first = swarm()
    read = [*PROMPT, *first.tokens(SESSION)]
    (made.remove if link_is_up else made.kill)(first.peer)
    stranger = add_gateway(made, 2)
    found = stranger.find(SESSION)
    assert found.is_owner_alive is link_is_up
    assert found.takeover_wait == pytest.approx(0.0 if link_is_up else LEASE, abs=0.5)

    second = add_gateway(made, 3, replaces=(first.peer,))
    where = second.find(SESSION)

    assert (where.is_owner_alive, where.takeover_wait) == (False, 0.0)
    log = second.adopt(where)
    assert log[: len(read)] == read
    second.start(SESSION, log, len(WHOLE) - len(log))
    assert [*log, *second.tokens(SESSION)] == WHOLE
    assert owners(made) == {second.peer}


def test_late_fence_of_ended_gateway_takes_nothing_back() -> None:
    """The Fence left before the process ended. It comes between the successor's Fence and its StartEpoch."""
    made, first = swarm()
    made.remove(first.peer)
    second = add_gateway(made, 2, replaces=(first.peer,))
    log = second.adopt(second.find(SESSION))
    servers = list(made.servers)
    made.held = {(server, second.peer, Lane.LIVE) for server in servers}
    second.start(SESSION, log, len(WHOLE) - len(log))
    assert owners(made) == {second.peer}

    for server, blocks in zip(servers, ((0, 2), (2, 4)), strict=True):
        create = Create(SESSION, *blocks)
        turn = Turn(len(WHOLE), len(WHOLE))
        late = Fence(NO_HANDLE, 1, Epoch(1000, 1), 0, 0, create, turn)
        made.put(first.peer, server, late)
    made.run()
    made.held = set()
    made.run()

    assert owners(made) == {second.peer}
    assert not second.all(OwnershipLost)
    assert [*log, *second.tokens(SESSION)] == WHOLE


def test_claim_of_ended_gateway_delays_no_successor() -> None:
    made, first = swarm()
    first.find("new", opens=True)
    made.remove(first.peer)
    stranger = add_gateway(made, 2)
    assert stranger.find("new", opens=True).claimant == first.peer
    assert add_gateway(made, 3, replaces=(first.peer,)).find("new", opens=True).claimant == ""


def test_sessions_of_replaced_gateway_are_freed_after_two_leases() -> None:
    made, first = swarm()
    made.kill(first.peer)
    add_gateway(made, 2, replaces=(first.peer,))
    made.wait(2 * LEASE - 0.5)
    assert [server.core.stats.sessions for server in made.servers.values()] == [1, 1]
    made.wait(1.0)
    assert [server.core.stats.sessions for server in made.servers.values()] == [0, 0]


def test_gateway_cannot_end_its_own_lease() -> None:
    made, _ = swarm()
    second = add_gateway(made, 2, replaces=("gateway2/2/a",))
    second.start("own", PROMPT, NEW, above=0)
    assert second.tokens("own") == expected(PROMPT, NEW)


def test_lease_of_ended_gateway_stays_over_after_its_late_link() -> None:
    peers = Peers(LEASE)
    peers.mark_ended("first")
    peers.add_link("first", Role.GATEWAY, "", LEASE, 0.0)
    assert peers.silent_seconds("first", 0.0) >= LEASE
    assert not peers.is_linked("first")
    for number in range(MAX_ENDED_GATEWAYS - 1):
        peers.mark_ended(str(number))
    assert peers.has_ended("first")
    peers.mark_ended("one more")
    assert not peers.has_ended("first")


def test_fetched_log_is_not_cut_to_the_length_found_before() -> None:
    """The hops go on while the successor finds the session. It fetches the log, fences, and ends as well."""
    made, first = swarm()
    for server in made.servers.values():
        server.step_seconds = 0.05
    first.core.on_read(SESSION, len(PROMPT) + 20, made.now)
    made.run()
    second = add_gateway(made, 2, replaces=(first.peer,))
    where = second.find(SESSION)
    for _ in range(10):
        made.now += 0.05
        made.run()
    log = second.adopt(where)
    assert len(log) > max(hop.log for _, hop in where.hops)
    made.run()
    made.kill(second.peer)
    made.wait(LEASE + 0.2)
    third = add_gateway(made, 3)
    assert third.adopt(third.find(SESSION)) == log
