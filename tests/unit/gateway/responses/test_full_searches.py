"""Requests that begin no turn, while a gateway searches for as many sessions as it may."""

from __future__ import annotations

import httpx
import pytest
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm_gateway.api.forwarding import Forwarder
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.responses.response_ids import ResponseId, model_mark
from modelswarm_gateway.api.responses.routes import _StoredRoutes
from modelswarm_gateway.api.responses.stored_responses import StoredResponse, StoredResponses
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation import session_locator
from tools.dashboard.metric_registries import MODEL

NAME = ResponseId(model_mark(MODEL), "0" * 8, 1, "0" * 24, "0" * 16)
SESSION, RESPONSE = "/v1/sessions/{session_id}", "/v1/responses/{response_id}"


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_locator, "MAX_SEARCHES", 0)


async def test_refusal_of_a_search_is_in_the_document() -> None:
    service, _ = await make_service_with_files(model_files())
    transport = httpx.ASGITransport(build_http_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for route in (SESSION, RESPONSE, f"{RESPONSE}/input_items"):
            for method in sorted({"get", "delete"} & set(paths[route])):
                path = route.format(session_id="s", response_id=NAME)
                answer = await client.request(method, path)
                assert answer.json()["error"]["code"] == "no_capacity", (method, route)
                codes = paths[route][method]["responses"][str(answer.status_code)]["description"]
                assert "no_capacity" in codes, (method, route)


async def test_response_stays_if_its_session_cannot_be_closed() -> None:
    service, _ = await make_service_with_files(model_files())
    forwarder, stored = Forwarder(), StoredResponses(service.clock)
    kept = StoredResponse(NAME, {"id": str(NAME)}, ())
    stored.keep(kept)
    with pytest.raises(ApiError) as refused:
        await _StoredRoutes(service, forwarder, stored).delete(kept)
    await forwarder.close()
    assert refused.value.code is Code.NO_CAPACITY
    assert stored.find(NAME) is not None
