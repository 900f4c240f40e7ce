"""Leftovers of an owner: what its hops, its log and its epochs are worth later (R19: leases, R20: ownership)."""

from __future__ import annotations

import pytest
from core.takeover.test_returning_gateway import (
    expect_other_log,
    leave_cut_off_turn,
    reconnect,
    return_to_old_server,
    swarm_of_pairs,
)
from core.takeover.test_rival_takeovers import start_rivals
from core.takeover.test_takeover import (
    NEW,
    PROMPT,
    SESSION,
    WHOLE,
    adopt,
    start_partial_turn,
    swarm,
)
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import MODEL, Options

from modelswarm.protocol.identity import NO_GATEWAY, PeerId
from modelswarm.protocol.messages import Lane, Sampling, StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings


def running(*gateways: Gateway) -> list[str]:
    views = [(each.peer, each.core.find_view(SESSION)) for each in gateways]
    return [peer for peer, view in views if view is not None and view.state == "running"]


def test_start_that_ran_nowhere_makes_no_second_owner() -> None:
    """A gateway loses its route, fences the spare servers, and its StartEpochs are lost with their links.

    The spare hops end after 5 s, so no server knows that epoch. Another gateway takes over and runs. The first one
    returns: its last started epoch is higher than the one that runs.
    """
    made = swarm_of_pairs()
    first, second = start_partial_turn(made, 6), add_gateway(made, 2)
    old = first.route(SESSION)
    spare = [server for server in made.servers if server not in old]
    for server in old:
        made.cut_link(first.peer, server)
    lanes = [(first.peer, each, Lane.LIVE) for each in spare]
    made.run(
        until=lambda: all(
            any(isinstance(item, StartEpoch) for item in made.lanes.get(lane, ())) for lane in lanes
        )
    )
    for server in spare:
        made.cut_link(first.peer, server)  # the StartEpochs are lost
    made.wait(LEASE + 0.2)
    assert first.view(SESSION).state == "held"
    log = adopt(made, second)
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=2)
    assert running(second) == [second.peer]
    reconnect(made, first, [*spare, *old])
    made.wait(5.0)
    assert len(running(first, second)) == 1, "all servers are in reach of both"


def test_late_refusal_of_a_closed_hop_ends_no_session() -> None:
    """The lower gateway has started the tail only. The higher one takes the head.

    It takes another tail, because the answer of the first is late. The lower one lets go. Then the refusal comes.
    """
    rivals = start_rivals()
    network, low, high = rivals.network, rivals.low, rivals.high
    third = network.serve(2, 4)
    network.run()
    rivals.take_over(low)
    network.run()
    rivals.begin(low, rivals.log, Sampling())
    rivals.run_until_start(low)
    rivals.hold(low, rivals.head)
    network.deliver_all(low.peer, rivals.tail.peer)  # the tail runs for the lower one
    rivals.hold_answers(high, rivals.tail)
    rivals.take_over(high)
    high.begin(SESSION, rivals.log, NEW, ahead=4)
    network.wait(3.0)  # the answer of the tail is overdue
    assert running(high) == [high.peer]
    assert high.route(SESSION) == [rivals.head.peer, third.peer]
    network.held -= {(low.peer, rivals.head.peer, Lane.LIVE)}
    network.wait(1.0)
    before = rivals.losers
    rivals.release()
    network.wait(3.0)
    assert rivals.losers == [low.peer], f"first {before}, then {rivals.losers}"
    assert set(rivals.owners) == {high.peer, NO_GATEWAY}, "the lower one has left its tail"


def take_over_beside_leftover(
    made: Network, head: PeerId, lost: PeerId
) -> tuple[Gateway, PeerId, list[int]]:
    """A tail server is cut off from everyone while its session moves on. Its hop there is of a gateway that resigns.

    Return the gateway that takes the session over, the tail that it uses, and the log that it found.
    """
    first, second = start_partial_turn(made), add_gateway(made, 2)
    for peer in list(made.peers_of(lost)):
        made.cut_link(peer, lost)
    third = made.serve(2, 4)
    made.cut_link(third.peer, lost)
    made.wait(0.5)
    first.read(SESSION, len(PROMPT) + 8)
    assert first.route(SESSION) == [head, third.peer]
    first.core.relinquish_sessions(made.now)  # SIGTERM
    made.run()
    made.kill(first.peer)
    log = adopt(made, second)
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=4)
    assert second.route(SESSION) == [head, third.peer]
    return second, third.peer, log


def test_hop_of_a_dead_gateway_ends_no_session() -> None:
    """The new owner needs the server that was cut off, and is refused until the lease of the dead gateway ends."""
    made = swarm()
    head, lost = list(made.servers)
    second, third, log = take_over_beside_leftover(made, head, lost)
    for peer in (head, second.peer):
        made.link(peer, lost)
    made.run()
    made.kill(third)  # now it needs the server that was cut off
    made.wait(2 * LEASE)
    assert not second.all(OwnershipLost), "no other gateway is alive"
    second.read(SESSION, len(WHOLE))
    assert [*log, *second.tokens(SESSION)] == WHOLE


def test_refused_copy_ends_no_running_session() -> None:
    """The third server is drained: the copy to the server that was cut off is refused twice."""
    made = swarm()
    head, lost = list(made.servers)
    second, third, _ = take_over_beside_leftover(made, head, lost)
    for peer in (head, second.peer, third):
        made.link(peer, lost)
    made.run()
    second.core.migrations.drain(third, "test", made.now)
    made.wait(5.0)
    assert not second.all(OwnershipLost), "it runs, and no other gateway is alive"


@pytest.mark.parametrize("lease", [0.5, 2.0])
def test_held_session_goes_on_without_a_dead_server(lease: float) -> None:
    """A held session waits 0.3 s for the answer of a dead server, and half a short lease is less than that."""
    made = Network(None, Options(lease_seconds=lease))
    made.serve(0, 2)
    tail = made.serve(2, 4)
    first = start_partial_turn(made)
    made.kill(tail.peer)
    made.wait(lease)
    assert first.view(SESSION).state == "held"
    made.serve(2, 4)
    made.wait(5.0)
    first.read(SESSION, len(WHOLE))
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE


def test_log_of_a_stalled_server_survives_a_returning_gateway() -> None:
    """The servers answer the question after 0.3 s, and the Fence that follows it on the same lane frees the hops."""
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    read = leave_cut_off_turn(made, first, second)
    for server in made.servers.values():
        server.frozen = True
    for peer in made.servers:
        made.link(first.peer, peer)
    first.begin(SESSION, read, len(WHOLE) - len(read))
    made.wait(0.6)
    for server in made.servers.values():
        server.frozen = False
    made.wait(1.0)
    assert first.all(OwnershipLost)
    expect_other_log(made)


def test_log_is_found_when_the_new_route_has_no_input() -> None:
    """A gateway loses its links to the route, starts a new one, and ends before the log has arrived there."""
    made = swarm_of_pairs()
    settings = GatewaySettings(lease_seconds=LEASE, max_live_input_tokens=0)
    first = add_gateway(made, 1, settings)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    second = add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    old = first.route(SESSION)
    spare = [server for server in made.servers if server not in old]
    made.held |= {(first.peer, each, Lane.BULK) for each in spare}
    for server in old:
        made.cut_link(first.peer, server)
    made.run()
    made.held.clear()
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    found = second.find(SESSION)
    assert found.log_holders, "the old route has the log"
    assert second.adopt(found)[: len(read)] == read


def test_newest_log_survives_a_create_of_a_returning_gateway() -> None:
    """The same, but its route is on another server now, so its Fence is a create."""
    made = Network(None, Options(lease_seconds=LEASE))
    one, other = made.serve(0, 4), made.serve(0, 4)
    first, second = start_partial_turn(made), add_gateway(made, 2)
    [old] = first.route(SESSION)
    [spare] = [peer for peer in (one.peer, other.peer) if peer != old]
    read = leave_cut_off_turn(made, first, second)
    made.kill(spare)
    server = made.servers[old]
    server.frozen = True
    reconnect(made, first, [old])
    first.begin(SESSION, read, len(WHOLE) - len(read))
    made.wait(0.6)
    server.frozen = False
    made.wait(1.0)
    expect_other_log(made)


def test_returning_gateway_creates_no_hop_before_the_answer() -> None:
    """It ran on another server last, so it has no hop on the server where the session has run since."""
    made = takeover_network()
    first, server, read = return_to_old_server(made)
    first.begin(SESSION, read, len(WHOLE) - len(read))
    made.wait(0.6)
    server.frozen = False
    made.wait(1.0)
    assert first.all(OwnershipLost)
    expect_other_log(made)


def test_session_migrates_to_no_server_before_its_answer() -> None:
    """It goes on at a third server, which is drained while the one where it has run since is stopped."""
    made = takeover_network()
    first, server, read = return_to_old_server(made)
    third = made.serve(0, 4)
    first.start(SESSION, read, len(WHOLE) - len(read), ahead=2)
    made.wait(6.0)
    assert first.route(SESSION) == [third.peer]
    first.core.migrations.drain(third.peer, "test", made.now)
    made.wait(0.5)
    server.frozen = False
    made.wait(1.0)
    assert first.all(OwnershipLost)
    expect_other_log(made)


@pytest.mark.parametrize("leaves", [True, False])
def test_last_log_is_kept_until_the_new_route_has_run(leaves: bool) -> None:
    """A gateway loses its links one after the other, and has them again after a moment, long before its lease ends."""
    made = swarm_of_pairs()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    old = first.route(SESSION)
    spare = [server for server in made.servers if server not in old]
    for server in [*old, *spare]:
        made.cut_link(first.peer, server)
    assert first.view(SESSION).state == "held"
    if leaves:
        first.core.cancel_turn(SESSION, made.now)
    made.wait(0.3)
    rows = sum(server.core.stats.rows for server in made.servers.values())
    reconnect(made, first, [*old, *spare])
    made.wait(1.0)
    if not leaves:
        ran = sum(server.core.stats.rows for server in made.servers.values()) - rows
        assert ran <= 8, "the KV of the old route was there"
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    found = second.find(SESSION)
    assert found.log_holders, "the servers had the log when the gateway returned"
    assert second.adopt(found)[: len(read)] == read


def test_name_is_not_free_while_its_owner_lives() -> None:
    """As above. Its client asks at another gateway, while the first one has the session parked."""
    made = swarm_of_pairs()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    old = first.route(SESSION)
    spare = [server for server in made.servers if server not in old]
    for server in [*old, *spare]:
        made.cut_link(first.peer, server)
    first.core.cancel_turn(SESSION, made.now)
    made.wait(0.3)
    reconnect(made, first, list(made.servers))
    made.wait(1.0)
    assert first.core.find_view(SESSION) is not None
    found = second.find(SESSION)
    assert found.is_owner_alive


@pytest.mark.parametrize("are_answers_late", [False, True])
def test_log_is_not_closed_for_a_gateway_that_died(are_answers_late: bool) -> None:
    """The lower one has started the middle hop only, which has no log, and dies. The higher one has head and tail.

    It hears that the lower rank ran, perhaps before it hears that it has the only copies of the log, and lets go.
    """
    made = Network(None, Options(lease_seconds=LEASE))
    head, middle, tail = made.serve(0, 1), made.serve(1, 3), made.serve(3, 4)
    first = start_partial_turn(made)
    read = [*PROMPT, *first.tokens(SESSION)]
    low, high = add_gateway(made, 2), add_gateway(made, 3)
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    found = {}
    for gateway in (low, high):
        where = gateway.find(SESSION)
        found[gateway.peer] = where, gateway.fetch(where)
    low.core.take_over(*_arguments(found[low.peer]), made.now)
    made.run()
    low.begin(SESSION, read, NEW)
    lanes = [(low.peer, each.peer, Lane.LIVE) for each in (head, middle, tail)]
    made.run(
        until=lambda: all(
            any(isinstance(item, StartEpoch) for item in made.lanes.get(lane, ())) for lane in lanes
        )
    )
    made.held |= {lanes[0], lanes[2]}
    made.deliver_all(low.peer, middle.peer)
    made.kill(low.peer)
    made.held.clear()
    if are_answers_late:
        made.held |= {(each.peer, high.peer, Lane.LIVE) for each in (head, tail)}
    high.core.take_over(*_arguments(found[high.peer]), made.now)
    high.begin(SESSION, read, NEW)
    made.wait(0.3)
    made.held.clear()
    made.wait(LEASE + 0.2)
    if high.core.find_view(SESSION) is None:
        where = add_gateway(made, 4).find(SESSION)
        assert where.log_holders, "its owner let go, and no server has the log"


def _arguments(
    found: tuple[SessionLocation, FetchedLog],
) -> tuple[SessionLocation, str, FetchedLog]:
    return found[0], MODEL, found[1]


def test_part_of_an_input_does_not_hide_the_whole_log() -> None:
    """A gateway loses its links to the route, starts a new one, and ends when a part of the log has arrived there."""
    made = swarm_of_pairs()
    settings = GatewaySettings(lease_seconds=LEASE, max_live_input_tokens=0, max_input_tokens=4)
    first = add_gateway(made, 1, settings)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    second = add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    old = first.route(SESSION)
    bulk = [(first.peer, each, Lane.BULK) for each in made.servers if each not in old]
    made.held |= set(bulk)
    for server in old:
        made.cut_link(first.peer, server)
    made.run()
    for lane in bulk:
        made.deliver(lane)
    made.run()
    made.held.clear()
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    assert second.adopt(second.find(SESSION))[: len(read)] == read


def test_newest_log_survives_a_leftover_of_an_idle_gateway() -> None:
    """A gateway keeps an old hop on one server only. The one that ran since needs that server, and gives up."""
    made = swarm()
    head, lost = list(made.servers)
    first = start_partial_turn(made)
    made.cut_link(first.peer, head)
    first.core.cancel_turn(SESSION, made.now)
    second = add_gateway(made, 2)
    made.cut_link(second.peer, lost)
    third = made.serve(2, 4)
    made.wait(LEASE + 0.2)
    log = second.adopt(second.find(SESSION))
    second.start(SESSION, log, len(WHOLE) - len(log), ahead=12)
    assert second.route(SESSION) == [head, third.peer]
    read = [*log, *second.tokens(SESSION)]
    made.link(first.peer, head)
    made.link(second.peer, lost)
    made.run()
    made.kill(third.peer)
    made.wait(3.0)
    assert second.all(OwnershipLost)
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    other = add_gateway(made, 3)
    assert other.adopt(other.find(SESSION)) == read[:-1], "only its tail had the last token"
