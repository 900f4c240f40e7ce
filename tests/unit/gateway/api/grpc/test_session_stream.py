"""The Session call: its requests count for the session's model, and its end writes no name into the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.inference import _free_logged
from modelswarm_gateway.api.grpc.sessions.stream import SessionStream
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.named_sessions import SessionKey
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


async def test_log_of_a_session_that_is_not_freed_has_no_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Anyone with the name may continue the session."""
    caplog.set_level(logging.INFO)
    service, node = await make_service_with_files(model_files())
    node.on_link_down("s0/1/x", "no server is asked for the session")
    newest: dict[SessionKey, SessionStream] = {}
    stream = SessionStream(service, newest)
    stream._key = (MODEL, "secret")
    newest[stream._key] = stream
    await _free_logged(stream)
    assert [line for line in caplog.messages if "not freed" in line and "not_found" in line]
    assert not [line for line in caplog.messages if "secret" in line]
