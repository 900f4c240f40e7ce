"""The client says what answers at a wrong address: real gRPC, HTTP and silent ports."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.eventually import SECONDS
from support.ports import grpc_port, http_port
from typing_extensions import override

from modelswarm.cli.batch.input_file import BatchRequest
from modelswarm.cli.batch.sending import BatchSender, RequestTimeouts
from modelswarm.client.api import (
    AsyncClient,
    BadRequestError,
    Client,
    ConnectionBrokenError,
    NotAGatewayError,
)
from modelswarm.local import port_check
from tools.devcluster.control_plane.pki import Pki


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


class ModelsHandler(GatewayHandler):
    """Lists no model."""

    @override
    def do_GET(self) -> None:
        super().do_GET()
        self.wfile.write(b'{"data": []}')


def test_grpc_port_is_named() -> None:
    with (
        grpc_port() as port,
        Client(f"http://127.0.0.1:{port}") as client,
        pytest.raises(NotAGatewayError, match="is a gRPC port; allowed: the gateway's HTTP"),
    ):
        client.models()


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


@pytest.fixture
def secure_port(tmp_path: Path) -> Iterator[int]:
    """A port with TLS, whose certificate is of an authority of its own."""
    pair = Pki(tmp_path).server("gateway", (), ("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelsHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


async def test_authority_of_the_environment_is_trusted(
    secure_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"https://127.0.0.1:{secure_port}"
    monkeypatch.setenv("SSL_CERT_FILE", str(Pki(tmp_path).ca.certificate))
    async with AsyncClient(base) as client:
        assert await client.models() == []
    request = BatchRequest(custom_id="a", method="POST", url="/v1/completions", body={})
    async with BatchSender(base, "m", 1, RequestTimeouts(SECONDS, 0.0)) as sender:
        error = (await sender.fetch_answer(request)).error
        assert error is not None and error["code"] == "not_a_gateway"  # it takes no POST
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    async with AsyncClient(base) as client:
        with pytest.raises(BadRequestError, match=r"^SSL_CERT_FILE: it cannot be read: No such"):
            await client.models()


async def test_authorities_are_not_read_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conda leaves SSL_CERT_FILE behind when an environment is removed."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    request = BatchRequest(custom_id="a", method="POST", url="/v1/completions", body={})
    with http_port(ModelsHandler) as port:
        base = f"http://127.0.0.1:{port}"
        async with AsyncClient(base) as client:
            assert await client.models() == []
        async with BatchSender(base, "m", 1, RequestTimeouts(SECONDS, 0.0)) as sender:
            error = (await sender.fetch_answer(request)).error
            assert error is not None and error["code"] == "not_a_gateway"


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
