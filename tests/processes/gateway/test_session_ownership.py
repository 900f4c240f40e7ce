"""Names of sessions at several gateways: which one owns, opens, uses or resumes a session (R20, takeover)."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.eventually import eventually
from support.processes.http_requests import FOREVER, IDS, lines
from support.processes.swarm import ENDLESS, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

pytestmark = pytest.mark.full

LEASE = ("--lease", "2")
NAMED: dict[str, Any] = IDS | {"temperature": 1.0, "top_k": 50, "seed": 7}


def ask(endpoints: Endpoints, body: dict[str, Any], **headers: str) -> int:
    answer = httpx.post(f"{endpoints.url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.status_code


def had_by(endpoints: list[Endpoints], body: dict[str, Any]) -> list[int]:
    """Send the request to each gateway without forwarding. Return the codes: 200 of the owner, else of the refusal."""
    return [ask(each, body, **{"x-modelswarm-forwarded": "1"}) for each in endpoints]


def test_name_asked_of_two_gateways_at_once_has_one_owner(tmp_path: Path) -> None:
    """With two servers per span, each gateway finds a route without the other one's servers."""
    with two_spans(tmp_path, *LEASE) as swarm:
        swarm.server("t0", "0:2", *LEASE)
        swarm.server("t1", "2:4", *LEASE)
        swarm.servers_ready("t0", "t1")
        endpoints = [swarm.gateway(*LEASE, name=name) for name in ("one", "two")]
        start = threading.Barrier(2)

        def ask_at_once(each: Endpoints, body: dict[str, Any]) -> int:
            start.wait(10)
            return ask(each, body)

        with ThreadPoolExecutor() as pool:
            for number in range(12):
                body = NAMED | {"session_id": f"new-{number}", "max_tokens": 3}
                codes = list(pool.map(ask_at_once, endpoints, (body, body)))
                assert 200 in codes and set(codes) <= {200, 409, 503}, codes
                assert sorted(had_by(endpoints, body)) == [200, 503], "one has it, the other knows"


def replace_all(swarm: HashSwarm, endpoints: list[Endpoints]) -> None:
    """Replace the only route by two routes of new servers."""
    for name in ("s0", "s1"):
        swarm.kill(name)
        (swarm.members / f"{name}.json").unlink(missing_ok=True)
    for name, blocks in (("t0", "0:2"), ("t1", "2:4"), ("u0", "0:2"), ("u1", "2:4")):
        swarm.server(name, blocks, *LEASE)
    swarm.servers_ready("t0", "t1", "u0", "u1")
    for each in endpoints:
        eventually("new servers", lambda at=each: at.metric("modelswarm_gateway_servers") == 4)  # type: ignore[misc]


def test_session_unknown_to_all_servers_has_one_owner(tmp_path: Path) -> None:
    """An idle session outlives all its servers: another gateway that is asked for it finds it at no server."""
    with two_spans(tmp_path, *LEASE) as swarm:
        endpoints = [swarm.gateway(*LEASE, name=name) for name in ("one", "two")]
        bodies = [NAMED | {"session_id": f"kept-{n}", "max_tokens": 3} for n in range(6)]
        assert {ask(endpoints[0], body) for body in bodies} == {200}
        replace_all(swarm, endpoints)
        assert {ask(endpoints[1], body) for body in bodies} == {200}
        assert [had_by(endpoints, body) for body in bodies] == [[503, 200]] * len(bodies)


def test_client_may_return_after_leaving_during_a_lease(tmp_path: Path) -> None:
    lease = ("--lease", "6")
    with two_spans(tmp_path, *lease) as swarm:
        one, two = (swarm.gateway(*lease, name=name) for name in ("one", "two"))
        body = NAMED | {"session_id": "waits", "max_tokens": 30, "stream": True}
        stream = httpx.post(f"{one.url}/v1/completions", json=body, timeout=60).text
        ids = [line[4:] for line in stream.splitlines() if line.startswith("id: ")]
        headers = {"Last-Event-ID": ids[len(ids) // 2]}
        swarm.kill("one")
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{two.url}/v1/completions", json=body, headers=headers, timeout=1.0)
        assert ask(two, body, **headers) == 200


def test_draining_gateway_answers_for_its_idle_session(
    tmp_path: Path,
) -> None:
    """A gateway that shuts down opens no session, but serves its own, as no other gateway can."""
    with two_spans(tmp_path, *LEASE, context=100_000) as swarm:
        two = swarm.gateway(*LEASE, name="two")
        one = swarm.gateway(*LEASE, "--drain-timeout", "25", name="one")
        rest = NAMED | {"session_id": "rest", "max_tokens": 3}
        assert ask(one, rest) == 200
        slow = IDS | {"stream": True, "max_tokens": 90_000}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{one.url}/v1/completions", json=slow) as answer,
        ):
            chunks = answer.iter_raw(16)  # a dropped iterator would close the connection
            next(chunks)  # the client reads no more
            swarm.kill("one", signal.SIGTERM)
            eventually("it takes nothing new", lambda: ask(one, IDS | {"max_tokens": 3}) == 503)
            assert ask(two, rest) == 200
            assert ask(two, IDS | {"max_tokens": 3}) == 200


def test_leaving_a_forwarded_stream_counts_as_leaving(tmp_path: Path) -> None:
    with two_spans(tmp_path, *LEASE, context=ENDLESS) as swarm:
        one, two = (swarm.gateway(*LEASE, name=name) for name in ("one", "two"))
        left = FOREVER | {"session_id": "left"}
        assert ask(one, left | {"max_tokens": 3}) == 200
        with closing(lines(two, left)) as stream:
            next(stream)
        name = "modelswarm_gateway_requests_total"
        eventually("it is counted", lambda: sum(two.metric(name, code=c) for c in ("200", "499")))
        assert two.metric(name, code="499") == 1


def test_forwarded_request_is_counted_once_with_its_status(tmp_path: Path) -> None:
    """By the gateway that the client asked."""
    name = "modelswarm_gateway_requests_total"
    with two_spans(tmp_path, *LEASE, context=ENDLESS) as swarm:
        one, two = (swarm.gateway(*LEASE, name=name) for name in ("one", "two"))
        mine = IDS | {"session_id": "mine", "max_tokens": 3}
        assert (ask(one, mine), ask(two, mine)) == (200, 200)
        with closing(lines(one, FOREVER | {"session_id": "mine"})) as stream:
            next(stream)
            assert ask(two, mine) == 409
            with grpc.insecure_channel(two.grpc) as channel:
                wanted = api_pb2.GenerateRequest(
                    model=MODEL, tokens=api_pb2.TokenIds(ids=[1]), session_id="mine"
                )
                with pytest.raises(grpc.RpcError):
                    api_pb2_grpc.InferenceStub(channel).Generate(wanted, timeout=30)
        assert [two.metric(name, code=code) for code in ("200", "409")] == [1, 2]
        eventually("left", lambda: one.metric(name, code="499") == 1)
        assert [one.metric(name, code=code) for code in ("200", "409")] == [1, 0]


@pytest.mark.parametrize("seconds", [20, 2])
def test_stopping_gateway_ends_forwarded_streams_honestly(tmp_path: Path, seconds: int) -> None:
    """It forwards them to their ends as it finishes its own answers; after the drain timeout there is an error."""
    with two_spans(tmp_path, *LEASE, context=ENDLESS) as swarm:
        one = swarm.gateway(*LEASE, name="one")
        two = swarm.gateway(*LEASE, "--drain-timeout", str(seconds), name="two")
        body = FOREVER | {"session_id": "forwarded"}
        assert ask(one, body | {"max_tokens": 3}) == 200
        stream = lines(two, body | ({"max_tokens": 2000} if seconds > 2 else {}))
        next(stream)
        swarm.kill("two", signal.SIGTERM)
        last = list(stream)[-1]
        assert last == "data: [DONE]" if seconds > 2 else "gateway_stopping" in last, last
        assert swarm.processes["two"].wait(20) == 0


def test_stopping_gateway_forwards_grpc_streams_to_their_ends(tmp_path: Path) -> None:
    with two_spans(tmp_path, *LEASE, context=ENDLESS) as swarm:
        one = swarm.gateway(*LEASE, name="one")
        two = swarm.gateway(*LEASE, "--drain-timeout", "20", name="two")
        assert ask(one, FOREVER | {"session_id": "forwarded", "max_tokens": 3}) == 200
        request = api_pb2.GenerateRequest(
            model=MODEL, prompt="go", max_tokens=2000, ignore_eos=True, session_id="forwarded"
        )
        with grpc.insecure_channel(two.grpc) as channel:
            parts = iter(api_pb2_grpc.InferenceStub(channel).GenerateStream(request, timeout=60))
            tokens = len(next(parts).token_ids)
            swarm.kill("two", signal.SIGTERM)
            assert tokens + sum(len(part.token_ids) for part in parts) == 2000
