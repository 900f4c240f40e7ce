"""A gateway that stops waits for the answers that it has accepted, also for those that only start."""

from __future__ import annotations

import asyncio

from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from tools.dashboard.metric_registries import MODEL

REQUEST = GenerationRequest(MODEL, TokenPrompt((5,)), "prompt", SamplingOptions())
NAMED = GenerationRequest(MODEL, TokenPrompt((5,)), "prompt", SamplingOptions(), session_id="a")


async def test_stop_waits_for_running_generations() -> None:
    service, _ = await make_service_with_files(model_files())
    assert await service.wait_until_idle(0)
    generation = await service.start_generation(REQUEST)
    assert not await service.wait_until_idle(0)
    idle = asyncio.create_task(service.wait_until_idle(SECONDS))
    await asyncio.sleep(0)
    generation.close()
    assert await idle


async def test_stop_waits_for_requests_that_are_starting() -> None:
    """This one waits for a server that is asked for its session, and says nothing."""
    service, _ = await make_service_with_files(model_files())
    starting = asyncio.create_task(service.start_generation(NAMED))
    await asyncio.sleep(0)
    service.accepting = False
    assert not await service.wait_until_idle(0)
    idle = asyncio.create_task(service.wait_until_idle(SECONDS))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert await idle


async def test_stop_waits_for_forwarded_answers_and_ends_them() -> None:
    service, _ = await make_service_with_files(model_files())
    with service.forwarding() as stopping:
        assert not await service.wait_until_idle(0)
        idle = asyncio.create_task(service.wait_until_idle(SECONDS))
        await asyncio.sleep(0)
        service.abort_all()
        assert stopping.done()
    assert await idle
