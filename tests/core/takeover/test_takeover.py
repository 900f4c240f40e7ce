"""Session takeover: one other gateway finds and continues the sessions of a lost one (R19, leases; R20, takeover)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import MODEL, expected

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.link.handshake import lease_fault
from modelswarm.protocol.messages import PROTOCOL_VERSION, Hello, Lane, Role, Sampling
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_serving.core.hops.peers import MAX_TICK_SECONDS, Peers

PROMPT = [random.Random(at).randrange(97) for at in range(12)]
NEW = 40
WHOLE = [*PROMPT, *expected(PROMPT, NEW)]
SESSION = "named"


def swarm(seed: int | None = None) -> Network:
    made = takeover_network(seed)
    made.serve(0, 2)
    made.serve(2, 4)
    return made


def start_partial_turn(made: Network, number: int = 1) -> Gateway:
    """Return a gateway whose session has generated some of its tokens and waits for its reader."""
    gateway = add_gateway(made, number)
    gateway.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    assert 0 < len(gateway.tokens(SESSION)) < NEW
    return gateway


def adopt(made: Network, gateway: Gateway) -> list[int]:
    """Take the session over. Return the log that was found."""
    where = gateway.find(SESSION)
    assert (where.is_owner_alive, where.takeover_wait) == (False, 0.0)
    return gateway.adopt(where)


def continue_session(made: Network, gateway: Gateway, log: list[int]) -> None:
    gateway.begin(SESSION, log, len(WHOLE) - len(log))


def owners(made: Network) -> set[str]:
    return {hop.gateway for s in made.servers.values() for hop in s.core._fencing.hops}


def test_unknown_session_has_no_owner() -> None:
    made = swarm()
    where = add_gateway(made, 1).find(SESSION)
    assert (where.owner, where.hops, where.epoch) == ("", (), Epoch(0, 0))


def test_search_finds_running_owner_and_its_address() -> None:
    made = swarm()
    first = start_partial_turn(made)
    where = add_gateway(made, 2).find(SESSION)
    assert (where.owner, where.is_owner_alive) == (first.peer, True)
    assert where.owner_target == f"{first.peer}:8000"


def test_takeover_waits_for_lease_of_lost_gateway() -> None:
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    made.kill(first.peer)
    made.wait(LEASE / 2)
    where = second.find(SESSION)
    assert not where.is_owner_alive
    assert where.takeover_wait == pytest.approx(LEASE / 2, abs=0.2)
    made.wait(LEASE / 2 + 0.2)
    assert second.find(SESSION).takeover_wait == 0.0


def test_takeover_continues_tail_log_and_reuses_kv() -> None:
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    seen = first.tokens(SESSION)
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    rows = [server.core.stats.rows for server in made.servers.values()]
    log = adopt(made, second)
    assert log[: len(PROMPT) + len(seen)] == [*PROMPT, *seen], "the log has at least what was read"
    continue_session(made, second, log)
    made.run()
    assert [*log, *second.tokens(SESSION)] == WHOLE
    run = [
        server.core.stats.rows - at for server, at in zip(made.servers.values(), rows, strict=True)
    ]
    assert max(run) <= len(WHOLE) - len(log) + 1, "the existing KV is used"
    assert owners(made) == {second.peer}


def test_takeover_stays_on_the_revision_that_ran() -> None:
    """A newer one with more servers would answer the rest in other words."""
    made = swarm()
    first = start_partial_turn(made)
    old = set(made.servers)
    for block in (0, 2, 0, 2):
        made.serve(block, block + 2, revision="r2")
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    second = add_gateway(made, 2)
    log = adopt(made, second)
    assert set(second.route(SESSION)) == old
    rest = TurnRequest(
        tuple(log), len(WHOLE) - len(log), Sampling(), is_resumed=True, begin=len(PROMPT)
    )
    second.core.start_turn(SESSION, rest, made.now)
    made.run()
    assert set(second.route(SESSION)) == old
    assert [*log, *second.tokens(SESSION)] == WHOLE


def test_takeover_rebuilds_hop_of_lost_server() -> None:
    made = swarm()
    first = start_partial_turn(made)
    made.serve(0, 2)
    second = add_gateway(made, 2)
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    made.kill(next(iter(made.servers)))
    log = adopt(made, second)
    continue_session(made, second, log)
    made.run()
    assert [*log, *second.tokens(SESSION)] == WHOLE


def test_fence_of_another_gateway_is_refused_while_owner_runs() -> None:
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    made.wait(3 * LEASE)  # its heartbeats renew the lease
    where = second.find(SESSION)
    second.find("else")
    second.core.open_session(SESSION, MODEL, made.now, above=100)
    continue_session(made, second, PROMPT)
    made.run()
    assert isinstance(second.last(OwnershipLost), OwnershipLost)
    assert second.core.find_view(SESSION) is None
    assert where.is_owner_alive
    first.read(SESSION, len(WHOLE))
    assert [*PROMPT, *first.tokens(SESSION)] == WHOLE


@pytest.mark.parametrize("still", [LEASE / 2, 1.2 * LEASE, 20 * LEASE])
def test_server_stall_does_not_expire_the_lease_of_the_owner(still: float) -> None:
    """The owner's heartbeats wait to be read, and the requests of the other gateway are read first."""
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    made.wait(1.0)
    made.now += still
    where = second.find(SESSION)
    assert (where.owner, where.is_owner_alive) == (first.peer, True)
    second.core.open_session(SESSION, MODEL, made.now, above=100)
    continue_session(made, second, PROMPT)
    made.run()
    assert isinstance(second.last(OwnershipLost), OwnershipLost)
    assert owners(made) == {first.peer}
    first.frozen = True
    made.wait(LEASE + 0.2)
    where = second.find(SESSION)
    assert (where.is_owner_alive, where.takeover_wait) == (False, 0.0), (
        "only the stall is not counted"
    )


def test_lease_after_lost_link_excludes_server_stall() -> None:
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    made.kill(first.peer)
    made.wait(LEASE / 2)
    made.now += 3 * LEASE
    made.wait(0.2)
    assert owners(made) == {first.peer}, "the owner had no time to reconnect"
    assert second.find(SESSION).takeover_wait == pytest.approx(LEASE / 2, abs=1.0)
    made.wait(2 * LEASE)
    assert not owners(made)


def test_lease_expires_even_if_every_tick_is_late() -> None:
    peers = Peers(LEASE)
    now = 0.0
    peers.advance_clock(now)
    peers.add_link("gateway", Role.GATEWAY, "", LEASE, now)
    for _ in range(round(LEASE / MAX_TICK_SECONDS) + 1):
        assert peers.silent_seconds("gateway", now) < LEASE
        now += LEASE
        peers.advance_clock(now)
    assert peers.silent_seconds("gateway", now) >= LEASE


def test_returning_gateway_releases_session_taken_over() -> None:
    made = swarm()
    first, second = start_partial_turn(made), add_gateway(made, 2)
    first.frozen = True
    made.wait(LEASE + 0.2)
    log = adopt(made, second)
    continue_session(made, second, log)
    made.run()
    first.frozen = False
    first.core.on_read(SESSION, len(WHOLE), made.now)
    made.wait(1.0)
    assert isinstance(first.last(OwnershipLost), OwnershipLost)
    assert first.core.find_view(SESSION) is None
    assert first.tokens(SESSION) == WHOLE[len(PROMPT) :][: len(first.tokens(SESSION))]
    assert [*log, *second.tokens(SESSION)] == WHOLE
    assert owners(made) == {second.peer}


@pytest.mark.parametrize("seed", range(25))
def test_one_of_two_simultaneous_takeovers_succeeds(seed: int) -> None:
    made = swarm(seed)
    first, second, third = start_partial_turn(made), add_gateway(made, 2), add_gateway(made, 3)
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    both = [(gateway, gateway.find(SESSION)) for gateway in (second, third)]
    logs = [(gateway, where, gateway.fetch(where)) for gateway, where in both]
    for gateway, where, log in logs:
        gateway.core.take_over(where, MODEL, log, made.now)
        continue_session(made, gateway, list(log.tokens))
    made.run()
    made.wait(12.0)
    done = [g for g, _, log in logs if [*log.tokens, *g.tokens(SESSION)] == WHOLE]
    left = [g for g, _, _ in logs if g.all(OwnershipLost)]
    assert len(done) == len(left) == 1
    assert done[0] is not left[0]
    assert owners(made) == {done[0].peer}


@pytest.mark.parametrize("seed", range(20))
def test_one_of_two_simultaneous_opens_succeeds(seed: int) -> None:
    made = swarm(seed)
    both = [add_gateway(made, 1), add_gateway(made, 2)]
    for gateway in both:
        gateway.begin(SESSION, PROMPT, NEW, above=0)
    made.run()
    made.wait(12.0)
    done = [g for g in both if [*PROMPT, *g.tokens(SESSION)] == WHOLE]
    left = [g for g in both if g.all(OwnershipLost)]
    assert len(done) == len(left) == 1
    assert done[0] is not left[0]


def test_hop_frozen_during_takeover_and_rewind_drops_old_kv() -> None:
    made = swarm()
    first = start_partial_turn(made)
    slow = list(made.servers.values())[1]
    twin = made.serve(2, 4).peer
    made.kill(first.peer)
    made.wait(LEASE + 0.2)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    found = second.fetch(where)
    log = list(found.tokens)
    slow.frozen = True
    second.core.take_over(where, MODEL, found, made.now)
    continue_session(made, second, log)
    made.wait(6.0)
    assert [*log, *second.tokens(SESSION)] == WHOLE
    other = [*PROMPT[:5], *(token + 1 if token < 96 else 0 for token in PROMPT[5:])]
    second.start(SESSION, other, NEW, ahead=20)
    before = len(WHOLE) - len(log)
    assert 0 < len(second.tokens(SESSION)) - before < NEW
    made.kill(twin)
    made.wait(1.0)
    slow.frozen = False
    second.read(SESSION, len(WHOLE))
    made.wait(6.0)
    assert second.tokens(SESSION)[before:] == expected(other, NEW)


def test_new_session_ignores_older_session_of_same_name() -> None:
    """The servers of the old session know higher epochs, and the new owner did not ask them."""
    made = swarm()
    first = add_gateway(made, 1)
    first.core.open_session(SESSION, MODEL, made.now, above=50)
    first.start(SESSION, PROMPT, NEW, ahead=8)
    made.kill(first.peer)
    second = add_gateway(made, 2)
    made.wait(LEASE + 0.2)
    other = [token + 1 if token < 96 else 0 for token in PROMPT]
    second.start(SESSION, other, NEW, above=0)
    assert second.tokens(SESSION) == expected(other, NEW)
    assert owners(made) == {second.peer}


def test_reopened_name_begins_above_its_earlier_epochs() -> None:
    made = swarm()
    gateway = start_partial_turn(made)
    before = core_epoch(gateway.core)
    gateway.core.close_session(SESSION, made.now)
    gateway.core.open_session(SESSION, MODEL, made.now, above=0)
    gateway.begin(SESSION, PROMPT, NEW)
    assert core_epoch(gateway.core) > before
    made.run()
    assert [*PROMPT, *gateway.tokens(SESSION)[-NEW:]] == WHOLE


def core_epoch(core: GatewayCore) -> Epoch:
    view = core.find_view(SESSION)
    assert view is not None
    return view.epoch


@pytest.mark.parametrize("ahead", [8, 1 << 40])
def test_ending_gateway_hands_over_named_sessions_at_once(ahead: int) -> None:
    """The session is in the middle of an answer, or parked after one."""
    made = swarm()
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    first.begin(SESSION, PROMPT, NEW, ahead, above=0)
    first.start("nameless", PROMPT, NEW, ahead=8)
    read = [*PROMPT, *first.tokens(SESSION)]
    assert second.find(SESSION).is_owner_alive
    first.core.relinquish_sessions(made.now)
    made.run()
    assert [server.core.stats.sessions for server in made.servers.values()] == [1, 1]
    where = second.find(SESSION)
    assert (where.is_owner_alive, where.takeover_wait) == (False, 0.0), "its links are still up"
    made.kill(first.peer)
    rows = sum(server.core.stats.rows for server in made.servers.values())
    log = adopt(made, second)
    assert log[: len(read)] == read
    second.start(SESSION, log, 3)
    assert second.tokens(SESSION) == expected(log, 3)
    assert sum(server.core.stats.rows for server in made.servers.values()) - rows <= 2 * 4


def test_unclaimed_sessions_are_freed_at_twice_the_lease() -> None:
    made = swarm()
    first = start_partial_turn(made)
    first.core.relinquish_sessions(made.now)
    made.kill(first.peer)
    made.wait(2 * LEASE - 0.5)
    assert [server.core.stats.sessions for server in made.servers.values()] == [1, 1]
    made.wait(1.0)
    assert [server.core.stats.sessions for server in made.servers.values()] == [0, 0]


@pytest.mark.parametrize("lease", [LEASE / 5, LEASE, LEASE * 3])
def test_longer_lease_of_gateway_and_server_counts(lease: float) -> None:
    """The gateway is silent for a little less, then a little more than the longer of the two leases."""
    made = swarm()
    first, second = add_gateway(made, 1, GatewaySettings(lease_seconds=lease)), add_gateway(made, 2)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    first.frozen = True
    made.wait(max(lease, LEASE) - 0.2)
    where = second.find(SESSION)
    assert (where.is_owner_alive, where.takeover_wait) == (True, 0.0)
    made.wait(0.4)
    assert not second.find(SESSION).is_owner_alive
    log = adopt(made, second)
    continue_session(made, second, log)
    made.run()
    assert [*log, *second.tokens(SESSION)] == WHOLE


def test_lease_above_four_times_the_servers_counts_as_four() -> None:
    made = swarm()
    stated = GatewaySettings(lease_seconds=1000 * LEASE)
    first, second = add_gateway(made, 1, stated), add_gateway(made, 2)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    made.kill(first.peer)
    made.wait(4 * LEASE - 0.5)
    where = second.find(SESSION)
    assert 0.0 < where.takeover_wait < 1.0
    made.wait(4 * LEASE)
    assert [server.core.stats.sessions for server in made.servers.values()] == [1, 1]
    made.wait(1.0)
    assert [server.core.stats.sessions for server in made.servers.values()] == [0, 0]


def test_lease_fault_names_both_different_leases() -> None:
    hello = Hello(PROTOCOL_VERSION, "server/1/a", Role.SERVER, "", Lane.LIVE, lease_ms=30_000)
    fault = lease_fault(2.5, hello)
    assert fault is not None
    assert "server/1/a was started with --lease 30" in fault
    assert "this process with 2.5: 30 seconds count" in fault
    assert lease_fault(30.0, hello) is None
    gateway = replace(hello, role=Role.GATEWAY)
    assert "10 seconds count" in str(lease_fault(2.5, gateway)), "at most four times the server's"
    assert lease_fault(2.5, replace(hello, lease_ms=0)) is None, "a peer that declares no lease"


def test_search_ends_without_answers_of_servers() -> None:
    made = swarm()
    gateway = add_gateway(made, 1)
    gateway.core.find_session(SESSION, MODEL, made.now)
    gateway.core.take_effects()  # the messages are lost
    made.now += 0.5
    gateway.core.tick(made.now)
    found = [e for e in gateway.core.take_effects() if isinstance(e, SessionLocation)]
    assert len(found) == 1
    assert (found[0].owner, found[0].unanswered) == ("", tuple(sorted(made.servers)))


def test_search_names_servers_that_did_not_answer() -> None:
    made = swarm()
    start_partial_turn(made)
    other, (head, tail) = add_gateway(made, 2), sorted(made.servers)
    assert other.find(SESSION).unanswered == ()
    other.core.find_session(SESSION, MODEL, made.now)
    made.cut_link(other.peer, head)
    made.run()
    found = other.last(SessionLocation)
    assert (found.is_owner_alive, found.unanswered) == (True, (head,)), "its link broke meanwhile"
    made.cut_link(other.peer, tail)
    other.core.find_session(SESSION, MODEL, made.now, (head, tail))
    made.run()
    found = other.last(SessionLocation)
    assert (found.owner, found.unanswered) == ("", (head, tail)), "no server was left to be asked"


@pytest.mark.parametrize("seed", range(30))
def test_takeover_completes_session_wherever_owner_died(seed: int) -> None:
    """The owner dies during fences, prompts or answers, or in a second turn that rewinds behind the first."""
    rng = random.Random(seed)
    made = takeover_network(seed)
    for first in (0, 0, 2, 2):
        made.serve(first, first + 2)
    gateway, second = add_gateway(made, 1), add_gateway(made, 2)
    gateway.begin(SESSION, PROMPT, NEW, ahead=rng.choice((8, 1 << 40)), above=0)
    prompt = PROMPT
    if rng.random() < 0.5:
        made.run()
        gateway.core.cancel_turn(SESSION, made.now)
        prompt = [*PROMPT[: rng.randrange(1, 12)], *(rng.randrange(97) for _ in range(20))]
        gateway.begin(SESSION, prompt, NEW)
    made.run(events=rng.randrange(200))
    read = gateway.tokens(SESSION)
    made.kill(gateway.peer)
    made.wait(LEASE + 0.2)
    where = second.find(SESSION)
    whole = [*prompt, *expected(prompt, NEW)]
    common = 0
    if where.log_holders:
        log = adopt(made, second)
        while common < min(len(log), len(whole)) and log[common] == whole[common]:
            common += 1
        assert log in (whole[: len(log)], WHOLE[: len(log)]), "a log of this turn or of the first"
    else:
        assert not read, "a token was read, and no server has the log"
        second.core.open_session(SESSION, MODEL, made.now, above=where.epoch.counter)
    log_now = whole[: max(len(prompt), min(common, len(whole) - 1))]
    second.start(SESSION, log_now, len(whole) - len(log_now))
    assert [*log_now, *second.tokens(SESSION)] == whole
    assert owners(made) == {second.peer}
