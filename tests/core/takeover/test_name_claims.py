"""Claims on a session name, and use of a kept session, when several gateways are asked for it (R20, takeover)."""

from __future__ import annotations

import asyncio
import random

import pytest
from core.takeover.test_takeover import NEW, PROMPT, SESSION, owners, start_partial_turn, swarm
from support.core.gateway import LEASE, Gateway, add_gateway
from support.core.named_sessions import KEY, NAME, GatewaySessions, VirtualLoop
from support.core.network import Network
from support.core.server import MODEL

from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation import session_locator
from modelswarm_gateway.generation.named_sessions import wire_name
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.session_locator import MAX_SEARCHES, OwnedElsewhere
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_serving.core.session_lookup import CLAIM_SECONDS


def wide(seed: int | None = None) -> Network:
    """Return a swarm with two routes that share no server."""
    made = swarm(seed)
    made.serve(0, 2)
    made.serve(2, 4)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_at_most_one_of_two_gateways_may_open_a_new_name(seed: int) -> None:
    made = wide(seed)
    both = [add_gateway(made, 1), add_gateway(made, 2)]
    for gateway in both:
        gateway.core.find_session(SESSION, MODEL, made.now, claims=True)
    made.run()
    free = [gateway for gateway in both if not whereabouts(gateway).claimant]
    assert len(free) < 2
    if not free:  # each was first at some server: they try again later
        made.wait(CLAIM_SECONDS + 0.1)
        assert not both[0].find(SESSION, opens=True).claimant
        free = both[:1]
    (other,) = [gateway for gateway in both if gateway not in free]
    assert other.find(SESSION, opens=True).claimant == free[0].peer
    free[0].start(SESSION, PROMPT, NEW, above=0)
    assert other.find(SESSION, opens=True).is_owner_alive


def test_unused_claim_ends_by_time_or_with_its_gateway() -> None:
    made = wide()
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    for _ in range(3):
        assert not first.find(SESSION, opens=True).claimant, "the claimant may ask again"
        assert second.find(SESSION).claimant == first.peer
    made.wait(CLAIM_SECONDS)
    assert not second.find(SESSION, opens=True).claimant
    assert first.find(SESSION, opens=True).claimant == second.peer
    made.kill(second.peer)
    assert not first.find(SESSION, opens=True).claimant


def test_gateway_that_finds_a_running_owner_keeps_no_claim() -> None:
    """The second gateway forwards to the first. When that one ends, the third need not wait for the second."""
    made = swarm()
    start_partial_turn(made)
    second, third = add_gateway(made, 2), add_gateway(made, 3)
    where = second.find(SESSION, opens=True)
    assert where.is_owner_alive
    made.kill(where.owner)
    assert not third.find(SESSION, opens=True).claimant


def whereabouts(gateway: Gateway) -> SessionLocation:
    return gateway.last(SessionLocation)


def test_answer_to_earlier_search_is_not_used() -> None:
    """X stalls for 2.5 s after its FindSession. The answers that it reads then are older than the session of Y."""
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
    )  # messages that came during the stall are read after the tick that ends it
    x.core.find_session(
        SESSION, MODEL, made.now, claims=True
    )  # as SessionLocator does: its last search is too old
    made.run()
    where = whereabouts(x)
    assert where.is_owner_alive or where.claimant, where


def test_late_answer_is_not_used_for_next_search() -> None:
    """X polls without a claim while Y is the claimant, and the answers take 0.4 s."""
    made = wide()
    x, y = add_gateway(made, 1), add_gateway(made, 2)
    assert not y.find(SESSION, opens=True).claimant
    assert x.find(SESSION, opens=True).claimant == y.peer
    made.wait(CLAIM_SECONDS)  # Y's client went away before its turn
    x.core.find_session(SESSION, MODEL, made.now)  # the poll: no gateway has a claim
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


def run_after_early_cancel(made: Network) -> tuple[GatewaySessions, GatewaySessions]:
    """A gateway keeps a session whose client left before the FenceAck came. The other one has run it since."""
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    x.gateway.core.cancel_turn(NAME, made.now)
    x.named_sessions.release(KEY)
    made.run()
    made.wait(5.0)
    y.turn(PROMPT, NEW)
    made.run()
    return x, y


def test_session_cancelled_before_start_epoch_finds_new_owner() -> None:
    """The hops of the session are closed, and its gateway keeps the session."""
    made = wide()
    x, y = run_after_early_cancel(made)
    assert owners(made) == {y.gateway.peer}
    with pytest.raises(OwnedElsewhere):
        x.turn(PROMPT, NEW)
    made.run()
    assert owners(made) == {y.gateway.peer}


def test_kept_session_that_ran_elsewhere_is_taken_over() -> None:
    """A gateway keeps a session without hops. Another one ran it since and has ended: its log is the newer one."""
    made = wide()
    x, y = run_after_early_cancel(made)
    log = (*PROMPT, *y.gateway.tokens(NAME))
    y.gateway.core.relinquish_sessions(made.now)
    made.run()
    x.acquire_session(PROMPT)
    kept = x.gateway.core.parked_turn(NAME)
    assert kept is not None
    assert kept.tokens == log


def test_disconnected_gateway_asks_for_owner_of_its_session() -> None:
    """The gateway did not stall: its links broke for more than a lease, and came back."""
    made = wide()
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    made.run()
    x.named_sessions.release(KEY)
    for server in made.servers:
        made.drop(x.gateway.peer, server)
        made.cut_link(x.gateway.peer, server)
    made.wait(LEASE + 0.5)  # it never stalls
    log = [*PROMPT, *x.gateway.tokens(NAME)]
    y.turn([*log, 1, 2, 3], NEW)  # taken over
    made.run()
    y.named_sessions.release(KEY)
    assert owners(made) == {y.gateway.peer}
    before = {s for s, server in made.servers.items() if list(server.core._fencing.hops)}
    for peer in before:  # the session migrates to the other two servers
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
    with pytest.raises(OwnedElsewhere):
        x.turn(log, NEW)
    made.run()
    assert owners(made) == {y.gateway.peer}


def test_server_stall_does_not_expire_a_claim() -> None:
    """The Fences of X wait in the sockets of stalled servers for 2.1 s. The FindSession of Y is read first."""
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


async def test_searches_for_names_at_a_time_are_bounded() -> None:
    """No server answers while the network's clock stands still."""
    sessions = GatewaySessions(add_gateway(wide(), 1))

    def search(number: int) -> asyncio.Task[int]:
        request = GenerationRequest(
            MODEL, TokenPrompt((1,)), "prompt", SamplingOptions(), session_id=f"s{number}"
        )
        key = (MODEL, f"s{number}")
        return asyncio.create_task(sessions.locator.acquire(request, key, lambda _: None))

    running = [search(number) for number in range(MAX_SEARCHES)]
    with pytest.raises(ApiError) as refused:
        await search(MAX_SEARCHES)
    assert refused.value.code is Code.NO_CAPACITY
    running[0].cancel()
    done, _ = await asyncio.wait({running[0]})
    assert running[0] in done
    again = search(MAX_SEARCHES)
    await asyncio.sleep(0)
    assert not again.done(), "there is a place again"
    for task in (*running, again):
        task.cancel()
    await asyncio.gather(*running, again, return_exceptions=True)


def test_wait_for_a_lease_takes_no_place_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sessions of a lost gateway may wait for 30 s: names that are free can be opened meanwhile."""
    monkeypatch.setattr(session_locator, "MAX_SEARCHES", 1)
    made = wide()
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    made.run()
    made.kill(x.gateway.peer)
    asked: list[asyncio.Future[object]] = []

    def ask_for_another() -> None:
        asked.append(asyncio.ensure_future(y.locator.find((MODEL, "another"))))

    y.acquire_session(PROMPT, after=LEASE / 2 + 0.5, event=ask_for_another)
    assert y.gateway.core.parked_turn(NAME) is not None, "it was taken over"
    [other] = asked
    assert other.exception() is None


def test_searches_at_the_end_of_a_lease_begin_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sessions of a lost gateway are free at one moment. Thousands of searches would delay all streams."""
    random.seed(1)
    made = wide()
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    names = [f"s{number}" for number in range(8)]
    for name in names:
        x.gateway.start(wire_name((MODEL, name)), PROMPT, NEW, above=0)
    made.kill(x.gateway.peer)
    taken_at: list[float] = []

    async def take_over(name: str) -> None:
        options = SamplingOptions()
        request = GenerationRequest(MODEL, TokenPrompt(()), "prompt", options, session_id=name)
        await y.locator.acquire(request, (MODEL, name), lambda _: None)
        taken_at.append(made.now)

    async def take_over_all() -> None:
        taking = [asyncio.create_task(take_over(name)) for name in names]
        await asyncio.sleep(LEASE / 2)  # all wait
        monkeypatch.setattr(session_locator, "MAX_SEARCHES", 1)
        await asyncio.gather(*taking)

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(y)) as runner:
        runner.run(take_over_all())
    assert taken_at[-1] - taken_at[0] > 2.0
