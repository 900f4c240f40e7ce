"""`/v1/sessions`: a session is opened with all its positions reserved, and keeps them after lost processes."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.swarm import MODEL, Endpoints, HashSwarm

from modelswarm.placement.plan import PAGE_SIZE

LEASE = ("--lease", "2")
PAGES = 40  # of each server
OPENED = "POST /v1/sessions: "  # in a line of the gateway's log about an answered request
LENGTH = 20 * PAGE_SIZE  # positions of a session: more than half of what new sessions may have


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with HashSwarm(tmp_path_factory.mktemp("opened"), context=40 * PAGE_SIZE) as made:
        for name, blocks in (("s0", "0:2"), ("s1", "2:4")):
            made.server(name, blocks, *LEASE, "--pages", str(PAGES))
        made.servers_ready("s0", "s1")
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE, name="main")


def post(at: Endpoints, **fields: Any) -> httpx.Response:
    return httpx.post(f"{at.url}/v1/sessions", json={"model": MODEL} | fields, timeout=60)


def opened(at: Endpoints, **fields: Any) -> dict[str, Any]:
    made = post(at, **{"max_length": LENGTH, **fields})
    assert made.status_code == 200, made.text
    content: dict[str, Any] = made.json()
    return content


def state(at: Endpoints, session: str) -> httpx.Response:
    return httpx.get(f"{at.url}/v1/sessions/{session}", timeout=60)


def delete(at: Endpoints, session: str) -> None:
    assert httpx.delete(f"{at.url}/v1/sessions/{session}", timeout=60).status_code == 200


def turn(at: Endpoints, session: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "session_id": session, "append": True}
    body |= {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{at.url}/v1/completions", json=body | fields, timeout=60)


def refusal(made: httpx.Response) -> tuple[int, str, str]:
    error = made.json()["error"]
    return made.status_code, error["code"], error["param"]


def test_opened_session_has_its_room_before_any_token(endpoints: Endpoints) -> None:
    made = opened(endpoints, ttl=60)
    assert (made["position"], made["max_length"], made["ttl"]) == (0, LENGTH, 60)
    assert [(hop["first"], hop["last"]) for hop in made["route"]] == [(0, 2), (2, 4)]
    assert {hop["server"] for hop in made["route"]} == {"s0", "s1"}

    full = post(endpoints, max_length=LENGTH)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "no_capacity")
    assert int(full.headers["retry-after"]) >= 1
    twice = post(endpoints, max_length=LENGTH, session_id=made["id"])
    assert refusal(twice) == (409, "session_exists", "session_id")

    first = turn(endpoints, made["id"], "once")
    assert first.json()["choices"][0]["prompt_token_ids"] == encode_bytes("once")
    second = turn(endpoints, made["id"], "more")
    assert second.status_code == 200, second.text
    assert state(endpoints, made["id"]).json()["position"] == len("once") + 5 + len("more") + 5

    delete(endpoints, made["id"])
    again = {"max_length": LENGTH, "session_id": "next"}
    eventually("its room is free", lambda: post(endpoints, **again).status_code == 200)
    assert state(endpoints, made["id"]).status_code == 404
    delete(endpoints, "next")


def test_max_length_ends_answers_and_refuses_longer_input(endpoints: Endpoints) -> None:
    session = opened(endpoints, max_length=12)["id"]
    clipped = turn(endpoints, session, "12345678", max_tokens=50).json()
    assert clipped["choices"][0]["finish_reason"] == "length"
    assert clipped["usage"]["total_tokens"] == 12

    longer = turn(endpoints, session, "x")
    assert refusal(longer) == (400, "context_length_exceeded", "prompt")
    assert "by its max_length, holds 12" in longer.text
    delete(endpoints, session)


def test_session_whose_client_has_left_is_freed(swarm: HashSwarm, endpoints: Endpoints) -> None:
    """The gateway waits for the body, and is stopped until the client is gone: it reads both together."""
    body = json.dumps({"model": MODEL, "max_length": LENGTH}).encode()
    head = f"POST /v1/sessions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n"
    host, port = endpoints.url.removeprefix("http://").split(":")
    before = swarm.log("main").count(OPENED)
    with socket.create_connection((host, int(port)), timeout=60) as left:
        left.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in left.recv(1000)
        swarm.kill("main", signal.SIGSTOP)
        left.sendall(body)
    swarm.kill("main", signal.SIGCONT)

    eventually("the request is over", lambda: swarm.log("main").count(OPENED) > before)
    again = {"max_length": LENGTH, "session_id": "after"}
    eventually("its room is free", lambda: post(endpoints, **again).status_code == 200)
    delete(endpoints, "after")


def test_idle_session_is_dropped_after_its_ttl(endpoints: Endpoints) -> None:
    session = opened(endpoints, max_length=12, ttl=1)["id"]
    eventually("it is dropped", lambda: state(endpoints, session).status_code == 404)
    assert refusal(turn(endpoints, session, "x")) == (404, "session_expired", "session_id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "max_length"),
        ({"max_length": 1}, "max_length"),
        ({"max_length": 10**6}, "max_length"),
        ({"max_length": 9, "ttl": 0}, "ttl"),
        ({"max_length": 9, "session_id": ""}, "session_id"),
        ({"max_length": 9, "batch": 2}, "batch"),
        ({"max_length": 9, "recoverable": False}, "recoverable"),
    ],
)
def test_wrong_field_is_refused_by_name(
    endpoints: Endpoints, fields: dict[str, Any], param: str
) -> None:
    made = post(endpoints, **fields)
    assert (made.status_code, made.json()["error"]["param"]) == (400, param)


def test_session_keeps_room_and_limits_after_lost_processes(
    swarm: HashSwarm, endpoints: Endpoints
) -> None:
    owner = swarm.gateway(*LEASE, name="owner")
    session = opened(owner, ttl=50)["id"]
    before = turn(owner, session, "once").json()["usage"]["total_tokens"]
    seen = state(endpoints, session).json()
    assert (seen["id"], seen["position"]) == (session, before), "forwarded to its owner"

    swarm.kill("s1")
    (swarm.members / "s1.json").unlink(missing_ok=True)
    swarm.server("s1", "2:4", *LEASE, "--pages", str(PAGES))
    swarm.servers_ready("s1")
    eventually("it is ready again", lambda: swarm.is_ready(owner))
    after = turn(owner, session, "more").json()["usage"]["total_tokens"]
    swarm.kill("owner")
    last = turn(endpoints, session, "last")

    assert last.json()["usage"]["total_tokens"] == after + len("last") + 5
    seen = state(endpoints, session).json()
    assert (seen["max_length"], seen["ttl"]) == (LENGTH, 50)
    full = post(endpoints, max_length=LENGTH)
    assert full.status_code == 429, "its room is still reserved"
    delete(endpoints, session)
