"""The client says what answers at a wrong address: real gRPC, HTTP and silent ports."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import grpc
import pytest
from support.eventually import SECONDS
from support.ports import http_port
from typing_extensions import override

from modelswarm.client.api import AsyncClient, Client, ConnectionBrokenError, NotAGatewayError
from modelswarm.local import port_check


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a port on a busy machine answer late."""
    monkeypatch.setattr(port_check, "PROBE_SECONDS", SECONDS)


class GatewayHandler(BaseHTTPRequestHandler):
    """Answers as the HTTP port of a gateway does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("x-request-id", "req_1")
        self.end_headers()

    @override
    def log_message(self, *parts: object) -> None:
        """Print nothing."""


def test_grpc_port_is_named() -> None:
    with ThreadPoolExecutor() as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with (
                Client(f"http://127.0.0.1:{port}") as client,
                pytest.raises(
                    NotAGatewayError, match="is a gRPC port; allowed: the gateway's HTTP"
                ),
            ):
                client.models()
        finally:
            server.stop(None).wait()


def test_gateway_without_tls_is_named() -> None:
    with (
        http_port(GatewayHandler) as port,
        Client(f"https://127.0.0.1:{port}") as client,
        pytest.raises(NotAGatewayError) as caught,
    ):
        client.models()
    assert str(caught.value) == (
        f"https://127.0.0.1:{port} is the HTTP port of a gateway without TLS; "
        f"allowed: http://127.0.0.1:{port}"
    )


async def test_address_that_breaks_is_looked_at_once() -> None:
    asked: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, AsyncClient(f"http://127.0.0.1:{port}", max_retries=1) as client:
        with pytest.raises(ConnectionBrokenError, match="broke"):
            await client.models()

    assert asked.count(b"GET /health HTTP/1.1\r\n") == 1
    assert asked.count(b"GET /v1/models HTTP/1.1\r\n") == 2
