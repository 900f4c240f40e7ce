"""`/v1/responses` with the openai client on a real swarm: whole, streamed, stored, and bad input."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseTextDeltaEvent
from support.processes.swarm import ENDLESS, MODEL, Endpoints, two_spans
from support.response_streams import ResponseStream

NEW = 24
EXTRA = {"ignore_eos": True}
ASK: dict[str, Any] = {"model": MODEL, "input": "tell me", "max_output_tokens": NEW}
BODY = ASK | EXTRA
USER = {"role": "user", "content": "tell me"}
LOGPROBS: Any = "message.output_text.logprobs"
SAMPLED = BODY | {"temperature": 1, "seed": 7}


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with two_spans(tmp_path_factory.mktemp("responses"), context=ENDLESS) as swarm:
        yield swarm.gateway()


@pytest.fixture(scope="module")
def client(endpoints: Endpoints) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(endpoints: Endpoints, **changes: Any) -> httpx.Response:
    return httpx.post(f"{endpoints.url}/v1/responses", json=BODY | changes, timeout=60)


def text(endpoints: Endpoints, **changes: Any) -> str:
    answer = post(endpoints, **changes)
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["output"][0]["content"][0]["text"]
    return made


def test_answer_is_that_of_the_chat(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, instructions="be kind", extra_body=EXTRA)
    messages: Any = [{"role": "system", "content": "be kind"}, USER]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=NEW, extra_body=EXTRA
    )
    assert made.output_text == chat.choices[0].message.content
    assert made.output_text
    assert made.usage is not None and chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == NEW
    assert made.usage.input_tokens_details.cached_tokens == 0
    assert (made.status, made.instructions) == ("incomplete", "be kind")
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


def test_stream_has_the_events_of_openai_in_their_order(endpoints: Endpoints) -> None:
    stream = ResponseStream()
    assert list(stream.read(endpoints.url, BODY))
    stream.assert_whole()
    deltas = stream.kinds.count("output_text.delta")
    assert deltas > 1
    assert stream.kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert stream.text == text(endpoints)


def test_clients_stream_helper_reads_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK, extra_body=EXTRA) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == client.responses.create(**ASK, extra_body=EXTRA).output_text


def test_async_client_gets_the_same_answer(client: openai.OpenAI, endpoints: Endpoints) -> None:
    async def ask() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{endpoints.url}/v1", api_key="none") as made:
            whole = await made.responses.create(**ASK, extra_body=EXTRA)
            parts = await made.responses.create(**ASK, extra_body=EXTRA, stream=True)
            deltas = [e.delta async for e in parts if isinstance(e, ResponseTextDeltaEvent)]
            return whole.output_text, "".join(deltas)

    expected = client.responses.create(**ASK, extra_body=EXTRA).output_text
    assert asyncio.run(ask()) == (expected, expected)


def test_stored_response_is_shown_listed_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, extra_body=EXTRA, metadata={"topic": "x"})
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    assert made.metadata == {"topic": "x"}
    items = client.responses.input_items.list(made.id).data
    assert [item.to_dict()["content"] for item in items] == [
        [{"type": "input_text", "text": "tell me"}]
    ]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.create(**ASK, extra_body=EXTRA, previous_response_id=made.id)
    assert gone.value.code == "previous_response_not_found"
    assert gone.value.param == "previous_response_id"


def test_response_without_store_is_not_kept(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASK, extra_body=EXTRA, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    made = client.responses.create(
        **ASK, extra_body=EXTRA, include=[LOGPROBS], top_logprobs=2, store=False
    )
    part: Any = made.output[0].to_dict()["content"][0]
    assert len(part["logprobs"]) == NEW
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    streamed = ResponseStream()
    body = BODY | {"include": [LOGPROBS], "top_logprobs": 2, "store": False}
    deltas = [e for e in streamed.read(endpoints_of(client), body) if "delta" in e]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


def endpoints_of(client: openai.OpenAI) -> str:
    return str(client.base_url).removesuffix("/v1/")


# Field -> what a second request has beside the fields of the first one.
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "input": ({}, {"input": "other"}),
    "instructions": ({}, {"instructions": "be kind"}),
    "max_output_tokens": ({}, {"max_output_tokens": 5}),
    "temperature": ({}, {"temperature": 0}),
    "top_p": ({}, {"top_p": 0.01}),
    "top_k": ({}, {"top_k": 1}),
    "seed": ({}, {"seed": 8}),
    "reasoning": ({}, {"reasoning": {"effort": "low"}}),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_obeyed_field_changes_the_answer(endpoints: Endpoints, name: str) -> None:
    first, second = EFFECTS[name]
    plain = text(endpoints, **SAMPLED | first)
    assert plain == text(endpoints, **SAMPLED | first)
    assert plain != text(endpoints, **SAMPLED | first | second)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "none"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": "x" * 3_000_000}, 400, "input"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"background": True}, 400, "background"),
        ({"conversation": {"id": "conv_1"}}, 400, "conversation"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, 400, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, 400, "text.format.schema"),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "n",
                        "schema": {"type": "string", "pattern": "("},
                    }
                }
            },
            400,
            "text.format.schema",
        ),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 64}, 404, "previous_response_id"),
        ({"no_such_field": 1}, 400, "no_such_field"),
    ],
)
def test_bad_input_is_refused_by_name(
    endpoints: Endpoints, body: dict[str, Any], status: int, param: str
) -> None:
    for stream in (False, True):
        answer = post(endpoints, **body, stream=stream, ignore_eos=None)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["param"] == param, error
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("last", ["5", "5-0123abcd", "resp_1:5-0123abcd:3"])
def test_stream_that_cannot_be_resumed_is_refused(endpoints: Endpoints, last: str) -> None:
    answer = httpx.post(
        f"{endpoints.url}/v1/responses",
        json=BODY | {"stream": True},
        headers={"Last-Event-ID": last},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_stored_routes_refuse_what_they_do_not_have(endpoints: Endpoints) -> None:
    url = f"{endpoints.url}/v1/responses"
    name = post(endpoints).json()["id"]
    assert httpx.get(f"{url}/resp_none").json()["error"]["param"] == "response_id"
    assert httpx.get(f"{url}/{name}?stream=true").json()["error"]["param"] == "stream"
    assert httpx.get(f"{url}/{name}/input_items?limit=0").json()["error"]["param"] == "limit"
    assert httpx.post(f"{url}/{name}/cancel").status_code == 404
