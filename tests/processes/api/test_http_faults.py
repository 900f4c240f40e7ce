"""The gateway under faults: killed servers, missing pages, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from support.eventually import eventually
from support.processes.http_requests import (
    FOREVER,
    IDS,
    LONG,
    expected_tokens,
    lines,
    read_until,
    tokens_of,
    whole,
)
from support.processes.swarm import (
    BRIEF_HOLD,
    CONTEXT,
    ENDLESS,
    MODEL,
    Endpoints,
    HashSwarm,
    two_spans,
)

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

STILL_LOOKS = 10  # looks over three seconds: a server may get no processor for one or two
ROOM = ("--pages", "8000")  # pages of 16 tokens: enough for one endless answer, not for two


def snapshot(endpoints: Endpoints) -> api_pb2.Snapshot:
    with grpc.insecure_channel(endpoints.admin) as channel:
        return api_pb2_grpc.SwarmStub(channel).List(api_pb2.ListRequest(), timeout=60)


def route(endpoints: Endpoints) -> list[api_pb2.Hop]:
    """Return the route of the only session that has one."""
    [session] = [session for session in snapshot(endpoints).sessions if session.route]
    return list(session.route)


def free_pages(endpoints: Endpoints, swarm: HashSwarm) -> list[float]:
    made = []
    for name in ("s0", "s1"):
        text = httpx.get(f"http://{swarm.member(name)['metrics']}/metrics", timeout=60).text
        [line] = [x for x in text.splitlines() if "pages" in x and "free" in x and x[0] != "#"]
        made.append(float(line.rsplit(" ", 1)[1]))
    return made


@pytest.mark.parametrize("blocks", [pytest.param((0, 2), marks=pytest.mark.full), (2, 4)])
def test_stream_keeps_its_tokens_when_a_server_is_killed(
    tmp_path: Path, blocks: tuple[int, int]
) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        swarm.server("t0", "0:2")
        swarm.server("t1", "2:4")
        swarm.servers_ready("t0", "t1")
        endpoints = swarm.gateway()
        eventually("all are linked", lambda: endpoints.metric("modelswarm_gateway_servers") == 4)
        recoveries = "modelswarm_gateway_recoveries_total"

        def kill() -> None:
            [victim] = [hop.peer for hop in route(endpoints) if (hop.first, hop.last) == blocks]
            swarm.kill(victim.partition("/")[0])

        got, _ = read_until(
            endpoints,
            FOREVER,
            kill,
            lambda _: endpoints.metric(recoveries, outcome="resumed"),
            at=50,
        )
        assert got == expected_tokens(len(got))
        assert endpoints.metric(recoveries, outcome="resumed") == 1
        assert endpoints.metric(recoveries, outcome="resumed", cause="link_down") == 1


def test_stream_that_cannot_be_saved_ends_with_one_error(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*BRIEF_HOLD)
        received: list[str] = []
        for line in lines(endpoints, FOREVER):
            received.append(line)
            if len(received) == 20:
                swarm.kill("s1")
        [failure] = [json.loads(x[6:]) for x in received if x.startswith('data: {"error"')]
        assert failure["error"]["code"] == "stream_broken"
        assert received[-1].startswith('data: {"error"')
        assert "data: [DONE]" not in received
        assert not any('"finish_reason":"' in x for x in received)
        assert endpoints.metric("modelswarm_gateway_requests_total", code="500") == 1
        for session in (None, "never-began"):
            body = LONG | {"session_id": session}
            answer = httpx.post(f"{endpoints.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_servers"
        assert endpoints.metric("modelswarm_gateway_sessions") == 0
        ready = httpx.get(f"{endpoints.url}/ready", timeout=60)
        assert ready.status_code == 503
        assert "blocks 2:4" in ready.json()["reason"]
        assert ready.json()["models"][0]["missing_blocks"] == [2, 3]


@pytest.mark.full
def test_openai_client_raises_when_a_stream_breaks(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        endpoints = swarm.gateway(*BRIEF_HOLD)
        with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model=MODEL,
                prompt="go",
                max_tokens=FOREVER["max_tokens"],
                stream=True,
                extra_body={"ignore_eos": True},
            )
            with pytest.raises(openai.APIError) as caught:
                for place, _ in enumerate(stream):
                    if place == 10:
                        swarm.kill("s1")
            assert caught.value.code == "stream_broken"


def test_request_without_room_is_refused_with_retry_after(tmp_path: Path) -> None:
    with two_spans(tmp_path, *ROOM, context=ENDLESS) as swarm:
        endpoints = swarm.gateway()
        first = lines(endpoints, FOREVER)
        next(first)
        for stream in (False, True):
            body = FOREVER | {"stream": stream}
            answer = httpx.post(f"{endpoints.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert float(answer.headers["retry-after-ms"]) > 0
            assert answer.json()["error"]["code"] == "no_capacity"
        with grpc.insecure_channel(endpoints.grpc) as channel:
            asked = api_pb2.GenerateRequest(
                model=MODEL, prompt="go", max_tokens=FOREVER["max_tokens"], ignore_eos=True
            )
            with pytest.raises(grpc.RpcError) as refused:
                api_pb2_grpc.InferenceStub(channel).Generate(asked, timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing: dict[str, Any] = dict(refused.value.trailing_metadata())  # type: ignore[arg-type]
        assert trailing["error-code"] == "no_capacity" and float(trailing["retry-after"]) > 0
        first.close()
        eventually("it was left", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)
        assert len(whole(endpoints, IDS)) == CONTEXT - 2
        assert endpoints.metric("modelswarm_gateway_requests_total", code="429") == 3


@pytest.mark.full
def test_idle_kept_session_gives_way_to_a_request(tmp_path: Path) -> None:
    with two_spans(tmp_path, "--pages", "48") as swarm:
        endpoints = swarm.gateway()
        kept = whole(endpoints, IDS | {"session_id": "idle"})
        assert whole(endpoints, IDS) == kept
        assert whole(endpoints, IDS | {"session_id": "idle"}) == kept


@pytest.mark.full
def test_named_session_survives_a_refusal(tmp_path: Path) -> None:
    with two_spans(tmp_path, *ROOM, context=ENDLESS) as swarm:
        endpoints = swarm.gateway()
        short = IDS | {"max_tokens": 20, "session_id": "mine"}
        first = whole(endpoints, short)
        with closing(lines(endpoints, FOREVER)) as busy:
            next(busy)
            answer = httpx.post(
                f"{endpoints.url}/v1/completions", json=FOREVER | {"session_id": "mine"}
            )
            assert answer.status_code == 429
            too_long = short | {"prompt": "x" * ENDLESS}
            assert httpx.post(f"{endpoints.url}/v1/completions", json=too_long).status_code == 400
            assert endpoints.metric("modelswarm_gateway_sessions", state="parked") == 1
        assert whole(endpoints, short) == first


async def test_two_hundred_dropped_sessions_free_all_pages(tmp_path: Path) -> None:
    with two_spans(tmp_path, "--metrics", "127.0.0.1:0", "--lease", "1") as swarm:
        endpoints = swarm.gateway("--lease", "1")
        before = free_pages(endpoints, swarm)

        async def start(client: httpx.AsyncClient, place: int) -> None:
            body = LONG | {"prompt": f"go {place}", "max_tokens": 60, "stream": True}
            url = f"{endpoints.url}/v1/completions"
            async with client.stream("POST", url, json=body) as answer:
                async for _ in answer.aiter_lines():
                    return  # the client leaves after the first line

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            for _ in range(2):
                await asyncio.gather(*(start(client, place) for place in range(50)))
            running = [asyncio.create_task(start(client, place)) for place in range(100)]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            swarm.kill("gateway")
            await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(
            eventually, "all pages are free", lambda: free_pages(endpoints, swarm) == before
        )


def test_slow_reader_pauses_only_its_own_session(tmp_path: Path) -> None:
    # Every event has the name, of the greatest length, so the stream exceeds all buffers on its way.
    name, context = "long-name-" * 12 + "12345678", 4 * CONTEXT
    with HashSwarm(tmp_path, context=context) as swarm:
        swarm.server("s0", "0:2", model=name)
        swarm.server("s1", "2:4", model=name)
        endpoints = swarm.gateway()
        body = IDS | {"model": name, "max_tokens": context - 2}
        expected = whole(endpoints, body)
        host, port = endpoints.http.split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect((host, int(port)))
            slow.settimeout(300)
            sent = json.dumps(body | {"stream": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n"
            )
            slow.sendall(head.encode() + sent)
            paused = eventually("it stands still", lambda: stands_still(endpoints))
            assert paused < context - 100
            assert whole(endpoints, body) == expected
            assert eventually("it stands still again", lambda: stands_still(endpoints)) == paused
            got = b""
            while b"[DONE]" not in got:
                part = slow.recv(65536)
                assert part, "the connection was closed"
                got += part
        ids = [t for line in got.decode().splitlines() for t in tokens_of(line)]
        assert ids == expected


def stands_still(endpoints: Endpoints) -> int:
    """Return the length of the only session if it is constant over `STILL_LOOKS` looks; else 0."""
    lengths: set[int] = set()
    for _ in range(STILL_LOOKS):
        found = [session.length for session in snapshot(endpoints).sessions]
        lengths.update(found)
        if len(found) != 1 or len(lengths) != 1:
            return 0
        time.sleep(0.3)
    return lengths.pop()


@pytest.mark.full
def test_gateway_without_servers_is_healthy_but_not_ready(tmp_path: Path) -> None:
    with HashSwarm(tmp_path) as swarm:
        endpoints = swarm.gateway(ready=False)
        assert httpx.get(f"{endpoints.url}/health").status_code == 200
        ready = httpx.get(f"{endpoints.url}/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no server is linked")
        assert httpx.get(f"{endpoints.url}/v1/models").json()["data"] == []
        answer = httpx.post(f"{endpoints.url}/v1/completions", json=LONG)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        swarm.server("s0", "0:2")
        eventually(
            "one half is there",
            lambda: "blocks 2:4" in str(httpx.get(f"{endpoints.url}/ready").json()),
        )
        answer = httpx.post(f"{endpoints.url}/v1/completions", json=LONG)
        assert answer.status_code == 503
        swarm.server("s1", "2:4")
        eventually("it is ready", lambda: swarm.is_ready(endpoints))


@pytest.mark.full
def test_files_of_dead_servers_break_nothing(tmp_path: Path) -> None:
    with two_spans(tmp_path) as swarm:
        dead = swarm.member("s0") | {"peer": "dead/1/x", "target": "127.0.0.1:1", "name": "dead"}
        (swarm.members / "dead.json").write_text(json.dumps(dead))
        stranger = swarm.member("s0") | {"peer": "other/1/x", "name": "other"}
        (swarm.members / "other.json").write_text(json.dumps(stranger))
        (swarm.members / "junk.json").write_text("{")
        endpoints = swarm.gateway()
        assert len(whole(endpoints, IDS)) == CONTEXT - 2
        assert endpoints.metric("modelswarm_gateway_servers") == 2


@pytest.mark.full
def test_several_models_are_selected_by_name(tmp_path: Path) -> None:
    with two_spans(tmp_path) as swarm:
        swarm.server("w0", "0:4", model="other")
        swarm.servers_ready("w0")
        endpoints = swarm.gateway()
        eventually("both", lambda: len(httpx.get(f"{endpoints.url}/v1/models").json()["data"]) == 2)
        eventually(
            "both are ready",
            lambda: all(m["ready"] for m in httpx.get(f"{endpoints.url}/v1/models").json()["data"]),
        )
        assert whole(endpoints, IDS) == whole(endpoints, IDS | {"model": "other"})
