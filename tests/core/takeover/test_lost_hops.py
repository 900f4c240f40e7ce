"""Hops with the only log that were replaced in the route: used again, or closed (R20, ownership)."""

from __future__ import annotations

import pytest
from core.takeover.test_takeover import NEW, PROMPT, SESSION, owners, start_partial_turn
from support.core.gateway import LEASE, add_gateway, takeover_network
from support.core.network import Network

from modelswarm.protocol.messages import Close, Lane, StartEpoch
from modelswarm_gateway.core.interface.effects import MigrationEnded, OwnershipLost
from modelswarm_gateway.core.interface.settings import GatewaySettings


def two_servers() -> Network:
    """Return a network in which every server holds all blocks: a route has one hop, and one log."""
    made = takeover_network()
    made.serve(0, 4)
    made.serve(0, 4)
    return made


def test_lost_hop_that_becomes_a_copy_is_not_closed() -> None:
    """A lost server returns before the first token of the turn, and the server that replaced it is drained."""
    made = two_servers()
    first = add_gateway(made, 1)
    first.start(SESSION, PROMPT, 4, above=0)
    read = [*PROMPT, *first.tokens(SESSION)]
    [lost] = first.route(SESSION)
    made.cut_link(first.peer, lost)
    for server in made.servers.values():
        server.lazy = True
    first.start(SESSION, read, NEW, ahead=2)
    [other] = first.route(SESSION)
    assert other != lost
    made.link(first.peer, lost)
    made.run()
    first.core.migrations.drain(other, "test", made.now)
    made.run()
    for server in made.servers.values():
        server.lazy = False
    made.wait(1.0)
    assert [each.outcome for each in first.all(MigrationEnded)] == ["migrated"]
    assert first.route(SESSION) == [lost]
    assert lost not in [send.to.peer for send in made.sent(Close, first.peer)]


def test_lost_hop_of_parked_session_leaves_a_drained_server() -> None:
    """The client has gone before the new route had the log."""
    made = two_servers()
    first = add_gateway(made, 1, GatewaySettings(lease_seconds=LEASE, max_live_input_tokens=0))
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    [lost] = first.route(SESSION)
    made.held = {(first.peer, server, Lane.BULK) for server in made.servers if server != lost}
    made.cut_link(first.peer, lost)
    made.run()
    assert lost not in first.route(SESSION)
    first.core.cancel_turn(SESSION, made.now)
    made.link(first.peer, lost)
    made.run()
    hops = made.servers[lost].core._fencing.hops
    assert len(hops) == 1
    first.core.migrations.drain(lost, "test", made.now)
    made.wait(0.2)
    assert len(hops) == 0
    assert owners(made) == {first.peer}


def test_replaced_hop_is_closed_when_the_new_route_has_run() -> None:
    """A server answers too late, so the route goes over another one."""
    made = two_servers()
    first = start_partial_turn(made)
    [old] = first.route(SESSION)
    read = [*PROMPT, *first.tokens(SESSION)]
    first.core.cancel_turn(SESSION, made.now)
    made.run()
    made.servers[old].frozen = True
    first.begin(SESSION, read, NEW, ahead=2)
    made.wait(0.6)
    made.servers[old].frozen = False
    made.wait(0.5)
    first.read(SESSION, len(read) + 2)
    assert first.route(SESSION) != [old]
    assert not list(made.servers[old].core._fencing.hops)


def test_hop_replaced_after_its_answer_is_closed_by_a_token() -> None:
    """A server makes no steps, but answers: it is found at fault when its hop has acknowledged the Fence."""
    made = two_servers()
    first = start_partial_turn(made)
    [old] = first.route(SESSION)
    made.servers[old].lazy = True
    first.read(SESSION, len(PROMPT) + 12)
    made.wait(8.0)
    assert first.route(SESSION) != [old]
    assert len(first.tokens(SESSION)) > 12
    assert not list(made.servers[old].core._fencing.hops)


def test_log_outlives_a_session_that_makes_no_token() -> None:
    """The links break in turn, for more than three holds of ten loops each, and then the gateway ends."""
    made = two_servers()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    for server in made.servers.values():
        server.lazy = True
    while "no token in 30 attempts" not in first.view(SESSION).hold_reason:
        [old] = first.route(SESSION)
        made.cut_link(first.peer, old)
        made.tick(0.1)
        made.link(first.peer, old)
        made.run(until=lambda: "no token in 30" in first.view(SESSION).hold_reason)
    made.run(until=lambda: not owners(made))
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    assert second.find(SESSION).log_holders, "both servers are alive"


@pytest.mark.parametrize("later", [0.1, 2.5])
def test_held_session_waits_for_the_server_of_a_replaced_hop(later: float) -> None:
    """It moves from a server that lost its link, and loses all links. Another gateway continues on the first server.

    The link to the second server is back before that to the first.
    """
    made = two_servers()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    [old] = first.route(SESSION)
    [spare] = [peer for peer in made.servers if peer != old]
    made.servers[spare].lazy = True
    made.cut_link(first.peer, old)
    made.wait(0.1)
    assert first.route(SESSION) == [spare]
    made.cut_link(first.peer, spare)
    made.wait(LEASE + 0.2)
    for server in made.servers.values():
        server.lazy = False
    made.cut_link(second.peer, spare)
    log = second.adopt(second.find(SESSION))
    second.start(SESSION, log, NEW, ahead=2)
    assert second.route(SESSION) == [old]
    started = len(made.sent(StartEpoch, first.peer))
    made.link(first.peer, spare)
    made.wait(later)
    made.link(first.peer, old)
    made.wait(1.0)
    assert len(made.sent(StartEpoch, first.peer)) == started
    assert (len(first.all(OwnershipLost)), second.view(SESSION).state) == (1, "running")
