"""The requests of `batch`: tries after failures, and input that is read only when it can be sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar, TypeAlias

import pytest
from support.ports import free_port, http_port
from typing_extensions import override

from modelswarm.cli.batch.input_file import BatchRequest
from modelswarm.cli.batch.output_file import BatchAnswer
from modelswarm.cli.batch.run import answer_all
from modelswarm.cli.batch.sending import BatchSender, RequestTimeouts
from modelswarm.client.api import GatewayUnreachableError

Reply: TypeAlias = tuple[int, dict[str, str], bytes]
"""Status, headers and body of an answer."""

BUSY: Reply = (
    503,
    {"x-should-retry": "true", "retry-after": "7"},
    b'{"error": {"code": "no_capacity"}}',
)
WRONG: Reply = (400, {"x-should-retry": "false"}, b'{"error": {"code": "invalid_request"}}')
FINE: Reply = (200, {"x-request-id": "r1"}, b'{"text": "hi"}')
PROXY: Reply = (502, {}, b"<html>bad gateway</html>")
BROKEN: Reply = (0, {}, b"")


class Scripted(BaseHTTPRequestHandler):
    """Answers with the next of `answers`; status 0 closes the connection instead."""

    answers: ClassVar[list[Reply]] = []
    bodies: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        status, headers, body = self.answers.pop(0)
        if not status:
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *parts: object) -> None:
        """Print nothing."""


class VirtualTime:
    """A clock that only the sleeps move."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def request(**body: Any) -> BatchRequest:
    return BatchRequest(custom_id="a", method="POST", url="/v1/completions", body=body)


def fetch(port: int, *answers: Reply, time: VirtualTime | None = None) -> BatchAnswer:
    """Return the answer to one request, tried for 60 virtual seconds."""
    time = time or VirtualTime()
    Scripted.answers[:] = answers
    Scripted.bodies.clear()

    async def send() -> BatchAnswer:
        timeouts = RequestTimeouts(30.0, 60.0, time.clock, time.sleep)
        async with BatchSender(f"http://127.0.0.1:{port}", "m", 1, timeouts) as sender:
            return await sender.fetch_answer(request(prompt="hi"))

    return asyncio.run(send())


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http_port(Scripted) as number:
        yield number


def test_answers_that_say_so_are_tried_again(port: int) -> None:
    time = VirtualTime()

    answer = fetch(port, BUSY, BROKEN, PROXY, FINE, time=time)

    assert answer == BatchAnswer(200, "r1", {"text": "hi"})
    assert Scripted.bodies == [{"model": "m", "prompt": "hi"}] * 4
    assert time.slept[0] >= 7 and len(time.slept) == 3


def test_wrong_request_is_sent_once(port: int) -> None:
    answer = fetch(port, WRONG, FINE)

    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_request")
    assert len(Scripted.bodies) == 1


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(BUSY, 503, None), (PROXY, None, "not_a_gateway"), (BROKEN, None, "connection_broken")],
)
def test_last_failure_counts_when_the_time_is_up(
    port: int, failure: Reply, status: int | None, code: str | None
) -> None:
    time = VirtualTime()

    answer = fetch(port, *[failure] * 100, time=time)

    assert (answer.status, answer.error and answer.error["code"]) == (status, code)
    assert 30 < time.now - 100 <= 60


def test_gateway_that_stays_away_ends_the_batch() -> None:
    with pytest.raises(GatewayUnreachableError, match="no gateway answers at"):
        fetch(free_port())


def test_input_is_read_only_when_it_can_be_sent() -> None:
    read, kept, ahead = 0, 0, 0

    def requests() -> Iterator[BatchRequest]:
        nonlocal read, ahead
        for _ in range(1000):
            read += 1
            ahead = max(ahead, read - kept)
            yield request()

    async def send(one: BatchRequest) -> BatchAnswer:
        await asyncio.sleep(0)
        return BatchAnswer(200)

    def keep(one: BatchRequest, answer: BatchAnswer) -> None:
        nonlocal kept
        kept += 1

    asyncio.run(answer_all(requests(), send, keep, 8))

    assert (read, kept, ahead) == (1000, 1000, 8)


def test_first_error_ends_all_workers() -> None:
    async def send(one: BatchRequest) -> BatchAnswer:
        if "bad" in one.body:
            raise GatewayUnreachableError("gone", "http://x")
        await asyncio.Event().wait()
        raise AssertionError("never set")

    requests = iter([request(), request(), request(bad=True), request()])
    with pytest.raises(GatewayUnreachableError):
        asyncio.run(answer_all(requests, send, lambda one, answer: None, 4))
