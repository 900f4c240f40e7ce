"""A gateway that has just started denies no model before its servers have told theirs."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.responses.response_ids import ResponseId, model_mark
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery import dialer
from modelswarm_gateway.discovery.file_source import FileSource
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TextPrompt
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_control import session_state
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.runtime.node import Node

pytestmark = pytest.mark.full

STORED = ResponseId(model_mark("toy"), "0" * 8, 0, "0" * 24, "0" * 16)
ASK = GenerationRequest("toy", TextPrompt("go"), "prompt", SamplingOptions(), (), None)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """Yield a node with one server, which accepts connections and sends nothing."""
    clock = asyncio.get_running_loop().time
    made = Node("gateway/1/x", 1, FileSource(tmp_path), GatewaySettings(), clock, time.time)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        member = {"name": "s0", "peer": "s0/1/x", "target": f"127.0.0.1:{port}", "model": "toy"}
        (tmp_path / "s0.json").write_text(json.dumps(member))
        yield made
        await made.shut_down()


async def refusal(node: Node) -> Code:
    """Return the code for a request of the model, which is that of its sessions and of the model itself.

    A stored response that the gateway does not find is denied only when the model is.
    """
    service = GenerationService(node, Metrics(node), asyncio.get_running_loop().time)
    with pytest.raises(ApiError) as refused:
        await service.start_generation(ASK)
    with pytest.raises(ApiError) as lost:
        await session_state(service, ("toy", "chat"))
    app = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=app, base_url="http://gateway") as client:
        shown = (await client.get("/v1/models/toy")).json()["error"]["code"]
        stored = (await client.get(f"/v1/responses/{STORED}")).json()["error"]["code"]
    assert lost.value.code.value == refused.value.code.value == shown
    assert (stored == Code.NOT_FOUND) == (shown == Code.MODEL_NOT_FOUND)
    return refused.value.code


async def test_model_is_unknown_only_after_all_servers_had_their_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await refusal(node) is Code.NO_SERVERS, "no server was searched"
    node.discover_servers()
    failed = asyncio.get_running_loop().time() + 3.0  # the limit of a dial is one second
    while asyncio.get_running_loop().time() < failed:
        node.discover_servers()
        await asyncio.sleep(0.1)
    assert await refusal(node) is Code.NO_SERVERS, "one server has not answered yet"
    monkeypatch.setattr(dialer, "SETTLE_SECONDS", 1.0)
    assert await refusal(node) is Code.MODEL_NOT_FOUND


async def test_no_model_is_denied_before_the_first_server_is_there(
    node: Node, tmp_path: Path
) -> None:
    """A server that loads a model is not in the folder yet."""
    (tmp_path / "s0.json").unlink()
    node.discover_servers()
    assert await refusal(node) is Code.NO_SERVERS
