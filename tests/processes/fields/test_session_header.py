"""`X-Session-ID`: names the session of a request, and of an answer, at any gateway; its names are a flag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.processes.swarm import MODEL, Endpoints, two_spans

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 3, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Gateways:
    one: Endpoints
    two: Endpoints
    renamed: Endpoints


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    with two_spans(tmp_path_factory.mktemp("headers")) as swarm:
        flags = ("--session-header", "X-Correlation-ID", "--session-header", "X-Session-ID")
        yield Gateways(
            swarm.gateway(name="one"),
            swarm.gateway(name="two"),
            swarm.gateway(*flags, name="renamed"),
        )


def post(at: Endpoints, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = BODY | fields
    return httpx.post(f"{at.url}/v1/completions", json=body, headers=headers, timeout=60)


def is_held(at: Endpoints, session: str) -> bool:
    answer = httpx.get(f"{at.url}/v1/sessions/{session}", params={"model": MODEL}, timeout=60)
    return answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_header_names_the_session_at_any_gateway(gateways: Gateways, stream: bool) -> None:
    name = f"by-header-{stream}"
    first = post(gateways.one, {"X-Session-ID": name}, stream=stream)
    assert (first.status_code, first.headers["x-session-id"]) == (200, name)
    assert is_held(gateways.one, name)

    more = post(gateways.two, {"x-session-id": name}, append=True, stream=stream)
    assert (more.status_code, more.headers["x-session-id"]) == (200, name), more.text
    assert more.headers.get_list("x-session-id") == [name]


def test_session_of_a_body_is_named_in_the_answer(gateways: Gateways) -> None:
    assert post(gateways.one, {}, session_id="by-body").headers["x-session-id"] == "by-body"
    both = post(gateways.one, {"x-session-id": "by-body"}, session_id="by-body")
    assert both.headers["x-session-id"] == "by-body"
    for hidden in ("a\r\nx-evil: 1", "é", "two words"):
        answer = post(gateways.one, {}, session_id=hidden)
        assert answer.status_code == 200
        assert not {"x-session-id", "x-evil"} & answer.headers.keys()
    assert "x-session-id" not in post(gateways.one, {}).headers
    refused = post(gateways.one, {}, session_id="nowhere", append=True)
    assert (refused.status_code, refused.headers["x-session-id"]) == (404, "nowhere")


def test_opened_session_has_the_header(gateways: Gateways) -> None:
    url, body = f"{gateways.one.url}/v1/sessions", {"model": MODEL, "max_length": 20}
    opened = httpx.post(url, json=body, headers={"x-session-id": "opened"}, timeout=60)
    assert opened.json()["id"] == opened.headers["x-session-id"] == "opened"


def test_first_header_of_the_flags_counts(gateways: Gateways) -> None:
    headers = {"x-session-id": "second", "x-correlation-id": "first"}
    assert post(gateways.renamed, headers).headers["x-session-id"] == "first"
    assert post(gateways.one, headers).headers["x-session-id"] == "second"
    assert "x-session-id" not in post(gateways.one, {"x-correlation-id": "first"}).headers


def test_header_is_refused_where_responses_name_conversations(gateways: Gateways) -> None:
    body, headers = {"model": MODEL, "input": "hi"}, {"x-session-id": "one"}
    answer = httpx.post(f"{gateways.one.url}/v1/responses", json=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id")
    assert "previous_response_id" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "fields", "param"),
    [
        ("one", {"session_id": "other"}, "x-session-id"),
        ("two words", {}, "x-session-id"),
        ("x" * 257, {}, "x-session-id"),
        ("one", {"n": 2}, "n"),
        ("one", {"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_wrong_session_header_is_refused_by_name(
    gateways: Gateways, header: str, fields: dict[str, Any], param: str
) -> None:
    answer = post(gateways.one, {"x-session-id": header}, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
