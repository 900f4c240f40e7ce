"""A chat turn over connections that break: resumed after the last complete event, until a deadline."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from modelswarm.client.openai import ConnectionBrokenError, OpenAIClient
from modelswarm.client.resuming import RECONNECT_SECONDS, Waiting, stream_resuming
from modelswarm.errors import ModelSwarmError, UnavailableError, UserError

MESSAGES = [{"role": "user", "content": "hi"}]
OPENING = b'data: {"choices":[{"delta":{"content":""}}]}\n\n'
END = (
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"total_tokens":9}}\n\ndata: [DONE]\n\n'
)


def event(number: int, text: str) -> bytes:
    content = json.dumps({"choices": [{"delta": {"content": text}}]})
    return f"id: {number}-abcd0123\ndata: {content}\n\n".encode()


def refusal(code: str, message: str = "later") -> bytes:
    return json.dumps({"error": {"message": message, "param": None, "code": code}}).encode()


@dataclass
class StandIn:
    """A gateway that answers each request with the next script: a status, and bytes before the connection ends."""

    scripts: list[tuple[int, bytes]]
    url: str = ""
    resumed_after: list[str | None] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@contextmanager
def stand_in(*scripts: tuple[int, bytes]) -> Iterator[StandIn]:
    state = StandIn(list(scripts))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            state.resumed_after.append(self.headers["last-event-id"])
            status, content = state.scripts.pop(0)
            self.send_response(status)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Reader:
    """Reads a turn with a clock that is moved only by its pauses."""

    url: str
    now: float = 0.0
    breaks: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def read(self) -> None:
        def sleep(seconds: float) -> None:
            self.now += seconds

        with OpenAIClient(self.url) as client:
            for chunk in stream_resuming(
                client,
                "m",
                MESSAGES,
                "talk",
                on_break=lambda error: self.breaks.append(str(error)),
                waiting=Waiting(lambda: self.now, sleep),
                max_tokens=5,
            ):
                self.texts.append(chunk.text)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def test_broken_stream_continues_behind_its_last_event() -> None:
    first = OPENING + event(3, "1 2") + event(4, " 3")
    with stand_in((200, first), (200, event(5, " 4") + END)) as gateway:
        reader = Reader(gateway.url)
        reader.read()
    assert reader.text == "1 2 3 4"
    assert gateway.resumed_after == [None, "4-abcd0123"]
    assert gateway.bodies[0] == gateway.bodies[1]
    assert reader.breaks == ["the stream ended before [DONE]"]


@pytest.mark.parametrize("cut", range(1, len(event(4, " 3"))))
def test_event_that_broke_off_is_shown_once(cut: int) -> None:
    first = OPENING + event(3, "1 2") + event(4, " 3")[:cut]
    with stand_in((200, first), (200, event(4, " 3") + END)) as gateway:
        reader = Reader(gateway.url)
        reader.read()
    assert reader.text == "1 2 3"
    assert gateway.resumed_after[1] == "3-abcd0123"


def test_stream_without_any_event_is_asked_for_anew() -> None:
    with stand_in((200, b": waiting\n"), (200, OPENING + event(3, "1") + END)) as gateway:
        reader = Reader(gateway.url)
        reader.read()
    assert reader.text == "1"
    assert gateway.resumed_after == [None, None]


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "session_elsewhere"), (503, "no_servers"), (409, "session_busy"), (429, "no_capacity")],
)
def test_refusals_after_a_break_are_tried_again(status: int, code: str) -> None:
    with stand_in(
        (200, event(3, "1")), (status, refusal(code)), (200, event(4, " 2") + END)
    ) as gateway:
        reader = Reader(gateway.url)
        reader.read()
    assert reader.text == "1 2"
    assert len(reader.breaks) == 1, "one remark for one break"


def test_stopping_gateway_is_a_break() -> None:
    stopping = b"data: " + refusal("gateway_stopping") + b"\n\n"
    with stand_in((200, event(3, "1") + stopping), (200, event(4, " 2") + END)) as gateway:
        reader = Reader(gateway.url)
        reader.read()
    assert reader.text == "1 2"


def test_refusal_of_the_first_request_is_raised_at_once() -> None:
    with stand_in((429, refusal("no_capacity", "no free KV"))) as gateway:
        reader = Reader(gateway.url)
        with pytest.raises(UnavailableError, match="no free KV"):
            reader.read()
    assert reader.now == 0.0


def test_lost_session_ends_the_turn() -> None:
    with stand_in((200, event(3, "1")), (410, refusal("session_lost", "less is left"))) as gateway:
        reader = Reader(gateway.url)
        with pytest.raises(UserError, match="less is left"):
            reader.read()
    assert reader.text == "1"


def test_gateway_that_stays_away_is_given_up_at_deadline() -> None:
    with stand_in() as gateway:
        gone = gateway.url
    reader = Reader(gone)
    with pytest.raises(ConnectionBrokenError, match="no gateway answers") as raised:
        reader.read()
    assert isinstance(raised.value, ModelSwarmError)
    assert RECONNECT_SECONDS - 1 < reader.now <= RECONNECT_SECONDS
