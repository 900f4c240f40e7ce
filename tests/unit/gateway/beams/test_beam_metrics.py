"""The metrics and the usage of a beam search, whose steps are turns of sessions of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.messages import FenceAck, Finish, Token, TopLogprob
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.core.sessions.session import SessionState
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello

SERVER = "s0/1/x"
PROMPT, STEPS = (5, 6, 7), 3


def run_step(node: Node) -> bool:
    """Let the server run the next step of the only beam, after a fault; return False if none waits."""
    for handle, (s, hop) in list(node._core._recovery.hops.by_handle.items()):
        if s.state is SessionState.FENCING:
            node.recovery_events.record_reroute(s.name, node._streams[s.name], "link_down")
            kept = s.length - 1 if hop.server_handle else 0
            ack = FenceAck(handle, hop.server_handle or 1, s.epoch, kv=kept, log=kept)
            top = (TopLogprob(9, -1.0), TopLogprob(8, -2.0), TopLogprob(10, -3.0))
            last = Token(handle, s.epoch, s.length, 9, -1.0, Finish.LENGTH, top=top)
            node.on_items(SERVER, [ack, last])
            return True
    return False


async def test_beams_have_no_cached_prompt_and_count_faults() -> None:
    service, node = await make_service_with_files(model_files())
    node.on_link_up(SERVER, replace(make_hello("s0", 0, BLOCKS), target=""))  # it is not dialled
    options = SamplingOptions(max_tokens=STEPS, ignore_eos=True)
    prompt = TokenPrompt(PROMPT)
    request = GenerationRequest(MODEL, prompt, "prompt", options, beams=BeamOptions(1))
    generation = await service.start_generation(request)
    reading, steps = asyncio.create_task(generation.next_chunk(SECONDS)), 0
    async with asyncio.timeout(SECONDS):
        while not reading.done():
            steps += run_step(node)
            await asyncio.sleep(0)
    assert steps == STEPS and len(reading.result().tokens) == STEPS  # type: ignore[union-attr]
    assert generation.cached_tokens == 0
    generation.close()

    def read_counter(name: str, **labels: str) -> float | None:
        labels = {"model": MODEL, **labels}
        return service.metrics.registry.get_sample_value(f"modelswarm_gateway_{name}", labels)

    assert read_counter("reused_tokens_total") == 0
    assert read_counter("streams_total", outcome="recovered") == 1
