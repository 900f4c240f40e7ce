"""Failures that the Python client repeats, at a foreign server: it answers what each test says."""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, current_thread
from typing import Any

import pytest
from support.eventually import SECONDS
from support.ports import http_port
from typing_extensions import override

from modelswarm.client.api import (
    ApiError,
    AsyncClient,
    AuthenticationError,
    BadRequestError,
    Client,
    ConflictError,
    ConnectionBrokenError,
    GatewayUnreachableError,
    GoneError,
    InternalServerError,
    NotAGatewayError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ServiceUnavailableError,
    async_client,
)
from modelswarm.client.api.errors import ErrorFacts
from modelswarm.client.api.retries import RESUME_SECONDS, Retries

MODELS = json.dumps({"data": [{"id": "m"}]}).encode()
END = (
    b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}\n\n'
    b"data: [DONE]\n\n"
)
SOON = {"retry-after-ms": "1"}


@dataclass(frozen=True)
class Answer:
    """An answer; without a status the connection is closed instead."""

    status: int | None = 200
    content: bytes = MODELS
    headers: dict[str, str] = field(default_factory=dict)


def refusal(status: int, code: str = "busy", **headers: str) -> Answer:
    error = {"error": {"message": "not now", "param": None, "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, json.dumps(error).encode(), named)


def event(number: int, text: str) -> bytes:
    content = json.dumps({"choices": [{"index": 0, "text": text}]})
    return f"id: {number}-abcd0123\ndata: {content}\n\n".encode()


def stream_error(code: str) -> bytes:
    return f'data: {{"error":{{"message":"ended","param":null,"code":"{code}"}}}}\n\n'.encode()


@dataclass
class Server:
    """A server that gives the answers in turn, the last one for ever. DELETE is recorded apart."""

    answers: list[Answer]
    url: str = ""
    asked: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)


@contextmanager
def server(*answers: Answer) -> Iterator[Server]:
    state = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._answer(body)

        def do_GET(self) -> None:
            self._answer({})

        def do_DELETE(self) -> None:
            state.closed.append(self.path.partition("?")[0].rpartition("/")[2])
            self._write(Answer(content=b'{"deleted": true}'))

        def _answer(self, body: dict[str, Any]) -> None:
            state.asked.append((self.path, body, self.headers["last-event-id"]))
            self._write(state.answers.pop(0) if len(state.answers) > 1 else state.answers[0])

        def _write(self, answer: Answer) -> None:
            if answer.status is None:
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        @override
        def log_message(self, *_: Any) -> None:
            """Keep the output of tests free of the server's log."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{made.server_port}"
    thread = Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        made.shutdown()
        made.server_close()
        thread.join()


@pytest.mark.parametrize(
    "first",
    [
        Answer(429, b"{}", SOON),
        refusal(429, retry_after="0"),
        refusal(503, retry_after=email.utils.formatdate(time.time() - 60)),
        refusal(500, retry_after_ms="1"),
        refusal(409, retry_after_ms="1"),
        refusal(400, retry_after_ms="1", x_should_retry="true"),
        Answer(502, b"<html>", SOON),
    ],
)
def test_refusal_is_repeated(first: Answer) -> None:
    with server(first, Answer()) as made, Client(made.url) as client:
        assert client.models()[0].name == "m"
    assert len(made.asked) == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(429, retry_after="121"), RateLimitError),
        (refusal(503, retry_after_ms="1", x_should_retry="false"), ServiceUnavailableError),
        (refusal(409, retry_after_ms="1", x_should_retry="false"), ConflictError),
        (refusal(400, retry_after_ms="1"), BadRequestError),
        (refusal(410, "session_lost"), GoneError),
        (Answer(401, b"<html>"), AuthenticationError),
        (Answer(403, b""), PermissionDeniedError),
        (Answer(404, b"<html>"), NotAGatewayError),
        (Answer(200, b"<html>"), NotAGatewayError),
    ],
)
def test_refusal_is_final(answer: Answer, kind: type[ApiError]) -> None:
    with server(answer) as made, Client(made.url) as client, pytest.raises(kind):
        client.models()
    assert len(made.asked) == 1


def test_tries_are_counted() -> None:
    with server(refusal(429, "no_capacity", retry_after_ms="1", x_request_id="r1")) as made:
        for tries in (0, 3):
            with (
                Client(made.url, max_retries=tries) as client,
                pytest.raises(RateLimitError, match="not now") as refused,
            ):
                client.models()
            assert (refused.value.code, refused.value.request_id) == ("no_capacity", "r1")
            assert refused.value.retry_after == 0.001
    assert len(made.asked) == 1 + 4


def test_lost_connection_is_repeated_where_it_does_no_harm() -> None:
    with server(Answer(None), Answer()) as made, Client(made.url) as client:
        assert client.models()
    appends: dict[str, Any] = {"session_id": "s", "append": True}
    for answer, kind in (
        (Answer(None), ConnectionBrokenError),
        (refusal(500), InternalServerError),
    ):
        with server(answer) as made, Client(made.url) as client:
            with pytest.raises(kind):
                client.complete("go", model="m", **appends)
            # Beside the request: a look at what answers there.
            sent = [path for path, _, _ in made.asked if path != "/health"]
            assert len(sent) == 1, "the input may have been appended"
    done = Answer(content=event(1, "a") + END)
    positions: tuple[dict[str, Any], ...] = ({}, {"session_position": 4})
    for fields in positions:
        with server(refusal(503, retry_after_ms="1"), done) as made, Client(made.url) as client:
            assert client.complete("go", model="m", **appends, **fields).text == "a"
        assert len(made.asked) == 2


def test_default_model_is_asked_for_again_when_it_is_gone() -> None:
    later = Answer(content=json.dumps({"data": [{"id": "new"}]}).encode())
    done, gone = Answer(content=event(1, "a") + END), refusal(404, "model_not_found")
    with server(Answer(), done, done, gone, later, done) as made, Client(made.url) as client:
        assert client.complete("go").model == client.complete("go").model == "m"
        with pytest.raises(NotFoundError):
            client.complete("go")
        assert client.complete("go").model == "new"


def test_next_url_answers_if_the_first_does_not() -> None:
    with server(Answer()) as made:
        with Client(["http://127.0.0.1:9", made.url], max_retries=0) as client:
            assert client.models() and client.models()
        urls = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
        with (
            Client(urls, max_retries=0) as client,
            pytest.raises(GatewayUnreachableError, match=r":9 or .*:10"),
        ):
            client.models()


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"id: 2-abcd0123\ndata: {",
        stream_error("gateway_stopping"),
        stream_error("stream_unread"),
    ],
)
def test_stream_is_resumed_behind_its_last_event(broken: bytes) -> None:
    first = Answer(content=event(1, "a") + broken)
    busy = refusal(409, "session_busy", retry_after_ms="1", x_should_retry="true")
    rest = Answer(content=event(2, "b") + event(3, "c") + END)
    breaks: list[str] = []

    def note(error: ApiError) -> None:
        breaks.append(current_thread().name)

    with server(first, busy, rest) as made, Client(made.url, on_break=note) as client:
        assert [chunk.text for chunk in client.stream_complete("go", model="m")] == [*"abc", "", ""]
    paths, bodies, after = zip(*made.asked, strict=True)
    assert set(paths) == {"/v1/completions"} and after == (None, "1-abcd0123", "1-abcd0123")
    assert bodies[0] == bodies[1] == bodies[2], "the same request"
    assert breaks == [current_thread().name], "one for all tries, in the reader's thread"
    assert made.closed == [bodies[0]["session_id"]]


def test_refusal_in_a_stream_of_comments_is_repeated() -> None:
    refused = Answer(content=b": waiting\n\n" + stream_error("no_servers"))
    answers = refused, Answer(content=event(1, "a") + END)
    with server(*answers) as made, Client(made.url, max_retries=1) as client:
        assert client.complete("go", model="m").text == "a"
    begun = Answer(content=event(1, "a") + stream_error("no_servers"))
    for answer, tries in ((refused, 2), (begun, 1)):
        with server(answer) as made, Client(made.url, max_retries=1) as client:
            with pytest.raises(ApiError, match="ended"):
                client.complete("go", model="m")
            assert len(made.asked) == tries, "a turn that has begun and ended is not asked again"


@pytest.mark.parametrize("cut", (1, 14, 20, len(event(2, "b")) - 1))
def test_event_that_broke_off_comes_once(cut: int) -> None:
    first = Answer(content=event(1, "a") + event(2, "b")[:cut])
    with server(first, Answer(content=event(2, "b") + END)) as made, Client(made.url) as client:
        assert client.complete("go", model="m").text == "ab"
    assert made.asked[1][2] == "1-abcd0123"


@pytest.mark.parametrize(
    ("status", "code"), [(503, "session_elsewhere"), (503, "no_servers"), (429, "no_capacity")]
)
def test_refusals_after_a_break_take_no_tries(status: int, code: str) -> None:
    later = refusal(status, code, retry_after_ms="1", x_should_retry="true")
    answers = Answer(content=event(1, "a")), later, later, Answer(content=event(2, "b") + END)
    with server(*answers) as made, Client(made.url, max_retries=0) as client:
        assert client.complete("go", model="m").text == "ab"


def test_lost_log_ends_the_stream() -> None:
    lost = refusal(410, "session_lost", x_should_retry="false")
    with (
        server(Answer(content=event(1, "a")), lost) as made,
        Client(made.url) as client,
        pytest.raises(GoneError) as gone,
    ):
        client.complete("go", model="m")
    assert gone.value.code == "session_lost"


def test_stream_without_an_event_begins_anew_under_another_name() -> None:
    opening = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
    answers = Answer(content=opening), Answer(content=event(1, "a") + END)
    with server(*answers) as made, Client(made.url) as client:
        assert client.chat([{"role": "user", "content": "hi"}], model="m").text == "a"
    names = [body["session_id"] for _, body, _ in made.asked]
    assert len(set(names)) == 2 and sorted(made.closed) == sorted(names)
    assert made.asked[1][2] is None


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (stream_error("stream_replaced"), GoneError),
        (stream_error("stream_broken"), InternalServerError),
        (b"data: <html>\n\n", NotAGatewayError),
    ],
)
def test_other_ends_of_a_stream_are_errors(end: bytes, kind: type[ApiError]) -> None:
    with server(Answer(content=event(1, "a") + end)) as made, Client(made.url) as client:
        stream = client.stream_complete("go", model="m")
        assert next(stream).text == "a"
        with pytest.raises(kind):
            next(stream)
    assert len(made.asked) == 1


def test_stream_of_several_answers_is_not_begun_anew() -> None:
    with server(Answer(content=event(1, "a"))) as made, Client(made.url) as client:
        stream = client.stream_complete("go", model="m", n=2)
        assert next(stream).text == "a"
        with pytest.raises(ConnectionBrokenError):
            next(stream)
    assert len(made.asked) == 1 and not made.closed


class Time:
    """A clock that only sleeping moves, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def retries(self, tries: int) -> Retries:
        return Retries(tries, clock=lambda: self.now, sleep=self.sleep)


async def use_up(retries: Retries, error: ApiError) -> int:
    """Return the number of retries until the error is raised."""
    for number in range(1000):
        try:
            await retries.before_retry(error, is_repeatable=True)
        except ApiError:
            return number
    raise AssertionError("the budget has no end")


async def test_pauses_grow_to_their_limit() -> None:
    virtual = Time()
    busy = RateLimitError("busy", ErrorFacts(429))
    assert await use_up(virtual.retries(7), busy) == 7
    for slept, most in zip(virtual.slept, (0.5, 1, 2, 4, 8, 8, 8), strict=True):
        assert 0.75 * most <= slept <= most


@pytest.mark.parametrize(("wanted", "least", "most"), [(1.0, 30.0, 40.5), (20.0, 160.0, 160.0)])
async def test_no_try_comes_before_the_server_wants_it(
    wanted: float, least: float, most: float
) -> None:
    """A short Retry-After does not use up all tries at once."""
    virtual = Time()
    refused = ServiceUnavailableError("not now", ErrorFacts(503, retry_after=wanted))
    assert await use_up(virtual.retries(8), refused) == 8
    assert min(virtual.slept) >= wanted
    assert least <= virtual.now <= most


async def test_begun_answer_is_resumed_when_the_server_wants_it() -> None:
    virtual = Time()
    retries = virtual.retries(0)
    retries.on_begun()
    refused = ServiceUnavailableError("not now", ErrorFacts(503, retry_after=1.0))
    assert await use_up(retries, refused) == RESUME_SECONDS
    assert set(virtual.slept) == {1.0}


async def test_broken_stream_is_given_up_at_its_deadline() -> None:
    virtual = Time()
    retries = virtual.retries(0)
    retries.on_begun()
    broken = ConnectionBrokenError("broke", "url")
    assert await use_up(retries, broken) > 5
    assert RESUME_SECONDS - 8 <= virtual.now <= RESUME_SECONDS
    retries.on_progress()
    assert await use_up(retries, broken) > 5, "events came meanwhile"


class Forgetful(BaseHTTPRequestHandler):
    """Closes a session, and loses the connection before its answer."""

    asked = 0

    def do_DELETE(self) -> None:
        Forgetful.asked += 1
        if Forgetful.asked == 1:
            return
        error = {"error": {"message": "gone", "param": None, "code": "session_not_found"}}
        self.send_response(404)
        self.end_headers()
        self.wfile.write(json.dumps(error).encode())

    @override
    def log_message(self, *_: Any) -> None:
        """Keep the output of tests free of the server's log."""


def test_session_that_the_lost_try_has_closed_counts_as_closed() -> None:
    with http_port(Forgetful) as port, Client(f"http://127.0.0.1:{port}") as client:
        assert client.close_session("one", model="m")
        assert Forgetful.asked == 2
        assert not client.close_session("one", model="m")


async def test_stream_that_was_left_is_freed_before_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its session holds its KV for ten idle minutes."""
    for limit in ("LEFT_SECONDS", "CLOSING_SECONDS"):
        monkeypatch.setattr(async_client, limit, SECONDS)  # for a busy machine
    with server(Answer(200, event(1, "a") + event(2, "b") + END)) as gateway:
        async with AsyncClient(gateway.url) as client:
            async for _ in client.stream_complete("one", model="m"):
                break
        [(_, body, _)] = gateway.asked
        assert gateway.closed == [body["session_id"]]


def test_whole_answer_with_the_scores_of_an_echo_is_no_stream() -> None:
    """A stream has them in one event, which a gateway refuses beyond 16,384 of them."""
    logprobs = {"tokens": ["go", "!"], "token_logprobs": [None, -1.0]}
    choice = {"index": 0, "text": "go!", "finish_reason": "length", "logprobs": logprobs}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = json.dumps({"model": "m", "choices": [choice], "usage": usage}).encode()
    with server(Answer(content=whole)) as gateway, Client(gateway.url) as client:
        answer = client.complete("go", model="m", echo=True, logprobs=0)
    assert (answer.text, len(answer.logprobs or ())) == ("go!", 2)
    [(_, body, _)] = gateway.asked
    assert "stream" not in body
