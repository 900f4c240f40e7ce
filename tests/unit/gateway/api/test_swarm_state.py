"""Sessions in the snapshot of `Swarm.List`: waiting for a reader while the client has read too little, or held."""

from __future__ import annotations

from support.core.gateway import Swarm, swarm_of

from modelswarm_gateway.api.grpc.swarm_state import _session

PROMPT = [5, 6, 7]
AHEAD = 4  # tokens that may be generated ahead of the client


def waits(swarm: Swarm) -> bool:
    return _session(swarm.gateway.view("a")).waits_for_reader


def test_session_of_silent_reader_waits_until_it_reads() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    swarm.gateway.start("a", PROMPT, 50, ahead=AHEAD)
    assert waits(swarm)
    stopped_at = swarm.gateway.view("a").length

    swarm.core.on_read("a", 1000, swarm.now)
    assert not waits(swarm)
    swarm.run()
    assert swarm.gateway.view("a").length > stopped_at


def test_finished_session_waits_for_no_reader() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    swarm.gateway.start("a", PROMPT, 2, ahead=AHEAD)
    assert swarm.gateway.view("a").state == "parked"
    assert not waits(swarm)


def test_prompt_without_new_tokens_waits_for_no_reader() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    swarm.gateway.begin("a", PROMPT, 0, ahead=AHEAD)
    assert not waits(swarm)


def test_held_session_shows_its_reason() -> None:
    swarm = swarm_of((0, 4))
    swarm.gateway.start("a", PROMPT, 50, ahead=AHEAD)
    [server] = swarm.core.server_views()
    swarm.kill(server.peer)
    shown = _session(swarm.gateway.view("a"))
    assert shown.state == "held"
    assert shown.hold_reason == swarm.gateway.view("a").hold_reason != ""
    assert not shown.waits_for_reader
