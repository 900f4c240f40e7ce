"""The stream of another gateway is forwarded in whole events, and failover continues it when that gateway is lost."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send
from support.eventually import SECONDS
from support.gateway_service import make_service

from modelswarm_gateway.api import forwarding
from modelswarm_gateway.api.asgi_server import AsgiServer, bind_socket
from modelswarm_gateway.api.failover import StreamFailover
from modelswarm_gateway.api.forwarding import (
    Forwarder,
    OriginalRequest,
    PeerGone,
    PeerUnreachable,
    whole_answer,
)
from modelswarm_gateway.api.http.openai_responses import (
    ChatResponseBuilder,
    ResponseHead,
    error_event,
    keepalive_comment,
)
from modelswarm_gateway.api.http.relay import ForwardContext, Relay
from modelswarm_gateway.api.http.response_writer import STREAM_HEADERS, ResponseWriter
from modelswarm_gateway.api.http.sse_reader import SseReader, parse_error_body, parse_event_id_line
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.tool_calls.events import TextDelta
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

BUILDER = ChatResponseBuilder(ResponseHead("m", 1, [(5, 6)], usage_in_stream=True))
FIRST = BUILDER.output_event((TextDelta("a"),), (7,), "2")
SECOND = BUILDER.output_event((TextDelta("\n\nid: 9\n"),), (8,), "3-0a")
WITHOUT_END = b"".join(
    (keepalive_comment(""), BUILDER.opening(), FIRST, keepalive_comment(""), SECOND)
)
ALL = WITHOUT_END + BUILDER.finish_event("stop") + BUILDER.end_events(2)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other gateway, which runs in this process, respond late on a busy machine."""
    monkeypatch.setattr(forwarding, "CONNECT_SECONDS", SECONDS)


@pytest.mark.parametrize("size", [1, 7, 64, len(ALL)])
def test_stream_passes_through_unchanged_in_any_chunks(size: int) -> None:
    events = SseReader()
    parts = [events.add_bytes(ALL[at : at + size]) for at in range(0, len(ALL), size)]
    assert b"".join(parts) == ALL
    assert (events.last_event_id, events.is_done, events.error) == ("3-0a", True, None)


def test_cut_stream_resumes_behind_its_last_event_id() -> None:
    expected = [line for line in ALL.split(b"\n") if not line.startswith(b":")]
    for length in range(1, len(ALL)):
        events = SseReader()
        passed = events.add_bytes(ALL[:length])
        rest = {None: BUILDER.opening() + FIRST + SECOND, "2": SECOND, "3-0a": b""}[
            events.last_event_id
        ]
        whole = passed + rest + BUILDER.finish_event("stop") + BUILDER.end_events(2)
        assert events.is_done is False
        assert [line for line in whole.split(b"\n") if not line.startswith(b":")] == expected


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_stream_of_responses_is_cut_at_its_ids(size: int) -> None:
    added = b'event: response.output_item.added\ndata: {"type": "x"}\n\n'
    delta = b'id: resp_1:3-0a:3\nevent: response.output_text.delta\ndata: {"delta": "a"}\n\n'
    last = b'event: response.completed\ndata: {"response": {}}\n\n'
    events, passed = SseReader(), b""
    for at in range(0, len(added + delta), size):
        passed += events.add_bytes((added + delta)[at : at + size])
    assert (passed, events.last_event_id, events.is_done) == (added + delta, "resp_1:3-0a:3", False)
    assert parse_event_id_line(passed) == "resp_1:3-0a:3"
    assert events.add_bytes(added) == b""
    assert events.add_bytes(last) == added + last
    assert events.is_done


@pytest.mark.full
def test_long_event_is_read_in_linear_time() -> None:
    """The end of a response repeats its text, with scores 200 MiB: in parts of what a connection gives at once."""
    events, size = SseReader(), 16 << 20
    began = time.process_time()
    for _ in range(0, size, 8 << 10):
        assert events.add_bytes(b"x" * (8 << 10)) == b""
    assert len(events.add_bytes(b"\nevent: response.completed\n\n")) > size
    assert time.process_time() - began < 2.0  # 10 s if each part copies those before it


def test_error_event_is_separated_from_the_stream() -> None:
    error = ApiError(Code.STOPPING, "it ends")
    events = SseReader()
    assert events.add_bytes(WITHOUT_END + error_event(error.envelope())) == WITHOUT_END
    assert events.error is not None
    assert (events.error.code, str(events.error), events.is_done) == (error.code, "it ends", False)
    assert parse_error_body(b"<html>").code is Code.INTERNAL
    newer = json.dumps({"error": {"code": "new", "message": "newer"}}).encode()
    assert (parse_error_body(newer).code, str(parse_error_body(newer))) == (Code.INTERNAL, "newer")
    assert parse_event_id_line(SECOND) == "3-0a"


async def echo_headers(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(headers).encode()})


async def test_forwarded_request_keeps_its_request_id() -> None:
    server = AsgiServer(echo_headers, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    forwarder = Forwarder()
    sent = {"x-request-id": "trace-17", "last-event-id": "5", "cookie": "private"}
    original = OriginalRequest("/v1/completions", sent, {})
    async with forwarder.forward(server.target, original, None, is_alive) as response:
        got = json.loads(b"".join([part async for part in response.parts]))
    assert (got["x-request-id"], got["last-event-id"]) == ("trace-17", "5")
    assert "cookie" not in got
    await forwarder.close()
    await server.stop()


async def test_forwarded_header_keeps_its_bytes() -> None:
    """A client's key may have any bytes; starlette reads each as one character."""
    received = list[bytes]()

    async def take_key(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(dict(scope["headers"])[b"authorization"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    server = AsgiServer(take_key, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    forwarder, key = Forwarder(), b"Bearer schl\xfc\xc3\xbcssel"
    headers = {"authorization": key.decode("latin-1")}
    original = OriginalRequest("/v1/completions", headers, {})
    try:
        async with forwarder.forward(server.target, original, "5", is_alive) as response:
            assert response.status == 200
        await forwarder.call("DELETE", server.target, "/v1/sessions/s", {}, headers)
    finally:
        await forwarder.close()
        await server.stop()
    assert received == [key, key]


async def stream_answer(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ALL})


async def test_forwarded_stream_has_the_headers_of_a_stream() -> None:
    """Without them a proxy in front of this gateway may collect the events, and show them all at the end."""
    server = AsgiServer(stream_answer, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    service, _ = make_service()
    forwarder, sent = Forwarder(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    request = GenerationRequest("m", TokenPrompt((5,)), "prompt", SamplingOptions(), session_id="s")
    context = ForwardContext(forwarder, OriginalRequest("/v1/completions", {}, {}))
    delivered: list[str] = []
    relay = Relay(
        service,
        request,
        context,
        server.target,
        ResponseWriter(send),
        stream=True,
        on_delivered=delivered.append,
    )
    await relay.run(None, asyncio.get_running_loop().create_future())
    assert set(STREAM_HEADERS) <= set(sent[0]["headers"])
    assert b"".join(message["body"] for message in sent[1:]) == ALL
    assert delivered[-1] == "3-0a"
    await forwarder.close()
    await server.stop()


async def answer_late(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `/health` at once, and all else after half a second."""
    if scope["path"] != "/health":
        await asyncio.sleep(0.5)
    headers = [(b"x-should-retry", b"true"), (b"x-session-id", b"s"), (b"server", b"x")]
    await send({"type": "http.response.start", "status": 409, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def test_call_with_a_body_is_awaited_while_its_gateway_responds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "CALL_SECONDS", 0.1)
    monkeypatch.setattr(forwarding, "ALIVE_CHECK_SECONDS", 0.1)
    server = AsgiServer(answer_late, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    forwarder = Forwarder()
    path = "/v1/sessions/s/fork"
    answer = whole_answer(await forwarder.call("POST", server.target, path, {}, {}, {}))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "true")
    assert answer.headers["x-session-id"] == "s" and "server" not in answer.headers
    with pytest.raises(PeerUnreachable):
        await forwarder.call("DELETE", server.target, "/v1/sessions/s", {}, {})
    await server.stop()
    with pytest.raises(PeerUnreachable):
        await forwarder.call("POST", server.target, path, {}, {}, {})
    await forwarder.close()


async def is_alive() -> bool:
    return True


async def test_forwarded_answer_may_be_silent_while_its_gateway_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that is not streamed sends nothing until its end, which may take many minutes."""
    monkeypatch.setattr(forwarding, "READ_SECONDS", 2.0)

    async def answer_later(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(2.5)
        await answer_late(scope, receive, send)

    server = AsgiServer(answer_later, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    forwarder = Forwarder()
    original = OriginalRequest("/v1/completions", {}, {})
    async with forwarder.forward(server.target, original, None, is_alive) as response:
        assert await anext(response.parts) == b"{}"
        assert _has_keepalive(server.target)
    await forwarder.close()
    await server.stop()


async def test_answer_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open one would count for the most connections of a gateway, and its owner would go on sending."""
    monkeypatch.setattr(forwarding, "ALIVE_CHECK_SECONDS", 0.05)
    asked, answered, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer_when_asked(scope: Scope, receive: Receive, send: Send) -> None:
        await asked.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        answered.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def is_moved() -> bool:
        asked.set()
        await answered.wait()
        await asyncio.sleep(0.1)  # until the answer is received here
        return False

    server = AsgiServer(answer_when_asked, bind_socket("--http", "127.0.0.1:0"))
    await server.start()
    forwarder = Forwarder()
    with pytest.raises(PeerGone):
        async with forwarder.forward(
            server.target, OriginalRequest("/v1/completions", {}, {}), None, is_moved
        ):
            pytest.fail("there is no answer to read")
    try:
        await asyncio.wait_for(left.wait(), SECONDS)
    finally:
        await forwarder.close()
        await server.stop()


def _has_keepalive(target: str) -> bool:
    """Return whether the kernel probes a connection to this target; elsewhere than on Linux it cannot be seen."""
    if sys.platform != "linux":
        return True
    port, established, keepalive = f":{int(target.rpartition(':')[2]):04X}", "01", "02:"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(
        line[2].endswith(port) and line[3] == established and line[5].startswith(keepalive)
        for line in lines
    )


async def test_failover_retries_only_after_a_break_until_its_limit() -> None:
    now = 0.0
    failover = StreamFailover(lambda: now)
    busy = ApiError(Code.SESSION_BUSY, "busy")
    with pytest.raises(ApiError, match="busy"):
        await failover.before_retry(busy)
    await failover.before_retry(PeerGone())
    await failover.before_retry(busy)
    with pytest.raises(ApiError, match="lost"):
        await failover.before_retry(ApiError(Code.SESSION_LOST, "lost"))
    failover.on_delivered()
    with pytest.raises(ApiError, match="busy"):
        await failover.before_retry(busy)
    await failover.before_retry(PeerGone())
    now = 1000.0
    with pytest.raises(ApiError, match="resume with Last-Event-ID"):
        await failover.before_retry(busy)
