"""The hold limit of a session without a route: announced by its model's servers, else the gateway's setting."""

from __future__ import annotations

from dataclasses import dataclass
from operator import ne

import pytest
from support.core.gateway import Swarm
from support.core.scripted_server import Script
from support.core.server import MODEL, Options, expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import FaultKind, FaultReport, Sampling
from modelswarm_gateway.core.interface.effects import Refused, SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.core.recovery.held_sessions import TRIES_AT_A_TIME

SESSION = "s"
HEAD, TAIL, SECOND_TAIL = "a/1/0", "b/1/0", "c/1/0"
TICK = 0.0625  # seconds; its multiples are exact, so that a limit can be met exactly


@dataclass
class Held:
    """A session whose server at TAIL died, after both have run it, and has no replica."""

    script: Script
    begun: float  # time of that death

    @property
    def state(self) -> str:
        view = self.script.core.find_view(SESSION)
        return "lost" if view is None else view.state

    @property
    def route(self) -> list[PeerId]:
        return self.script.gateway.route(SESSION)

    def seconds_held(self) -> float:
        """Wait until the session is lost. Return the seconds since the death of TAIL."""
        while self.state != "lost":
            assert self.script.now < self.begun + 1000.0
            self.script.wait(TICK, TICK)
        assert self.script.gateway.all(SessionLost)
        return self.script.now - self.begun


def hold_session(limit: float, head_ms: int = 0, tail_ms: int = 0) -> Held:
    """`limit`: the gateway's setting, in seconds. `head_ms`, `tail_ms`: what the servers announce."""
    script = Script(settings=GatewaySettings(hold_limit_seconds=limit))
    script.add_server("a", 0, 2, head_ms)
    script.add_server("b", 2, 4, tail_ms)
    script.start_turn(SESSION, (5, 6, 7))
    script.token(SESSION)
    script.wait(TICK, TICK)
    held = Held(script, script.now)
    assert (held.state, held.route) == ("running", [HEAD, TAIL])
    script.kill(TAIL)
    return held


@pytest.mark.parametrize("limit", [0.125, 0.5, 1.0, 3.0, 8.0, 9.5, 61.0])
def test_held_session_ends_exactly_at_hold_limit(limit: float) -> None:
    """Pauses of 0.1 s to 2 s add up to none of these limits."""
    assert hold_session(limit).seconds_held() == limit


@pytest.mark.parametrize("limit", [0.5, 3.0, 8.0, 9.5])
@pytest.mark.parametrize("announced_by", ["both", "head", "tail"])
def test_held_session_ends_at_announced_hold_limit(limit: float, announced_by: str) -> None:
    """A server that announces none does not change what the other one announces."""
    for setting in (1.0, 60.0):
        ms = round(1000 * limit)
        head_ms, tail_ms = (ms if announced_by in ("both", end) else 0 for end in ("head", "tail"))
        assert hold_session(setting, head_ms, tail_ms).seconds_held() == limit


def test_session_without_hold_limit_ends_at_once() -> None:
    assert hold_session(0.0).state == "lost"


@pytest.mark.parametrize("limit", [3.0, 8.0, 10.0])
def test_server_that_connects_in_last_pause_saves_it(limit: float) -> None:
    """After 10 s that is its tenth attempt."""
    held = hold_session(limit)
    held.script.wait(limit - TICK, TICK)
    assert held.state == "held"
    held.script.add_server("c", 2, 4)
    assert (held.state, held.route) == ("running", [HEAD, SECOND_TAIL])


@pytest.mark.parametrize("asleep", [5.0, 20.0], ids=["within its lease", "for longer"])
def test_gateway_stall_does_not_count_towards_hold_limit(asleep: float) -> None:
    held = hold_session(3.0)
    held.script.wait(0.5, TICK)
    held.script.now += asleep
    assert asleep + 2.4 <= held.seconds_held() <= asleep + 3.0 + 2 * TICK


def test_announced_hold_limit_outlives_its_servers() -> None:
    swarm = Swarm(settings=GatewaySettings(hold_limit_seconds=1.0))
    server = swarm.serve(0, 4, {"hold_ms": 20_000})
    swarm.gateway.start("a", [5, 6, 7], 50, ahead=2)
    swarm.kill(server.peer)
    swarm.wait(15.0)
    assert not swarm.gateway.all(SessionLost)
    swarm.serve(0, 4)
    swarm.wait(10.0)
    assert not swarm.gateway.all(SessionLost)


def test_announced_hold_limit_is_capped_at_one_day() -> None:
    swarm = Swarm()
    swarm.serve(0, 4, {"hold_ms": 1 << 63})
    assert swarm.core.hold_limit_seconds(MODEL) == 24 * 3600.0


def test_session_lost_to_failing_routes_names_the_cause() -> None:
    swarm = Swarm(settings=GatewaySettings(hold_limit_seconds=3.0))
    server = swarm.serve(0, 4)
    swarm.gateway.start("a", [5, 6, 7], 50, ahead=2)
    server.lazy = True
    swarm.core.on_read("a", 1000, swarm.now)
    while not (broken := swarm.gateway.all(SessionLost)):
        assert swarm.now < 10_000
        swarm.wait(0.5)
        for view in swarm.core.session_views():
            assert "KV" not in view.hold_reason
    assert "attempts" in broken[0].detail
    assert f"overdue at {server.peer}" in broken[0].detail


@pytest.mark.parametrize("begun", [False, True])
def test_resumed_turn_is_held_where_new_turn_is_refused(begun: bool) -> None:
    """A request with Last-Event-ID at another gateway, at a moment when some blocks have no server."""
    swarm = Swarm()
    swarm.serve(0, 2)
    swarm.core.open_session("a", MODEL, swarm.now)
    swarm.core.start_turn(
        "a", TurnRequest((5, 6, 7), 20, Sampling(), credit_ahead=64, is_resumed=begun), swarm.now
    )
    swarm.wait(1.0)
    refused = swarm.gateway.all(Refused)
    assert bool(refused) is not begun
    swarm.serve(2, 4)
    swarm.wait(10.0)
    assert swarm.gateway.tokens("a") == (expected([5, 6, 7], 20) if begun else [])


def test_resumed_turn_is_held_without_any_server() -> None:
    """A request with Last-Event-ID at the gateway that kept its session."""
    swarm = Swarm()
    server = swarm.serve(0, 4)
    swarm.gateway.start("a", [5, 6, 7], 20, ahead=4)
    swarm.core.cancel_turn("a", swarm.now)
    swarm.kill(server.peer)
    log = (5, 6, 7, *swarm.gateway.tokens("a"))
    rest = 23 - len(log)
    assert 0 < rest < 20
    swarm.core.start_turn("a", TurnRequest(log, rest, Sampling(), 64, is_resumed=True), swarm.now)
    swarm.wait(1.0)
    assert not swarm.gateway.all(Refused)
    swarm.serve(0, 4)
    swarm.wait(10.0)
    assert swarm.gateway.tokens("a") == expected([5, 6, 7], 20)


@pytest.mark.parametrize(("hold_ms", "fence", "hold"), [(0, 5.0, 8.0), (2_000, 2.0, 2.0)])
def test_fence_wait_is_bounded_by_hold_limit(hold_ms: int, fence: float, hold: float) -> None:
    """The tail has no replica, and does not answer its Fence although it sends heartbeats."""
    script = Script(settings=GatewaySettings(hold_limit_seconds=8.0))
    script.add_server("a", 0, 2, hold_ms)
    b = script.add_server("b", 2, 4, hold_ms)
    script.start_turn("s", (5, 6, 7))
    script.token("s")
    script.server(b).silent = True
    script.reports("s", "a/1/0", FaultKind.LINK_DOWN, b)
    script.wait(fence - 0.1)
    assert script.gateway.view("s").state == "fencing"
    script.wait(0.2)
    assert script.gateway.view("s").state == "held"
    script.wait(hold + fence)
    assert script.gateway.all(SessionLost)


def test_hold_limit_does_not_count_time_in_which_it_runs() -> None:
    """A long replay on a new server follows a hold, and is cut off before its first token."""
    held = hold_session(4.0)
    held.script.wait(3.0, TICK)
    held.script.add_server("c", 2, 4)
    assert held.state == "running"
    held.script.wait(3.0, TICK)
    assert held.state == "running"
    held.script.kill(SECOND_TAIL)
    held.begun = held.script.now - 3.0
    assert held.state == "held"
    assert held.seconds_held() == 4.0


@pytest.mark.parametrize("limit", [3.0, 8.0])
def test_hold_limit_counts_all_time_after_failed_attempts(limit: float) -> None:
    """The server answers every Fence and gives no token. Four attempts fail before the first hold, and take longer."""
    settings = GatewaySettings(hold_limit_seconds=limit, attempts_without_token=4)
    swarm = Swarm(settings=settings)
    swarm.serve(0, 4).lazy = True
    swarm.gateway.start("a", [5, 6, 7], 50)
    swarm.wait(120.0)
    (lost,) = swarm.gateway.all(SessionLost)
    assert lost.detail.startswith("no token in 8 attempts")


def test_end_of_other_sessions_shortens_no_pause_for_servers() -> None:
    """Each search of a route takes time, and one that fences its hops again loads their servers."""
    held = hold_session(60.0)
    others = [f"x{number}" for number in range(20)]
    for name in others:
        held.script.core.open_session(name, MODEL, held.script.now)
    held.script.wait(10.0)
    before = held.script.gateway.view(SESSION).epoch.counter
    for name in others:
        held.script.core.close_session(name, held.script.now)
        held.script.wait(0.1)
    assert held.script.gateway.view(SESSION).epoch.counter - before <= 2


def test_session_that_ends_after_a_stall_spares_the_others() -> None:
    """Sessions are not held, so one ends at its second attempt. The stall must fence the other one, too."""
    settings = GatewaySettings(hold_limit_seconds=0.0, attempts_without_token=2)
    script = Script(settings=settings)
    server = script.add_server("a", 0, 4)
    for name in ("ends", "other"):
        script.start_turn(name, (5, 6, 7))
        script.token(name)
    epoch = script.gateway.view("ends").epoch
    script.send(server, FaultReport(script.hop(server, "ends").reply, epoch, FaultKind.GAP))
    assert script.gateway.view("ends").state == "running"
    script.now += settings.lease_seconds
    script.core.tick(script.now)
    script.collect()
    assert [lost.session for lost in script.gateway.all(SessionLost)] == ["ends"]
    assert script.gateway.view("other").state == "fencing"


def test_held_sessions_try_again_a_few_at_a_time() -> None:
    """All are held by one loss. A try plans a route, and streams of other models wait meanwhile."""
    swarm = Swarm(options=Options(total_pages=4096))
    swarm.serve(0, 2)
    tail = swarm.serve(2, 4)
    names = [f"s{number}" for number in range(TRIES_AT_A_TIME + 8)]
    for name in names:
        swarm.gateway.start(name, [5, 6, 7], 50, ahead=1)
    swarm.kill(tail.peer)

    def tries(seconds: float) -> int:
        """Return the number of sessions that try again at a tick so many seconds later."""
        before = [swarm.gateway.view(name).epoch for name in names]
        swarm.now += seconds
        swarm.core.tick(swarm.now)
        after = [swarm.gateway.view(name).epoch for name in names]
        return sum(map(ne, before, after))

    assert [tries(0.15), tries(0.05), tries(0.05)] == [TRIES_AT_A_TIME, 8, 0]
    swarm.serve(2, 4)
    swarm.wait(1.0)
    assert {swarm.gateway.view(name).state for name in names} == {"running"}


def test_held_sessions_of_one_model_delay_no_other_model() -> None:
    """Thousands of them may try again for as long as their block is lost."""
    swarm = Swarm(options=Options(total_pages=4096))
    lost = [swarm.serve(0, 4), swarm.serve(0, 4, hello={"model": "other"})]
    names = [f"s{number}" for number in range(2 * TRIES_AT_A_TIME)]
    for name in names:
        swarm.gateway.start(name, [5, 6, 7], 50, ahead=1)
    swarm.core.open_session("other", "other", swarm.now)
    swarm.gateway.start("other", [5, 6, 7], 50, ahead=1)
    for server in lost:
        swarm.kill(server.peer)
    before = swarm.gateway.view("other").epoch
    swarm.now += 0.15
    swarm.core.tick(swarm.now)
    assert swarm.gateway.view("other").epoch > before, "it tries again at once"
