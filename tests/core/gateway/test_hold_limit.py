"""The hold limit of a session without a route: announced by its model's servers, else the gateway's setting."""

from __future__ import annotations

import pytest
from support.core.gateway import Swarm
from support.core.scripted_server import Script
from support.core.server import MODEL, expected

from modelswarm.protocol.messages import FaultKind, Sampling
from modelswarm_gateway.core.interface.effects import Refused, SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest


def seconds_held(hold_ms: int, *, both: bool = True, asleep: float = 0.0) -> float:
    """Return the seconds until a session is given up whose tail died in mid-answer and has no replica."""
    swarm = Swarm(settings=GatewaySettings(hold_limit_seconds=3.0))
    for first, last in ((0, 2), (2, 4)):
        said = hold_ms if both or first == 0 else 0
        server = swarm.serve(first, last, {"hold_ms": said})
    swarm.gateway.start("a", [5, 6, 7], 50, ahead=2)
    swarm.kill(server.peer)
    died = swarm.now
    swarm.wait(0.5)
    swarm.now += asleep
    while not swarm.gateway.all(SessionLost):
        assert swarm.now - died < 100_000
        swarm.wait(0.5)
    return swarm.now - died


@pytest.mark.parametrize(("hold_ms", "seconds"), [(0, 3.0), (8_000, 8.0), (1_000, 1.0)])
def test_servers_announce_hold_limit_of_their_model(hold_ms: int, seconds: float) -> None:
    assert seconds_held(hold_ms) == pytest.approx(seconds, abs=2.5)
    assert seconds_held(hold_ms) >= seconds


@pytest.mark.parametrize("asleep", [5.0, 20.0], ids=["within its lease", "for longer"])
def test_gateway_stall_does_not_count_towards_hold_limit(asleep: float) -> None:
    assert seconds_held(0, asleep=asleep) >= asleep + 2.4


def test_server_without_hold_limit_keeps_announced_limit() -> None:
    assert seconds_held(8_000, both=False) >= 8.0


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
    script.ask("s", (5, 6, 7))
    script.token("s")
    script.server(b).silent = True
    script.reports("s", "a/1/0", FaultKind.LINK_DOWN, b)
    script.wait(fence - 0.1)
    assert script.gateway.view("s").state == "fencing"
    script.wait(0.2)
    assert script.gateway.view("s").state == "held"
    script.wait(hold + fence)
    assert script.gateway.all(SessionLost)
