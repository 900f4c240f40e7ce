"""The snapshot of `Swarm.List`: causes of missing models, servers without a link, and the states of sessions."""

from __future__ import annotations

from dataclasses import replace

from support.core.gateway import Swarm, swarm_of
from support.gateway_service import make_service_with_model

from modelswarm_gateway.api.grpc.admin.swarm_state import _session, build_snapshot
from tools.dashboard.metric_registries import BLOCKS, make_hello

PROMPT = [5, 6, 7]
AHEAD = 4  # tokens that may be generated ahead of the client


def waits(swarm: Swarm) -> bool:
    return _session(swarm.gateway.view("a")).waits_for_reader


async def test_starting_model_has_its_phase_and_reason() -> None:
    _, node = make_service_with_model()

    [model] = build_snapshot(node).models
    assert (model.phase, model.ready) == ("tokenizer", False)
    assert model.reason.startswith("its tokenizer waits for tokenizer.json")

    node.on_link_down("s0/1/x", "gone")
    [model] = build_snapshot(node).models
    assert model.phase == "linking servers"
    assert model.reason.startswith(f"no server for blocks 0:{BLOCKS}")


async def test_server_with_invalid_hello_is_listed_as_unlinked() -> None:
    _, node = make_service_with_model()
    node.on_link_up("s1/1/x", replace(make_hello("s1", 0, BLOCKS), last=0))

    [unlinked] = build_snapshot(node).unlinked
    assert unlinked.peer == "s1/1/x"
    assert unlinked.reason.startswith("its Hello is not valid")
    node.on_link_down("s1/1/x", "gone")
    assert not build_snapshot(node).unlinked


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
