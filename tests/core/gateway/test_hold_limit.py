"""How long a session without a route is held: as its model's servers said, else as the gateway was told."""

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
    """Until a session is given up whose tail died in mid-answer, with nobody to take its place."""
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
def test_the_servers_of_a_model_say_how_long_its_sessions_are_held(
    hold_ms: int, seconds: float
) -> None:
    assert seconds_held(hold_ms) == pytest.approx(seconds, abs=2.5)
    assert seconds_held(hold_ms) >= seconds


@pytest.mark.parametrize("asleep", [5.0, 20.0], ids=["within its lease", "for longer"])
def test_the_time_for_which_the_gateway_stands_still_is_not_held(asleep: float) -> None:
    assert seconds_held(0, asleep=asleep) >= asleep + 2.4


def test_a_server_that_says_nothing_leaves_what_others_said() -> None:
    assert seconds_held(8_000, both=False) >= 8.0


def test_what_was_said_is_remembered_when_all_servers_are_gone() -> None:
    swarm = Swarm(settings=GatewaySettings(hold_limit_seconds=1.0))
    server = swarm.serve(0, 4, {"hold_ms": 20_000})
    swarm.gateway.start("a", [5, 6, 7], 50, ahead=2)
    swarm.kill(server.peer)
    swarm.wait(15.0)
    assert not swarm.gateway.all(SessionLost)
    swarm.serve(0, 4)
    swarm.wait(10.0)
    assert not swarm.gateway.all(SessionLost)


def test_a_server_cannot_have_sessions_held_for_ever() -> None:
    swarm = Swarm()
    swarm.serve(0, 4, {"hold_ms": 1 << 63})
    assert swarm.core.hold_limit_seconds(MODEL) == 24 * 3600.0


def test_a_session_whose_routes_keep_breaking_says_so_and_speaks_of_no_room() -> None:
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
def test_a_turn_of_which_the_client_has_a_part_waits_where_a_new_one_is_refused(
    begun: bool,
) -> None:
    """Last-Event-ID at another gateway, in a moment when some blocks have no server."""
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


def test_a_turn_that_had_begun_waits_also_where_no_server_is_left() -> None:
    """Last-Event-ID at the gateway that kept its session."""
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
def test_nobody_is_waited_for_longer_than_a_session_is_held(
    hold_ms: int, fence: float, hold: float
) -> None:
    """The tail has no other server, and does not answer its Fence while it says that it lives."""
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
