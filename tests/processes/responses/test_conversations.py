"""Conversations by `previous_response_id`: only new tokens are computed, at any gateway, also after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.processes.swarm import ENDLESS, MODEL, Endpoints, HashSwarm, two_spans
from support.response_streams import ResponseStream, text_of

LEASE = ("--lease", "2")
PATIENT = 20  # retries
NEW = 24
SHORT = 60  # tokens that a turn with a few words computes at most
ASK: dict[str, Any] = {
    "model": MODEL,
    "input": "tell me",
    "max_output_tokens": NEW,
    "extra_body": {"ignore_eos": True},
}
MORE = ASK | {"input": "and?"}
LONG: dict[str, Any] = {
    "model": MODEL,
    "input": "tell me more",
    "max_output_tokens": 400,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("talks"), *LEASE, context=ENDLESS) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE, name="main")


@pytest.fixture(scope="module")
def client(endpoints: Endpoints) -> Iterator[openai.OpenAI]:
    with client_of(endpoints) as made:
        yield made


def client_of(endpoints: Endpoints) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{endpoints.url}/v1", api_key="none", max_retries=0)


def cached(response: Any) -> int:
    count: int = response.usage.input_tokens_details.cached_tokens
    return count


def assert_only_new_computed(before: Any, response: Any) -> None:
    assert cached(response) >= before.usage.total_tokens - 1
    assert response.usage.input_tokens - cached(response) < SHORT


def not_found(client: openai.OpenAI, **changes: Any) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.responses.create(**MORE | changes)
    assert refusal.value.code == "previous_response_not_found"


def test_second_turn_computes_only_what_is_new(client: openai.OpenAI, endpoints: Endpoints) -> None:
    first = client.responses.create(**ASK)
    reused = endpoints.metric("modelswarm_gateway_reused_tokens_total")
    second = client.responses.create(**MORE, previous_response_id=first.id)
    third = client.responses.create(**MORE, previous_response_id=second.id)
    assert first.usage is not None and second.usage is not None
    assert second.previous_response_id == first.id
    assert_only_new_computed(first, second)
    assert_only_new_computed(second, third)
    after = endpoints.metric("modelswarm_gateway_reused_tokens_total")
    assert after - reused == cached(second) + cached(third)
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant"] * 2 + ["user"]


def test_branches_do_not_disturb_each_other(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    one = client.responses.create(**MORE, previous_response_id=first.id)
    two = client.responses.create(**MORE | {"input": "or?"}, previous_response_id=first.id)
    assert cached(two) == 0, "the session of the conversation belongs to the first branch"
    assert_only_new_computed(one, client.responses.create(**MORE, previous_response_id=one.id))
    assert_only_new_computed(two, client.responses.create(**MORE, previous_response_id=two.id))


def test_instructions_are_not_carried_over(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK, instructions="be kind", store=True)
    kept = client.responses.create(**MORE, previous_response_id=first.id, instructions="be kind")
    assert_only_new_computed(first, kept)
    without = client.responses.create(**MORE, previous_response_id=kept.id)
    assert without.instructions is None
    assert cached(without) < 20


def test_unstored_turn_leaves_the_conversation_as_it_is(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    aside = client.responses.create(**MORE, previous_response_id=first.id, store=False)
    assert (aside.store, cached(aside)) == (False, 0)
    not_found(client, previous_response_id=aside.id)
    again = client.responses.create(**MORE, previous_response_id=first.id)
    assert_only_new_computed(first, again)


def test_conversation_goes_on_at_any_gateway(swarm: HashSwarm, client: openai.OpenAI) -> None:
    other = swarm.gateway(*LEASE, name="other")
    with client_of(other) as second:
        first = client.responses.create(**ASK)
        answer = second.responses.create(**MORE, previous_response_id=first.id)
        assert_only_new_computed(first, answer)
        shown = [each.responses.retrieve(answer.id).to_dict() for each in (client, second)]
        assert shown[0] == shown[1]
        assert len(second.responses.input_items.list(answer.id).data) == 3
        changed = second.responses.create(
            **MORE, previous_response_id=answer.id, instructions="be kind"
        )
        assert changed.instructions == "be kind"
        second.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    swarm.kill("other")


def test_conversation_of_a_lost_gateway_goes_on_by_its_log(
    swarm: HashSwarm, client: openai.OpenAI
) -> None:
    lost = swarm.gateway(*LEASE, name="lost")
    with client_of(lost) as owner:
        first = owner.responses.create(**ASK)
        calm = owner.responses.create(**ASK)
        expected = owner.responses.create(**MORE, previous_response_id=calm.id)
    swarm.kill("lost")
    client = client.with_options(max_retries=PATIENT)  # until the lease of the lost one is over
    not_found(client, previous_response_id=first.id, instructions="be kind")
    second = client.responses.create(**MORE, previous_response_id=first.id)
    assert second.output_text == expected.output_text
    third = client.responses.create(**MORE, previous_response_id=second.id)
    assert_only_new_computed(second, third)
    not_found(client, previous_response_id=first.id)
    not_found(client, previous_response_id=third.id, instructions="be kind")
    with pytest.raises(openai.NotFoundError, match="conversation itself can go on"):
        client.responses.input_items.list(third.id)


def test_stream_of_a_killed_gateway_is_resumed_at_another(
    swarm: HashSwarm, endpoints: Endpoints
) -> None:
    lost = swarm.gateway(*LEASE, name="torn")
    stream = ResponseStream()
    with pytest.raises(httpx.HTTPError):
        for _ in stream.read(lost.url, LONG):
            if len(stream.events) == 30:
                swarm.kill("torn")
    stream.cut()
    assert list(stream.read(endpoints.url, LONG))
    stream.assert_whole()
    calm = httpx.post(f"{endpoints.url}/v1/responses", json=LONG, timeout=60).json()
    assert stream.text == text_of(calm)
    assert stream.response["usage"]["output_tokens"] == LONG["max_output_tokens"]
    with client_of(endpoints) as client:
        assert client.responses.retrieve(stream.response["id"]).output_text == stream.text
        again = client.responses.create(**MORE, previous_response_id=stream.response["id"])
        assert cached(again) >= stream.response["usage"]["total_tokens"] - 1


@pytest.mark.full
def test_forwarded_stream_goes_on_when_its_gateway_is_lost(
    swarm: HashSwarm, endpoints: Endpoints
) -> None:
    owner = swarm.gateway(*LEASE, name="owner")
    with client_of(owner) as client:
        calm = client.responses.create(**ASK)
        body = LONG | {"previous_response_id": calm.id}
        whole = httpx.post(f"{owner.url}/v1/responses", json=body, timeout=60).json()
        first = client.responses.create(**ASK)
    stream = ResponseStream()
    for _ in stream.read(endpoints.url, LONG | {"previous_response_id": first.id}):
        if len(stream.events) == 30:
            swarm.kill("owner")
    stream.assert_whole()
    assert stream.text == text_of(whole)
