"""`DELETE /v1/sessions/{id}`: any gateway closes a named session between its turns, which frees its KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import quote

import httpx
import pytest
from support.eventually import eventually
from support.processes.http_requests import FOREVER, lines, tokens_of
from support.processes.swarm import ENDLESS, MODEL, Endpoints, two_spans

from modelswarm import Client
from modelswarm.client.swarm import SwarmClient


@dataclass(frozen=True, slots=True)
class Gateways:
    one: Endpoints
    two: Endpoints


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with two_spans(tmp_path_factory.mktemp("close"), context=ENDLESS) as swarm:
        yield Gateways(swarm.gateway(name="one"), swarm.gateway(name="two"))


def delete(endpoints: Endpoints, session: str, **query: str) -> httpx.Response:
    return httpx.delete(
        f"{endpoints.url}/v1/sessions/{quote(session, safe='')}", params=query, timeout=60
    )


def run_turn(endpoints: Endpoints, session: str) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 3, "session_id": session}
    answer = httpx.post(f"{endpoints.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def used_pages(endpoints: Endpoints) -> int:
    with SwarmClient(endpoints.admin) as client:
        servers = client.fetch_snapshot().servers
    assert len(servers) == 2
    return sum(server.total_pages - server.free_pages for server in servers)


def next_tokens(stream: Iterator[str]) -> list[int]:
    """Read a stream up to its next event with tokens."""
    return next(tokens for line in stream if (tokens := tokens_of(line)))


def wait_freed(endpoints: Endpoints) -> None:
    eventually("all pages are free", lambda: used_pages(endpoints) == 0)


@pytest.mark.parametrize("session", ["talk", "a/b c?d#é%2F"])
def test_closed_session_frees_its_pages_and_is_gone(gateways: Gateways, session: str) -> None:
    run_turn(gateways.one, session)
    eventually("pages are in use", lambda: used_pages(gateways.one))

    answer = delete(gateways.one, session, model=MODEL)

    assert answer.status_code == 200
    assert answer.json() == {"id": session, "object": "session", "deleted": True}
    wait_freed(gateways.one)
    again = delete(gateways.one, session, model=MODEL)
    assert again.status_code == 404
    assert again.json()["error"]["param"] == "session_id"
    assert "no gateway holds a session" in again.json()["error"]["message"]


def test_session_of_another_gateway_is_closed_there(gateways: Gateways) -> None:
    run_turn(gateways.one, "elsewhere")
    url = f"{gateways.two.url}/v1/sessions/elsewhere"
    for method in ("GET", "HEAD"):
        shown = httpx.request(method, url, timeout=60)
        assert (shown.status_code, shown.headers["x-session-id"]) == (200, "elsewhere")

    answer = delete(gateways.two, "elsewhere", model=MODEL)

    assert answer.status_code == 200, answer.text
    assert answer.json()["deleted"]
    wait_freed(gateways.one)


@pytest.mark.full
def test_close_during_a_turn_is_refused_until_its_client_leaves(gateways: Gateways) -> None:
    """The name of a session, which others may know or guess, is no right to end a stream."""
    with closing(lines(gateways.one, FOREVER | {"session_id": "busy"})) as stream:
        next_tokens(stream)
        for gateway in (gateways.one, gateways.two):
            refused = delete(gateway, "busy", model=MODEL)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
            assert refused.headers["x-should-retry"] == "true", "also from the other gateway"
        next_tokens(stream)
    eventually(
        "the session is closed",
        lambda: delete(gateways.two, "busy", model=MODEL).status_code == 200,
    )
    wait_freed(gateways.one)


def test_wrong_closes_are_refused_by_name(gateways: Gateways) -> None:
    unnamed = delete(gateways.one, "no such talk")
    assert unnamed.status_code == 404, "the only model need not be named"
    assert unnamed.json()["error"]["param"] == "session_id"
    unknown = delete(gateways.one, "talk", model="other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


def test_client_reports_whether_a_session_was_open(gateways: Gateways) -> None:
    run_turn(gateways.one, "client")
    with Client(gateways.one.url) as client:
        assert client.close_session("client", model=MODEL)
        assert not client.close_session("client", model=MODEL)
