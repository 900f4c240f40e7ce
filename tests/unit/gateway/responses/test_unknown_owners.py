"""A response whose conversation another gateway holds, which does not say where it is reached."""

from __future__ import annotations

import asyncio

import httpx
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.session_search import HopInfo, SessionInfo
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.responses.response_ids import ResponseId, model_mark
from modelswarm_gateway.generation.named_sessions import wire_name
from tools.dashboard.metric_registries import MODEL


async def test_owner_without_an_address_is_told_at_once() -> None:
    service, node = await make_service_with_files(model_files())
    before = ResponseId(model_mark(MODEL), "0" * 8, 1, "0" * 24, "0" * 16)
    body = {"model": MODEL, "input": "more", "previous_response_id": str(before)}
    hop = HopInfo(0, 2, 3, 3, Epoch(1, 1))
    found = SessionInfo(
        wire_name((MODEL, before.session_id)), Epoch(1, 1), "g/1/b",
        owner_linked=True, hops=(hop,), last_started=Epoch(1, 1), search_id=1,
    )  # fmt: skip
    transport = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        asking = asyncio.create_task(client.post("/v1/responses", json=body))
        async with asyncio.timeout(SECONDS):
            while not asking.done():  # the server's answer counts once the search has begun
                node.on_items("s0/1/x", [found])
                await asyncio.sleep(0.01)
    answer = await asking
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "session_elsewhere"
