"""The Session call: each request on its stream counts for the session's model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.sessions.stream import SessionStream
from modelswarm_gateway.errors import ApiError
from tools.dashboard.metric_registries import MODEL


async def test_refused_open_counts_for_the_model_it_names() -> None:
    service, _ = await make_service_with_files(model_files())

    async def requests() -> AsyncIterator[api_pb2.SessionRequest]:
        yield api_pb2.SessionRequest(open=api_pb2.OpenSession(model=MODEL, max_length=1_000_000))

    with pytest.raises(ApiError, match="positions"):
        async for _ in SessionStream(service, {}).answer(requests()):
            pass
    labels = {"model": MODEL, "code": "400"}
    name = "modelswarm_gateway_requests_total"
    assert service.metrics.registry.get_sample_value(name, labels) == 1
