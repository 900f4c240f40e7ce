"""A request waits while the tokenizer of its model is loaded, but not for one that cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.eventually import SECONDS
from support.gateway_service import (
    make_service_with_files,
    make_service_with_model,
    send_files,
)
from support.models.tokenizers import model_files

from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.api.tokenization import TokenizeRequest, tokenize_prompt
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TextPrompt
from modelswarm_gateway.generation.service import MAX_WAITING
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello

PROMPT = TokenizeRequest(model=MODEL, prompt="abc")


async def test_request_waits_until_the_tokenizer_is_loaded() -> None:
    service, node = make_service_with_model(tokenizer_seconds=SECONDS)
    request = asyncio.create_task(tokenize_prompt(service, PROMPT))
    await asyncio.sleep(0)
    assert not request.done()
    send_files(node, model_files())
    assert len((await request).tokens) == 3


async def test_request_ends_its_wait_when_the_files_cannot_be_used() -> None:
    service, node = make_service_with_model(tokenizer_seconds=SECONDS)
    request = asyncio.create_task(tokenize_prompt(service, PROMPT))
    await asyncio.sleep(0)
    send_files(node, {"tokenizer.json": b"{"})
    with pytest.raises(ApiError, match="its tokenizer files cannot be used") as refused:
        await request
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_SERVERS, 1.0)


async def test_request_is_refused_when_the_files_do_not_come() -> None:
    service, _ = make_service_with_model(tokenizer_seconds=0.1)
    with pytest.raises(ApiError, match="its tokenizer waits for") as refused:
        await tokenize_prompt(service, PROMPT)
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_SERVERS, 1.0)


async def test_request_does_not_wait_once_the_last_server_is_lost() -> None:
    service, node = make_service_with_model(tokenizer_seconds=SECONDS)
    request = asyncio.create_task(tokenize_prompt(service, PROMPT))
    await asyncio.sleep(0)
    node.on_link_down("s0/1/x", "gone")
    with pytest.raises(ApiError, match="its tokenizer is not loaded yet"):
        await request


async def test_request_waits_while_another_models_files_are_fetched() -> None:
    """The files of one model are fetched at a time."""
    service, node = make_service_with_model(tokenizer_seconds=SECONDS)
    hello = replace(make_hello("s1", 0, BLOCKS), model="other")
    node.on_link_up(hello.peer, hello)
    request = asyncio.create_task(tokenize_prompt(service, replace_model("other")))
    await asyncio.sleep(0)
    assert not request.done()
    send_files(node, model_files())
    assert len((await tokenize_prompt(service, PROMPT)).tokens) == 3
    node.discover_servers()  # this requests the files of the next model
    send_files(node, model_files(), hello.peer)
    assert len((await request).tokens) == 3


async def test_request_that_waits_when_the_gateway_stops_is_told_so() -> None:
    service, _ = make_service_with_model(tokenizer_seconds=SECONDS)
    request = asyncio.create_task(tokenize_prompt(service, PROMPT))
    await asyncio.sleep(0)
    service.accepting = False
    with pytest.raises(ApiError) as refused:
        await request
    assert refused.value.code is Code.STOPPING


async def test_request_beyond_those_that_may_wait_is_refused_at_once() -> None:
    service, node = make_service_with_model(tokenizer_seconds=SECONDS)
    requests = [asyncio.create_task(tokenize_prompt(service, PROMPT)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="its tokenizer waits for") as refused:
        await tokenize_prompt(service, PROMPT)
    assert refused.value.code is Code.NO_SERVERS
    send_files(node, model_files())
    assert [len(each.tokens) for each in await asyncio.gather(*requests)] == [3] * MAX_WAITING
    assert len((await tokenize_prompt(service, PROMPT)).tokens) == 3


def replace_model(model: str) -> TokenizeRequest:
    return PROMPT.model_copy(update={"model": model})


async def test_prompt_of_a_tokenizer_replaced_meanwhile_is_refused() -> None:
    """The token ids would stand for other texts. The old servers drain while the prompt is tokenized."""
    service, node = await make_service_with_files(model_files())
    hello = replace(make_hello("s1", 0, BLOCKS), revision="2")
    node.on_link_up(hello.peer, hello)
    node.discover_servers()  # this requests the files of the other revision
    other = model_files()
    other["tokenizer.json"] += b" "
    send_files(node, other, hello.peer)
    await wait_for(lambda: len({*node._models.entries()[0].tokenizers()}) == 2)
    request = GenerationRequest(MODEL, TextPrompt("abc"), "prompt", SamplingOptions())
    starting = asyncio.create_task(service.start_generation(request))
    await asyncio.sleep(0)
    assert not starting.done()
    node.on_items("s0/1/x", [Heartbeat(draining=True)])
    with pytest.raises(ApiError, match="was just replaced; repeat the request") as refused:
        await starting
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_SERVERS, 1.0)
    (await service.start_generation(request)).close()


async def wait_for(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_so():  # noqa: ASYNC110 (the registry has no event for it)
            await asyncio.sleep(0.01)
