"""Servers that the recovery loop excluded from a session: they are eligible again after StartEpoch."""

from __future__ import annotations

import pytest
from support.core.scripted_server import Script

from modelswarm.protocol.identity import NO_HANDLE, PeerId, name_of
from modelswarm.protocol.messages import FaultKind, Fence, FenceAck, Refusal
from modelswarm_gateway.core.interface.effects import SessionLost

SESSION = "s"
TAIL = "b/1/0"


def start_session() -> Script:
    """Start a session over the servers a and b."""
    script = Script()
    script.add_server("a", 0, 2)
    script.add_server("b", 2, 4)
    script.start_turn(SESSION, (5, 6, 7))
    script.token(SESSION)
    assert running_route(script) == ["a", "b"]
    return script


def running_route(script: Script) -> list[str]:
    assert script.gateway.view(SESSION).state == "running"
    return script.names(SESSION)


def exclude_one_of_two(script: Script, way: str) -> tuple[PeerId, PeerId]:
    """Replace TAIL; the server that is asked first fails in this `way`. Return it and the one that runs now."""
    spares = {script.add_server(name, 2, 4) for name in ("c", "d")}
    for peer in spares:
        script.server(peer).silent = True
    script.kill(TAIL)
    [first] = [peer for peer in spares if script.sent_to(peer, Fence)]
    [other] = spares - {first}
    if way == "refuses":
        fence = script.sent_to(first, Fence)[-1]
        no_pages = Refusal.NO_PAGES
        script.send(first, FenceAck(fence.gateway_handle, NO_HANDLE, fence.epoch, refusal=no_pages))
    else:
        script.wait(3.0)  # it sends heartbeats, but no FenceAck
    script.grant(other)
    for peer in spares:
        script.server(peer).silent = False
    assert running_route(script) == ["a", name_of(other)]
    return first, other


@pytest.mark.parametrize("way", ["refuses", "does not answer"])
def test_excluded_server_is_eligible_after_start(way: str) -> None:
    """Nothing but StartEpoch has happened since: no token, no pause."""
    script = start_session()
    excluded, other = exclude_one_of_two(script, way)
    script.kill(other)
    assert running_route(script) == ["a", name_of(excluded)]


def test_server_with_failed_step_is_eligible_after_start() -> None:
    script = start_session()
    spare = script.add_server("c", 2, 4)
    script.reports(SESSION, TAIL, FaultKind.FAILED)
    assert running_route(script) == ["a", "c"]
    script.kill(spare)
    assert running_route(script) == ["a", "b"]


def test_session_without_a_token_ends_and_excludes_no_server() -> None:
    """The session's own parameters leave no token: every server would find the same."""
    script = start_session()
    script.reports(SESSION, TAIL, FaultKind.NO_TOKEN)
    [lost] = script.gateway.troubles(SESSION)
    assert isinstance(lost, SessionLost)
    assert script.gateway.core.find_view(SESSION) is None
    script.start_turn("t", (5, 6, 7))
    assert script.names("t") == ["a", "b"]
