"""Hops of servers without a link that were replaced in the route: used again, or closed (R20, ownership)."""

from __future__ import annotations

from core.takeover.test_takeover import NEW, PROMPT, SESSION, swarm
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
