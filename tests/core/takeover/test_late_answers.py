"""Servers that answer late, or not at all, when a gateway asks for the owner of a session (R19, leases; R20)."""

from __future__ import annotations

from core.takeover.test_returning_gateway import (
    expect_other_log,
    return_to_old_server,
    swarm_of_pairs,
)
from core.takeover.test_takeover import (
    NEW,
    PROMPT,
    SESSION,
    WHOLE,
    start_partial_turn,
    swarm,
)
from support.core.gateway import LEASE, takeover_network
from support.core.network import Network
from support.core.server import Options

from modelswarm.protocol.messages import Lane
from modelswarm_gateway.core.interface.effects import Ejected, OwnershipLost


def test_suspected_server_gets_no_create_before_it_answers() -> None:
    """The session has run there since, at a gateway that has ended. The server is stopped, and known to be silent."""
    made = takeover_network()
    first, server, read = return_to_old_server(made)
    del made.lanes[first.peer, server.peer, Lane.LIVE]  # the question that followed the link
    server.frozen = False
    first.start("unnamed", PROMPT, NEW, ahead=2)
    server.frozen = True
    made.wait(2.5)
    assert [each.peer for each in first.all(Ejected)] == [server.peer]
    first.begin(SESSION, read, len(WHOLE) - len(read))
    made.wait(0.6)
    server.frozen = False
    made.wait(1.0)
    assert first.all(OwnershipLost)
    expect_other_log(made)


def test_held_session_goes_on_as_soon_as_its_server_answers() -> None:
    """The tail dies a second time in the turn. The next server that connects is asked, and answers at once.

    After the first hold, of more than half a lease, the gateway waits 3 s for a link to the dead server.
    """
    made = Network(None, Options(lease_seconds=4.0))
    made.serve(0, 2)
    tail = made.serve(2, 4)
    first = start_partial_turn(made)
    made.kill(tail.peer)
    made.wait(3.0)
    assert first.view(SESSION).state == "held"
    tail = made.serve(2, 4)
    made.wait(4.0)
    first.read(SESSION, len(PROMPT) + 12)
    assert first.view(SESSION).state == "running"
    made.kill(tail.peer)
    made.wait(0.5)
    assert first.view(SESSION).state == "held"
    made.serve(2, 4)
    made.run()
    assert first.view(SESSION).state == "running"


def test_unknown_hop_does_not_wait_for_a_stopped_server() -> None:
    """The tail has dropped its hop. A server beside the route is stopped, and does not say that it has none."""
    made = swarm()
    made.serve(0, 2)
    first = start_partial_turn(made)
    head, tail = first.route(SESSION)
    [spare] = set(made.servers) - {head, tail}
    first.core.cancel_turn(SESSION, made.now)
    made.run()
    read = [*PROMPT, *first.tokens(SESSION)]
    fencing = made.servers[tail].core._fencing
    for hop in list(fencing.hops):
        fencing.free_hop(hop)
    made.servers[spare].frozen = True
    first.start(SESSION, read, len(WHOLE) - len(read))
    made.wait(1.0)
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
    assert not first.all(Ejected)


def test_kept_hop_is_used_although_its_server_answers_late() -> None:
    """The gateway was stopped. When it goes on, the answers of one server come late; a replica has answered."""
    made = swarm_of_pairs()
    first = start_partial_turn(made)
    route = first.route(SESSION)
    rows = [server.core.stats.rows for server in made.servers.values()]
    first.frozen = True
    made.wait(0.7 * LEASE)
    first.frozen = False
    made.held.add((route[0], first.peer, Lane.LIVE))
    made.wait(0.4)
    made.held.clear()
    made.wait(2.0)
    first.read(SESSION, len(WHOLE))
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
    assert first.route(SESSION) == route
    ran = sum(server.core.stats.rows for server in made.servers.values()) - sum(rows)
    assert ran <= 2 * NEW, "no row is run again"
