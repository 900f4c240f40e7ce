"""The answer of another gateway over gRPC, which is a stand-in here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from grpc import aio
from support.ports import free_port
from typing_extensions import override

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_gateway.api.grpc.forwarding import forward_stream

LARGE = 5 << 20  # bytes; gRPC takes 4 MiB unless it is told otherwise


class Owner(api_pb2_grpc.InferenceServicer):
    """Answers with one part, as large as that of a long prompt's log probabilities."""

    @override
    async def GenerateStream(
        self, request: api_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[api_pb2.GenerateResponse]:
        yield api_pb2.GenerateResponse(text="x" * LARGE, finish_reason="stop")


async def test_part_of_any_size_is_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not asked for another gateway."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    server = aio.server()
    owner = Owner()  # type: ignore[abstract]  # it is asked for nothing else
    api_pb2_grpc.add_InferenceServicer_to_server(owner, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def is_alive() -> bool:
        return True

    request = api_pb2.GenerateRequest(model="m", session_id="s")
    try:
        parts = [part async for part in forward_stream(f"127.0.0.1:{port}", request, is_alive)]
    finally:
        await server.stop(None)
    assert [len(part.text) for part in parts] == [LARGE]
