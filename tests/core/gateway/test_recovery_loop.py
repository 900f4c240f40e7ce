"""The recovery loop's exact ends: the hold limit of a held session, and the servers excluded until StartEpoch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.core.scripted_server import Script

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.messages import FaultKind, Fence, FenceAck, Refusal
from modelswarm_gateway.core.interface.effects import SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings

SESSION = "s"
HEAD, TAIL, SECOND_TAIL = "a/1/0", "b/1/0", "c/1/0"
TICK = 0.0625  # seconds; its multiples are exact, so that a limit can be met exactly


@dataclass
class Loop:
    """A session that has run over HEAD and TAIL."""

    script: Script

    @property
    def state(self) -> str:
        view = self.script.core.find_view(SESSION)
        return "lost" if view is None else view.state

    @property
    def route(self) -> list[PeerId]:
        return self.script.gateway.route(SESSION)

    def seconds_held(self) -> float:
        """Wait until the session is lost; return the seconds since now."""
        begun = self.script.now
        while self.state != "lost":
            assert self.script.now < begun + 1000.0
            self.script.wait(TICK, TICK)
        assert self.script.gateway.all(SessionLost)
        return self.script.now - begun


def start_loop(settings: GatewaySettings | None = None, hold_ms: int = 0) -> Loop:
    script = Script(settings=settings or GatewaySettings())
    script.add_server("a", 0, 2, hold_ms)
    script.add_server("b", 2, 4, hold_ms)
    script.ask(SESSION, (5, 6, 7))
    script.token(SESSION)
    script.wait(TICK, TICK)
    loop = Loop(script)
    assert (loop.state, loop.route) == ("running", [HEAD, TAIL])
    return loop


@pytest.mark.parametrize("limit", [0.125, 0.5, 1.0, 3.0, 8.0, 9.5, 61.0])
def test_held_session_ends_exactly_at_hold_limit(limit: float) -> None:
    """Pauses of 0.1 s to 2 s add up to none of these limits."""
    loop = start_loop(GatewaySettings(hold_limit_seconds=limit))
    loop.script.kill(TAIL)
    assert loop.seconds_held() == limit


@pytest.mark.parametrize("limit", [0.5, 3.0, 9.5])
def test_held_session_ends_at_announced_hold_limit(limit: float) -> None:
    loop = start_loop(GatewaySettings(hold_limit_seconds=60.0), hold_ms=round(limit * 1000))
    loop.script.kill(TAIL)
    assert loop.seconds_held() == limit


def test_session_without_hold_limit_ends_at_once() -> None:
    loop = start_loop(GatewaySettings(hold_limit_seconds=0.0))
    loop.script.kill(TAIL)
    assert loop.state == "lost"


@pytest.mark.parametrize("limit", [3.0, 8.0])
def test_server_that_reconnects_in_last_pause_saves_it(limit: float) -> None:
    loop = start_loop(GatewaySettings(hold_limit_seconds=limit))
    loop.script.kill(TAIL)
    loop.script.wait(limit - TICK, TICK)
    assert loop.state == "held"
    loop.script.add_server("c", 2, 4)
    assert (loop.state, loop.route) == ("running", [HEAD, SECOND_TAIL])


def exclude_one_of_two(loop: Loop, way: str) -> tuple[PeerId, PeerId]:
    """Replace TAIL; the server that is asked first fails in this `way`. Return it and the one that runs now."""
    script = loop.script
    spares = {script.add_server(name, 2, 4) for name in ("c", "d")}
    for peer in spares:
        script.server(peer).silent = True
    script.kill(TAIL)
    [first] = [peer for peer in spares if script.told(peer, Fence)]
    [other] = spares - {first}
    if way == "refuses":
        fence = script.told(first, Fence)[-1]
        no_pages = Refusal.NO_PAGES
        script.says(first, FenceAck(fence.gateway_handle, NO_HANDLE, fence.epoch, refusal=no_pages))
    else:
        script.wait(3.0, TICK)  # it sends heartbeats, but no FenceAck
    script.grant(other)
    for peer in spares:
        script.server(peer).silent = False
    assert (loop.state, loop.route) == ("running", [HEAD, other])
    return first, other


@pytest.mark.parametrize("way", ["refuses", "does not answer"])
def test_excluded_server_is_eligible_after_start(way: str) -> None:
    """Nothing but StartEpoch has happened since: no token, no pause."""
    loop = start_loop()
    excluded, other = exclude_one_of_two(loop, way)
    loop.script.kill(other)
    assert (loop.state, loop.route) == ("running", [HEAD, excluded])


def test_server_with_failed_step_is_eligible_after_start() -> None:
    loop = start_loop()
    loop.script.add_server("c", 2, 4)
    loop.script.reports(SESSION, TAIL, FaultKind.FAILED)
    assert (loop.state, loop.route) == ("running", [HEAD, SECOND_TAIL])
    loop.script.kill(SECOND_TAIL)
    assert (loop.state, loop.route) == ("running", [HEAD, TAIL])
