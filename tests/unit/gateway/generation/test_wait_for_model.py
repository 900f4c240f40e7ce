"""A request waits while the tokenizer of its model is loaded, but not for one that cannot be."""

from __future__ import annotations

import asyncio

import pytest
from support.eventually import SECONDS
from support.gateway_service import make_service_with_model, send_files
from support.models.tokenizers import model_files

from modelswarm_gateway.api.tokenization import TokenizeRequest, tokenize_prompt
from modelswarm_gateway.errors import ApiError, Code
from tools.dashboard.metric_registries import MODEL

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
