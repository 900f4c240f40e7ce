"""Who may open a name, or use what is kept of it, when several gateways are asked for it (R20)."""

from __future__ import annotations

import pytest
from core.takeover.test_takeover import NEW, PROMPT, SESSION, owners, swarm
from support.core.gateway import LEASE, Gateway, add_gateway
from support.core.named_sessions import KEY, NAME, Desk
from support.core.network import Network
from support.core.server import MODEL

from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_serving.core.session_lookup import CLAIM_SECONDS


def wide(seed: int | None = None) -> Network:
    """Two routes that share no server."""
    made = swarm(seed)
    made.serve(0, 2)
    made.serve(2, 4)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_of_two_gateways_that_want_a_new_name_at_once_at_most_one_is_told_to_open_it(
    seed: int,
) -> None:
    made = wide(seed)
    both = [add_gateway(made, 1), add_gateway(made, 2)]
    for gateway in both:
        gateway.core.find_session(SESSION, MODEL, made.now, claims=True)
    made.run()
    free = [gateway for gateway in both if not whereabouts(gateway).claimant]
    assert len(free) < 2
    if not free:  # each was first somewhere: they try again, not at once
        made.wait(CLAIM_SECONDS + 0.1)
        assert not both[0].find(SESSION, opens=True).claimant
        free = both[:1]
    (other,) = [gateway for gateway in both if gateway not in free]
    assert other.find(SESSION, opens=True).claimant == free[0].peer
    free[0].start(SESSION, PROMPT, NEW, above=0)
    assert other.find(SESSION, opens=True).is_owner_alive


def test_who_wanted_to_open_a_name_and_did_not_keeps_nobody_out_for_long() -> None:
    made = wide()
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    for _ in range(3):
        assert not first.find(SESSION, opens=True).claimant, "it may ask as often as it likes"
        assert second.find(SESSION).claimant == first.peer
    made.wait(CLAIM_SECONDS)
    assert not second.find(SESSION, opens=True).claimant
    assert first.find(SESSION, opens=True).claimant == second.peer
    made.kill(second.peer)
    assert not first.find(SESSION, opens=True).claimant


def whereabouts(gateway: Gateway) -> SessionLocation:
    return gateway.last(SessionLocation)


def test_an_answer_to_an_earlier_search_is_not_taken_for_one_to_this() -> None:
    """X slept for 2.5 s after its Find; what it reads then is from before Y opened the name."""
    made = wide()
    x, y = add_gateway(made, 1), add_gateway(made, 2)
    x.core.find_session(SESSION, MODEL, made.now, claims=True)
    made.collect()
    x.frozen = True
    made.run()  # the servers answer; X reads nothing
    made.wait(CLAIM_SECONDS + 0.5)
    assert not y.find(SESSION, opens=True).claimant
    y.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    x.frozen = False
    x.core.tick(
        made.now
    )  # "items that came while we stalled are read after the tick that ends the stall"
    x.core.find_session(
        SESSION, MODEL, made.now, claims=True
    )  # Finder._alone: `asked` was too long ago
    made.run()
    where = whereabouts(x)
    assert where.is_owner_alive or where.claimant, where


def test_an_answer_that_came_late_is_not_taken_for_one_to_the_next_search() -> None:
    """X polls (opens=False) while Y is the opener; the answers take 0.4 s."""
    made = wide()
    x, y = add_gateway(made, 1), add_gateway(made, 2)
    assert not y.find(SESSION, opens=True).claimant
    assert x.find(SESSION, opens=True).claimant == y.peer
    made.wait(CLAIM_SECONDS)  # Y's client went away before its turn
    x.core.find_session(SESSION, MODEL, made.now)  # the poll: nobody is before us
    made.collect()
    x.frozen = True
    made.run()
    assert not y.find(SESSION, opens=True).claimant  # Y's client is back
    y.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    made.now += 0.4
    x.frozen = False
    x.core.tick(made.now)  # the poll is over without an answer
    x.core.find_session(SESSION, MODEL, made.now, claims=True)
    made.run()
    where = whereabouts(x)
    assert where.is_owner_alive or where.claimant, where


def test_a_session_left_before_its_first_go_is_not_kept_unseen() -> None:
    """Its hops are closed, and its gateway keeps it."""
    made = wide()
    x, y = Desk(add_gateway(made, 1)), Desk(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    x.gateway.core.cancel_turn(NAME, made.now)  # the client went before Fenced came
    x.book.release(KEY)
    made.run()
    made.wait(5.0)
    y.turn(PROMPT, NEW)
    made.run()
    assert owners(made) == {y.gateway.peer}
    with pytest.raises(OwnedElsewhere):
        x.turn(PROMPT, NEW)
    made.run()
    assert owners(made) == {y.gateway.peer}


def test_a_gateway_that_was_cut_off_awake_asks_who_has_its_session_now() -> None:
    """Not asleep: its links broke for two leases, and came back."""
    made = wide()
    x, y = Desk(add_gateway(made, 1)), Desk(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    made.run()
    x.book.release(KEY)
    for server in made.servers:
        made.drop(x.gateway.peer, server)
        made.cut_link(x.gateway.peer, server)
    made.wait(LEASE + 0.5)  # it is awake all the time
    log = [*PROMPT, *x.gateway.tokens(NAME)]
    y.turn([*log, 1, 2, 3], NEW)  # adopted
    made.run()
    y.book.release(KEY)
    assert owners(made) == {y.gateway.peer}
    before = {s for s, server in made.servers.items() if list(server.core._fencing.hops)}
    for peer in before:  # a drain, a repair: it moves to the other two, and closes those hops
        y.gateway.core.migrations.drain(peer, "drain", made.now)
    y.turn([*log, 1, 2, 3, 4], NEW, ahead=8)
    made.run()
    made.wait(6.0)
    after = {s for s, server in made.servers.items() if list(server.core._fencing.hops)}
    assert not before & after, "it has moved"
    made.dropped.clear()
    for server in made.servers:
        made.link(x.gateway.peer, server)
    made.run()
    x.turn(log, NEW)
    made.run()
    assert owners(made) == {y.gateway.peer}


def test_a_server_that_stood_still_does_not_forget_who_is_about_to_open() -> None:
    """X's Fences wait in the servers' sockets while they stand still for 2.1 s; Y's Find is read first."""
    made = wide()
    x, y = add_gateway(made, 1), add_gateway(made, 2)
    assert not x.find(SESSION, opens=True).claimant
    for server in made.servers.values():
        server.frozen = True
    x.begin(SESSION, PROMPT, NEW, ahead=8, above=0)
    made.collect()
    made.now += CLAIM_SECONDS + 0.1
    y.core.find_session(SESSION, MODEL, made.now, claims=True)
    made.collect()
    for server in made.servers.values():
        server.frozen = False
    for server in made.servers.values():
        made.deliver_all(y.peer, server.peer)
        made.deliver_all(server.peer, y.peer)
    where = whereabouts(y)
    assert where.is_owner_alive or where.claimant, where
