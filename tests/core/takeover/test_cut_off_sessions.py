"""A kept session that was cut off, when another gateway may have run it (R19, leases; R20, takeover)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from core.takeover.test_returning_gateway import OTHER, cut_off, reconnect, swarm_of_pairs
from core.takeover.test_takeover import NEW, PROMPT, SESSION, adopt, owners
from support.core.gateway import LEASE, TWICE, add_gateway
from support.core.named_sessions import KEY, NAME, GatewaySessions, VirtualLoop
from support.core.network import Network
from support.core.server import MODEL, Options
from typing_extensions import override

from modelswarm.protocol.messages import StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import wire_name
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import SessionState, close_session, session_state
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_gateway.models.sampling_defaults import SamplingOptions


@pytest.mark.parametrize("hold", [0.5, 2.0, 4.5])
def test_first_turn_cut_off_waits_for_servers_without_links(hold: float) -> None:
    """No lease protects a session that no server knows: another gateway may open its name at once."""
    made = swarm_of_pairs()
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    first.begin(SESSION, PROMPT, NEW, ahead=2, above=0)
    made.collect()
    old = first.route(SESSION)
    new = [server for server in made.servers if server not in old]
    cut_off(made, first)  # its Fences are lost
    made.wait(0.1)
    assert first.view(SESSION).state == "held"
    assert not second.find(SESSION, opens=True).hops
    for server in old:
        second.core.migrations.drain(server, "test", made.now)
    second.start(SESSION, OTHER, NEW, ahead=2, above=1000)
    assert set(second.route(SESSION)) == set(new)
    made.wait(hold)
    reconnect(made, first, old)
    made.wait(2.5)
    started = len(made.sent(StartEpoch, first.peer))
    reconnect(made, first, new)
    made.wait(1.0)
    assert not started, "two gateways ran the session"
    assert (len(first.all(OwnershipLost)), second.view(SESSION).state) == (1, "running")


@pytest.mark.parametrize("hold", [0.1, 0.7])  # seconds; half a lease are 0.5
def test_second_cut_off_ends_no_wait_for_servers_without_links(hold: float) -> None:
    """X waits 3 s for the servers on which Y runs the session. X is cut off again, and then waits for them still."""
    made = Network(None, Options(lease_seconds=1.0))
    for _ in range(2):
        made.serve(0, 4)
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    first.start(SESSION, PROMPT, NEW, ahead=2, above=0)
    old = first.route(SESSION)
    new = [server for server in made.servers if server not in old]
    cut_off(made, first)
    made.wait(1.3)  # its lease is over
    adopt(made, second)
    second.start(SESSION, OTHER, NEW, ahead=2)
    reconnect(made, first, new)
    made.wait(0.5)
    cut_off(made, first)
    made.wait(hold)
    started = len(made.sent(StartEpoch, first.peer))
    reconnect(made, first, new)
    made.wait(1.0)
    assert len(made.sent(StartEpoch, first.peer)) == started, "two gateways ran the session"
    reconnect(made, first, old)
    made.wait(1.0)
    assert (len(first.all(OwnershipLost)), second.view(SESSION).state) == (1, "running")


def acquire(sessions: GatewaySessions, request: GenerationRequest) -> object:
    return call(sessions, sessions.locator.acquire(request, KEY, lambda _: None))


def ask(append: bool) -> GenerationRequest:
    return GenerationRequest(
        MODEL, TokenPrompt((1, 2)), "prompt", SamplingOptions(), session_id=KEY[1], append=append
    )


@dataclass(frozen=True, slots=True)
class Moved:
    """The gateways X and Y, the servers of the old and of the new route, and the log that ran last."""

    made: Network
    x: GatewaySessions
    y: GatewaySessions
    old: list[str]
    new: list[str]
    newest: tuple[int, ...]


def moved_session() -> Moved:
    """X kept a parked session and was cut off; Y took it over, ran a turn, and moved it to the other servers."""
    made = swarm_of_pairs()
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    made.run()
    x.named_sessions.release(KEY)
    old = x.gateway.route(NAME)
    new = [server for server in made.servers if server not in old]
    cut_off(made, x.gateway)
    made.wait(LEASE + 0.5)
    log = [*PROMPT, *x.gateway.tokens(NAME)]
    for server in old:
        y.gateway.core.migrations.drain(server, "test", made.now)
    y.turn([*log, 1, 2, 3], NEW)
    made.run()
    made.wait(6.0)
    y.named_sessions.release(KEY)
    y.turn([*log, 1, 2, 3, 4], NEW)
    made.run()
    made.wait(6.0)
    y.named_sessions.release(KEY)
    assert set(y.gateway.route(NAME)) <= set(new), "it has moved"
    kept = y.gateway.core.parked_turn(NAME)
    assert kept is not None
    return Moved(made, x, y, old, new, kept.tokens)


def test_append_to_kept_session_is_refused_with_silent_servers() -> None:
    """X is linked to the old servers only. A new log is elsewhere: new input must not go behind the old one."""
    moved = moved_session()
    reconnect(moved.made, moved.x.gateway, moved.old)
    moved.x.queries._unreachable_servers = lambda _: moved.new
    with pytest.raises(ApiError) as refused:
        acquire(moved.x, ask(append=True))
    assert refused.value.code is Code.SESSION_ELSEWHERE


def service_of(sessions: GatewaySessions) -> GenerationService:
    """The parts of the service that states and closes use, over the real core of a sessions."""

    async def nothing(_key: object) -> None:
        return None

    backend = SimpleNamespace(session=sessions.session, parked_turn=sessions.parked_turn)
    service = SimpleNamespace(
        named_sessions=sessions.named_sessions,
        backend=backend,
        find_card=lambda _: object(),
        await_turn_end=nothing,
        find_session=sessions.locator.find,
    )
    return cast("GenerationService", service)


def call(sessions: GatewaySessions, what: Coroutine[None, None, object]) -> object:
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(sessions)) as runner:
        return runner.run(what)


def test_close_of_stale_kept_session_goes_to_its_owner() -> None:
    """X was cut off, and Y owns the session. X answers that it is deleted, and Y keeps it."""
    moved = moved_session()
    reconnect(moved.made, moved.x.gateway, list(moved.made.servers))
    with pytest.raises(OwnedElsewhere):
        call(moved.x, close_session(service_of(moved.x), KEY))
    assert owners(moved.made) == {moved.y.gateway.peer}
    assert not moved.x.named_sessions.has_session(KEY)


def test_state_of_stale_kept_session_comes_from_its_owner() -> None:
    moved = moved_session()
    reconnect(moved.made, moved.x.gateway, list(moved.made.servers))
    with pytest.raises(OwnedElsewhere):
        call(moved.x, session_state(service_of(moved.x), KEY))


def test_state_of_kept_session_that_ran_nowhere_else_is_its_own() -> None:
    made = swarm_of_pairs()
    x = GatewaySessions(add_gateway(made, 1))
    x.turn(PROMPT, NEW)
    made.run()
    x.named_sessions.release(KEY)
    cut_off(made, x.gateway)
    made.wait(LEASE + 0.5)
    reconnect(made, x.gateway, list(made.servers))
    assert not x.gateway.view(NAME).is_reachable
    state = call(x, session_state(service_of(x), KEY))
    assert isinstance(state, SessionState)
    assert state.view.length == len(PROMPT) + NEW


def test_session_is_cut_off_with_a_link_to_a_server_without_hop() -> None:
    """The first server was away for two leases and freed the hop. Then the other one is away, and Y takes over."""
    made = swarm_of_pairs()
    x, y = GatewaySessions(add_gateway(made, 1)), GatewaySessions(add_gateway(made, 2))
    x.turn(PROMPT, NEW)
    made.run()
    x.named_sessions.release(KEY)
    a, b = x.gateway.route(NAME)
    new = [server for server in made.servers if server not in (a, b)]
    made.cut_link(x.gateway.peer, a)
    made.wait(2 * LEASE + 1.0)
    assert not list(made.servers[a].core._fencing.hops)
    reconnect(made, x.gateway, [a])
    for server in (b, *new):
        made.cut_link(x.gateway.peer, server)
    made.wait(LEASE + 1.0)
    log = [*PROMPT, *x.gateway.tokens(NAME)]
    for server in (a, b):
        y.gateway.core.migrations.drain(server, "test", made.now)
    y.turn([*log, 1, 2, 3], NEW)
    made.run()
    y.named_sessions.release(KEY)
    assert y.gateway.core.parked_turn(NAME) is not None
    view = x.gateway.core.find_view(NAME)
    assert view is None or not view.is_reachable


class WallClockSessions(GatewaySessions):
    """Opens sessions as the node does."""

    @override
    def _open(self, key: tuple[str, str], above: int) -> str:
        now = self.gateway.network.now
        self.gateway.core.open_session(wire_name(key), key[0], now, lowest_epoch(above, now))
        return wire_name(key)


def replace_servers(made: Network) -> None:
    """Restart all servers: other processes with the same blocks, without sessions."""
    for server in list(made.servers):
        made.kill(server)
    made.wait(1.0)
    for first, last in TWICE:
        made.serve(first, last)
    made.wait(1.0)


def test_kept_session_that_goes_on_outranks_what_ran_before() -> None:
    """No partition: servers are restarted twice, turns change gateways, and the gateway that ran last is killed."""
    made = swarm_of_pairs()
    x, y = WallClockSessions(add_gateway(made, 1)), WallClockSessions(add_gateway(made, 2))
    x.turn(PROMPT, 5)
    made.run()
    x.named_sessions.release(KEY)
    replace_servers(made)
    y.turn(PROMPT, 5)  # opened anew
    made.run()
    y.named_sessions.release(KEY)
    replace_servers(made)
    x.turn(OTHER, 7)  # goes on with the session that it kept
    made.run()
    x.named_sessions.release(KEY)
    newest = x.gateway.core.parked_turn(NAME)
    made.kill(x.gateway.peer)
    made.wait(LEASE + 0.5)
    acquire(y, ask(append=True))
    kept = y.gateway.core.parked_turn(NAME)
    assert kept is not None and newest is not None
    assert kept.tokens == newest.tokens, "input is appended to a log that is not the newest"


def test_kept_session_is_taken_over_from_a_later_ended_owner() -> None:
    """The answers to the search make the core of X release its old copy. The newer log is there, and is used."""
    moved = moved_session()
    moved.made.kill(moved.y.gateway.peer)
    moved.made.wait(LEASE + 0.5)
    reconnect(moved.made, moved.x.gateway, list(moved.made.servers))
    acquire(moved.x, ask(append=True))
    kept = moved.x.gateway.core.parked_turn(NAME)
    assert kept is not None and kept.tokens == moved.newest
