"""One connection to the HTTP server: bytes that are no HTTP request, and request heads that do not arrive."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from support.eventually import SECONDS

from modelswarm_gateway.api.asgi_server import AsgiServer, bind_socket
from modelswarm_gateway.api.http.request_log import RequestLog
from modelswarm_gateway.api.http_protocol import HEAD_SECONDS

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def read_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the whole body, then answer 200."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        continue
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connection(
    head_seconds: float = HEAD_SECONDS,
    app: ASGIApp = read_body,
    sent: bytes = b"",
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection whose first bytes are there before the server's clock starts."""
    server = AsgiServer(app, bind_socket("--http", "127.0.0.1:0"), head_seconds=head_seconds)
    await server.start()
    host, _, port = server.target.partition(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(sent)
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        async with asyncio.timeout(SECONDS):
            yield reader, writer
    finally:
        writer.close()
        await server.stop()


async def exchange(sent: bytes, app: ASGIApp = read_body) -> bytes:
    """Return all bytes of the response until the server closes the connection."""
    async with connection(app=app) as (reader, writer):
        writer.write(sent)
        return await reader.read()


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (CHUNKED + b"zz\r\n", 400, "illegal chunk header"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length"),
        (HEAD + b"Content-Length: x\r\n\r\n", 400, "Content-Length"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), 400, "use http://"),
        (b"hello\r\n\r\n", 400, "not a valid HTTP/1.1 request"),
        (HEAD + b"X: " + b"x" * (20 << 10), 431, "16 KiB"),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
    ],
    ids=["chunk", "two_lengths", "bad_length", "host", "tls", "line", "large", "encoding"],
)
async def test_framing_fault_gets_the_error_envelope(
    sent: bytes, status: int, message: str
) -> None:
    head, _, body = (await exchange(sent)).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    assert b"x-should-retry: false" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert re.search(rb"^x-request-id: req_[0-9a-f]{24}\r?$", head, re.MULTILINE)
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("invalid_request", "invalid_request_error")
    assert message in error["message"]


async def test_framing_fault_keeps_the_request_id_of_its_client() -> None:
    named = CHUNKED.replace(b"Host", b"X-Request-ID: mine\r\nHost", 1)
    assert b"x-request-id: mine\r\n" in await exchange(named + b"zz\r\n")


async def test_framing_fault_has_the_request_id_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    answer = await exchange(
        CHUNKED + b"zz\r\n", RequestLog(read_body, lambda: False, lambda model, status: None)
    )
    [request_id] = re.findall(rb"x-request-id: (\w+)", answer)
    assert any(f"request {request_id.decode()}: POST" in line for line in caplog.messages)


async def test_fault_in_the_body_of_head_has_no_body(caplog: pytest.LogCaptureFixture) -> None:
    answer = await exchange(CHUNKED.replace(b"POST", b"HEAD", 1) + b"zz\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_half_a_head_is_ended_with_408() -> None:
    async with connection(head_seconds=0.2, sent=HEAD) as (reader, _):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"x-should-retry: true" in answer
    assert b"did not arrive within 0.2 seconds" in answer


async def test_connection_without_a_byte_is_closed() -> None:
    async with connection(head_seconds=0.2) as (reader, _):
        assert await reader.read() == b""


async def test_head_timeout_spares_a_running_request() -> None:
    begun = HEAD + b"Content-Length: 2\r\n\r\n{"
    async with connection(head_seconds=2.0, sent=begun) as (reader, writer):
        await asyncio.sleep(2.5)  # a pending timer would have closed it
        for rest in (b"}", HEAD + b"Content-Length: 0\r\n\r\n"):  # the connection is still open
            writer.write(rest)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await reader.readuntil(b"0\r\n\r\n")


async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 400 without the body, as the API refuses one that is too large or too late."""
    await send({"type": "http.response.start", "status": 400, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_body_behind_its_answer_gets_no_more_time() -> None:
    async with connection(0.5, answer_at_once, CHUNKED) as (reader, writer):
        await reader.readuntil(b"0\r\n\r\n")
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.05)
        with suppress(ConnectionError):  # of bytes that came behind the end
            assert await ended == b""


async def test_next_request_follows_a_late_body() -> None:
    async with connection(app=answer_at_once) as (reader, writer):
        for rest in (CHUNKED, b"1\r\nx\r\n0\r\n\r\n" + CHUNKED):
            writer.write(rest)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            assert await reader.readuntil(b"0\r\n\r\n")
