"""Hops of servers without a link that were replaced in the route: used again, or closed (R20, ownership)."""

from __future__ import annotations

from core.takeover.test_returning_gateway import swarm_of_pairs
from core.takeover.test_takeover import NEW, PROMPT, SESSION, owners, start_partial_turn, swarm
from support.core.gateway import add_gateway

from modelswarm.protocol.messages import Close
from modelswarm_gateway.core.interface.effects import MigrationEnded


def test_lost_hop_that_becomes_a_copy_is_not_closed() -> None:
    """A lost server returns before the first token of the turn, and the server that replaced it is drained."""
    made = swarm()
    made.serve(2, 4)
    first = add_gateway(made, 1)
    first.start(SESSION, PROMPT, 4, above=0)
    read = [*PROMPT, *first.tokens(SESSION)]
    head, lost = first.route(SESSION)
    made.cut_link(first.peer, lost)
    for server in made.servers.values():
        server.lazy = True
    first.start(SESSION, read, NEW, ahead=2)
    third = first.route(SESSION)[1]
    assert third != lost
    made.link(first.peer, lost)
    made.run()
    first.core.migrations.drain(third, "test", made.now)
    made.run()
    for server in made.servers.values():
        server.lazy = False
    made.wait(1.0)
    assert [each.outcome for each in first.all(MigrationEnded)] == ["migrated"]
    assert first.route(SESSION) == [head, lost]
    assert lost not in [send.to.peer for send in made.sent(Close, first.peer)]


def test_lost_hop_of_parked_session_leaves_a_drained_server() -> None:
    """The client has gone before the new route gave a token."""
    made = swarm_of_pairs()
    first = start_partial_turn(made)
    lost = first.route(SESSION)[1]
    for server in made.servers.values():
        server.lazy = True
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
