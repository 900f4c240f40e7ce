"""A gateway was cut off in a turn, and returns when another one has run its session (R19, leases; R20, ownership)."""

from __future__ import annotations

import pytest
from core.takeover.test_takeover import (
    NEW,
    PROMPT,
    SESSION,
    WHOLE,
    adopt,
    owners,
    start_partial_turn,
)
from support.core.gateway import LEASE, TWICE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import Server, expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost

OTHER = [*PROMPT[:5], *(token + 1 if token < 96 else 0 for token in PROMPT[5:])]


def swarm_of_pairs(seed: int | None = None) -> Network:
    """A network with two servers of each span."""
    made = takeover_network(seed)
    for first, last in TWICE:
        made.serve(first, last)
    return made


def cut_off(made: Network, gateway: Gateway) -> None:
    for server in list(made.servers):
        made.cut_link(gateway.peer, server)


def reconnect(made: Network, gateway: Gateway, servers: list[str]) -> None:
    for server in servers:
        made.link(gateway.peer, server)
        made.run()


def run_other_prompt(made: Network, gateway: Gateway) -> None:
    """A gateway takes the session over, runs another prompt, and ends."""
    adopt(made, gateway)
    gateway.start(SESSION, OTHER, NEW)
    assert gateway.tokens(SESSION) == expected(OTHER, NEW)
    made.kill(gateway.peer)
    made.wait(LEASE + 0.2)


def leave_cut_off_turn(made: Network, first: Gateway, second: Gateway) -> list[int]:
    """A gateway is cut off in a turn, and its client leaves. The other one runs another prompt, and is gone.

    Return what was read of that turn.
    """
    read = [*PROMPT, *first.tokens(SESSION)]
    cut_off(made, first)
    made.wait(LEASE / 2)
    first.core.cancel_turn(SESSION, made.now)
    made.wait(LEASE / 2 + 0.2)
    run_other_prompt(made, second)
    return read


def return_to_old_server(made: Network) -> tuple[Gateway, Server, list[int]]:
    """A gateway ran on another server last, which dies. Another one has run on the first server since, and is gone.

    Return the gateway, which has its link again, that server, which is stopped, and what was read.
    """
    made.serve(0, 4)
    made.serve(0, 4)
    first, second = start_partial_turn(made), add_gateway(made, 2)
    [old] = first.route(SESSION)
    [lost] = [peer for peer in made.servers if peer != old]
    made.cut_link(first.peer, old)
    made.wait(0.5)
    first.read(SESSION, len(PROMPT) + 12)
    assert first.route(SESSION) == [lost]
    read = [*PROMPT, *first.tokens(SESSION)]
    made.kill(lost)
    first.core.cancel_turn(SESSION, made.now)
    made.wait(LEASE + 0.2)
    run_other_prompt(made, second)
    made.servers[old].frozen = True
    reconnect(made, first, [old])
    return first, made.servers[old], read


def expect_other_log(made: Network) -> None:
    """The log that ran last is found."""
    found = add_gateway(made, 9).find(SESSION)
    assert found.log_holders, "the log that ran last was there, and its server lives"
    assert len(add_gateway(made, 8).adopt(found)) == len(OTHER) + NEW


@pytest.mark.parametrize("number", range(3, 7))
def test_parked_session_that_another_gateway_ran_is_released(number: int) -> None:
    made = swarm_of_pairs()
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    read = leave_cut_off_turn(made, first, second)
    reconnect(made, first, list(made.servers))
    made.wait(3.0)
    assert [*PROMPT, *first.tokens(SESSION)] == read
    assert first.all(OwnershipLost), "the servers are asked when they are linked"
    found = first.find(SESSION)
    assert len(first.adopt(found)) == len(OTHER) + NEW, "the log that ran last is still there"


@pytest.mark.parametrize("old_first", [True, False])
@pytest.mark.parametrize("number", range(3, 7))
def test_held_session_that_another_gateway_runs_is_released(number: int, old_first: bool) -> None:
    """The links come back one by one, those to servers without the session first or last."""
    made = swarm_of_pairs()
    first, second = start_partial_turn(made, number), add_gateway(made, 2)
    old = first.route(SESSION)
    new = [server for server in made.servers if server not in old]
    cut_off(made, first)
    made.wait(LEASE + 0.2)
    assert first.view(SESSION).state == "held"
    log = adopt(made, second)
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=2)
    before = len(first.tokens(SESSION))
    second_route = second.route(SESSION)
    reconnect(made, first, [*old, *new] if old_first else [*new, *old])
    made.wait(3.0)
    assert first.all(OwnershipLost)
    assert not second.all(OwnershipLost)
    assert len(first.tokens(SESSION)) == before
    assert owners(made) == {second.peer}
    assert second.route(SESSION) == second_route
    second.read(SESSION, len(WHOLE))
    assert [*log, *second.tokens(SESSION)] == WHOLE


@pytest.mark.parametrize("number", range(3, 7))
def test_held_session_goes_on_if_it_was_not_taken(number: int) -> None:
    made = swarm_of_pairs()
    first = start_partial_turn(made, number)
    cut_off(made, first)
    made.wait(LEASE + 0.2)
    reconnect(made, first, list(made.servers))
    made.wait(1.0)
    first.read(SESSION, len(WHOLE))
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
    assert owners(made) == {first.peer}


def test_cut_off_parked_session_is_searched_for() -> None:
    """Another gateway has moved it. The servers of its old hops are linked again, which know nothing of it."""
    made = swarm_of_pairs()
    first = start_partial_turn(made)
    old = first.route(SESSION)
    first.core.cancel_turn(SESSION, made.now)
    made.run()
    made.cut_link(first.peer, old[0])
    assert first.view(SESSION).is_reachable, "a server of its route had a link all the time"
    cut_off(made, first)
    assert not first.view(SESSION).is_reachable
    reconnect(made, first, old)
    assert not first.view(SESSION).is_reachable
    read = [*PROMPT, *first.tokens(SESSION)]
    first.start(SESSION, read, len(WHOLE) - len(read))
    assert first.view(SESSION).is_reachable, "the servers were asked before it ran"


def move_elsewhere(made: Network) -> tuple[Gateway, Gateway, list[PeerId], list[PeerId]]:
    """Cut a gateway off, and let another one move its session to other servers.

    Return both gateways, the old servers and the new ones.
    """
    first, second = start_partial_turn(made), add_gateway(made, 2)
    old = first.route(SESSION)
    new = [server for server in made.servers if server not in old]
    cut_off(made, first)
    made.wait(LEASE + 0.2)
    log = adopt(made, second)
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=2)
    for server in old:
        second.core.migrations.drain(server, "test", made.now)
    made.wait(3.0)
    assert set(second.route(SESSION)) == set(new)
    return first, second, old, new


def test_held_session_waits_for_servers_on_which_it_had_no_hop() -> None:
    """Another gateway has moved it to other servers. The old ones, which know nothing of it, are linked first."""
    made = swarm_of_pairs()
    first, second, old, new = move_elsewhere(made)
    started = len(made.sent(StartEpoch, first.peer))
    reconnect(made, first, old)
    made.wait(2.5)
    reconnect(made, first, new)
    made.wait(1.0)
    assert len(made.sent(StartEpoch, first.peer)) == started
    assert (len(first.all(OwnershipLost)), second.view(SESSION).state) == (1, "running")
