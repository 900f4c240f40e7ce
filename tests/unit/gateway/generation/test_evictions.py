"""Idle named sessions give way to a turn that servers refused for lack of pages, and to no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.identity import NO_HANDLE, Epoch
from modelswarm.protocol.messages import FenceAck, Finish, Refusal, Sampling, Token
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello

SERVER = "s0/1/x"
KV = 5  # positions of each idle session
IDLE = 6  # sessions


async def make_idle_sessions(model: str = MODEL) -> tuple[GenerationService, Node]:
    """Return a service with idle named sessions on its only server, and its node. `model` is in their keys."""
    service, node = await make_service_with_files(model_files())
    node.on_link_up(SERVER, replace(make_hello("s0", 0, BLOCKS), target=""))  # it is not dialled
    for number in range(IDLE):
        session = node.open_session(MODEL)
        stream = node.start_turn(session, TurnRequest(tuple(range(KV)), 1, Sampling()))
        [(handle, epoch)] = fences(node)
        last = Token(handle, epoch, KV, 9, finish=Finish.LENGTH)
        node.on_items(SERVER, [FenceAck(handle, number + 1, epoch), last])
        assert stream.has_ended
        service.named_sessions.add_idle((model, str(number)), session)
    return service, node


def fences(node: Node) -> list[tuple[int, Epoch]]:
    """Return the gateway handle and the epoch of each hop whose create waits for an answer."""
    table = node._core._recovery.hops.by_handle
    return [(handle, s.epoch) for handle, (s, hop) in table.items() if hop.create_epoch == s.epoch]


async def refuse_turn(
    node: Node,
    service: GenerationService,
    reserved: int,
    paused: bool,
    beams: BeamOptions | None = None,
) -> Code:
    """Refuse a turn for lack of pages, as often as it is tried, and return its error."""
    options = SamplingOptions(max_tokens=reserved)
    request = GenerationRequest(MODEL, TokenPrompt((5,)), "prompt", options, beams=beams)
    turn = asyncio.create_task((await service.start_generation(request)).next_chunk(SECONDS))
    while not turn.done():
        for handle, epoch in fences(node):
            no_pages = Refusal.NO_PAGES
            node.on_items(
                SERVER, [FenceAck(handle, NO_HANDLE, epoch, refusal=no_pages, paused=paused)]
            )
        await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        turn.result()
    assert refused.value.retry_after == (10.0 if paused else 1.0)
    return refused.value.code


async def test_paused_admissions_evict_no_idle_session() -> None:
    service, node = await make_idle_sessions()
    assert await refuse_turn(node, service, 2 * KV, paused=True) is Code.NO_CAPACITY
    assert len(service.named_sessions) == IDLE


async def test_evictions_free_what_the_turn_reserves_and_no_more() -> None:
    service, node = await make_idle_sessions()
    assert await refuse_turn(node, service, 2 * KV, paused=False) is Code.NO_CAPACITY
    assert len(service.named_sessions) == IDLE - 2
    assert await refuse_turn(node, service, KV + 1, paused=False) is Code.NO_CAPACITY
    assert len(service.named_sessions) == IDLE - 4, "the next try may evict again"


async def test_idle_sessions_of_an_adapter_are_evicted_for_its_model() -> None:
    """Both have their pages on the same servers."""
    service, node = await make_idle_sessions("adapter")
    assert await refuse_turn(node, service, 2 * KV, paused=False) is Code.NO_CAPACITY
    assert len(service.named_sessions) == IDLE - 2


async def test_idle_sessions_are_evicted_for_all_beams() -> None:
    """Each of two beams reserves the prompt's entry, too."""
    service, node = await make_idle_sessions()
    code = await refuse_turn(node, service, 2 * KV - 1, paused=False, beams=BeamOptions(2))
    assert code is Code.NO_CAPACITY
    assert len(service.named_sessions) == IDLE - 4
