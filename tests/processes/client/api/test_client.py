"""`Client` and `AsyncClient` against a real swarm: answers, streams, sessions, and refusals."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import expected_tokens
from support.processes.swarm import CONTEXT, MODEL, Endpoints, two_spans

from modelswarm import AsyncClient, Client
from modelswarm.client.api import (
    BadRequestError,
    ClosedClientError,
    ContextLengthError,
    GatewayUnreachableError,
    NotAGatewayError,
    NotFoundError,
)

LETTERS: Any = {"ignore_eos": True, "allowed_token_ids": encode_bytes("abcdefgh")}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with two_spans(tmp_path_factory.mktemp("api")) as swarm:
        yield swarm.gateway()


@pytest.fixture(scope="module")
def client(endpoints: Endpoints) -> Iterator[Client]:
    with Client(endpoints.url) as made:
        yield made


def test_models_are_listed(client: Client) -> None:
    (model,) = client.models()
    assert (model.name, model.max_length, model.ready) == (MODEL, CONTEXT, True)


def test_completion_has_the_tokens_of_the_reference(client: Client) -> None:
    whole = client.complete("go", max_tokens=20, ignore_eos=True, return_token_ids=True)
    assert list(whole.token_ids or ()) == expected_tokens(20)
    assert whole.choices[0].prompt_token_ids == tuple(encode_bytes("go"))
    assert (whole.finish_reason, whole.usage.total_tokens, whole.model) == ("length", 22, MODEL)
    assert whole.request_id and whole.logprobs is None
    by_ids = client.complete(encode_bytes("go"), model=MODEL, max_tokens=20, ignore_eos=True)
    assert (by_ids.text, by_ids.token_ids) == (whole.text, None)


def test_stream_is_the_whole_answer(client: Client) -> None:
    whole = client.complete("go", max_tokens=20, logprobs=2, **LETTERS)
    chunks = list(client.stream_complete("go", max_tokens=20, logprobs=2, **LETTERS))
    assert "".join(chunk.text for chunk in chunks) == whole.text and len(whole.text) == 20
    assert sum((chunk.logprobs for chunk in chunks), ()) == whole.logprobs
    assert len(whole.logprobs or ()) == 20 and len((whole.logprobs or ())[0].top) >= 2
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage and not any(chunk.usage for chunk in chunks[:-1])


def test_chat_answers_and_streams_the_same(client: Client) -> None:
    whole = client.chat(HI, max_tokens=12, logprobs=True, return_token_ids=True, **LETTERS)
    chunks = list(client.stream_chat(HI, max_tokens=12, return_token_ids=True, **LETTERS))
    assert len(whole.text) == 12 and len(whole.logprobs or ()) == 12
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    prompts = [chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids is not None]
    assert prompts == [client.tokenize(HI).token_ids] == [whole.choices[0].prompt_token_ids]
    assert whole.tool_calls == () and whole.reasoning_content is None


def test_several_answers_have_their_indexes(client: Client) -> None:
    whole = client.complete("go", n=3, max_tokens=5, temperature=1.0, seed=5, **LETTERS)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.stream_complete(
        "go", n=3, max_tokens=5, temperature=1.0, seed=5, **LETTERS
    ):
        texts[chunk.index] += chunk.text
    assert texts == [choice.text for choice in whole.choices]


def test_prompt_logprobs_come_with_the_whole_answer(client: Client) -> None:
    whole = client.complete("go", max_tokens=1, prompt_logprobs=1)
    first, second = whole.choices[0].prompt_logprobs or ()
    assert first is None and str(encode_bytes("o")[0]) in (second or {})


def test_tokens_and_text_are_translated(client: Client) -> None:
    made = client.tokenize("go", return_token_strs=True)
    assert (list(made.token_ids), made.max_length) == (encode_bytes("go"), CONTEXT)
    assert made.tokens == ("g", "o")
    assert client.detokenize(made.token_ids) == "go"


def test_session_is_opened_continued_forked_and_closed(client: Client) -> None:
    opened = client.open_session(100, session_id="a/b", ttl=60)
    assert (opened.id, opened.position, opened.max_length) == ("a/b", 0, 100)
    first = client.complete("go", session_id="a/b", max_tokens=5, **LETTERS)
    forked = client.fork_session("a/b", new_session_id="other")
    assert forked.position == client.session_state("a/b").position == first.usage.total_tokens
    more = [
        client.complete("x", session_id=name, append=True, max_tokens=5, **LETTERS).text
        for name in ("a/b", "other")
    ]
    assert more[0] == more[1]
    assert client.close_session("a/b") and client.close_session("other")
    assert not client.close_session("a/b")
    with pytest.raises(NotFoundError) as missing:
        client.session_state("a/b")
    assert (missing.value.status, missing.value.code) == (404, "not_found")


def test_session_of_an_unnamed_turn_is_closed(endpoints: Endpoints) -> None:
    with Client(endpoints.url) as client:
        client.complete("go", max_tokens=5)
        stream = client.stream_complete("go", max_tokens=400, ignore_eos=True)
        assert next(stream)
        stream.close()
    eventually(
        "no session is left",
        lambda: endpoints.metric("modelswarm_gateway_sessions", model=MODEL) == 0,
    )


def test_refusals_are_typed_and_name_the_field(client: Client) -> None:
    with pytest.raises(BadRequestError, match="temperature") as wrong:
        client.complete("go", temperature=9.0)
    assert (wrong.value.status, wrong.value.param) == (400, "temperature")
    assert wrong.value.code == "invalid_request" and wrong.value.request_id
    with pytest.raises(ContextLengthError):
        client.complete("x" * (CONTEXT + 1))
    with pytest.raises(NotFoundError, match="does not exist here"):
        client.complete("go", model="other")


def test_other_servers_are_no_gateways(endpoints: Endpoints) -> None:
    with Client(f"http://{endpoints.metrics}") as client, pytest.raises(NotAGatewayError):
        client.models()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with (
            Client(url, max_retries=0) as client,
            pytest.raises(GatewayUnreachableError, match=url),
        ):
            client.complete("go")


def test_closed_client_says_so(endpoints: Endpoints) -> None:
    client = Client(endpoints.url)
    client.close()
    client.close()
    with pytest.raises(ClosedClientError, match="closed"):
        client.models()


def test_threads_share_a_client(client: Client) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: texts.append(client.complete("go", max_tokens=20, **LETTERS).text)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and len(set(texts)) == 1


async def test_synchronous_client_works_inside_a_loop(client: Client) -> None:
    assert asyncio.get_running_loop() and client.complete("go", max_tokens=3).usage


async def test_asynchronous_calls_run_at_once(endpoints: Endpoints) -> None:
    async with AsyncClient(endpoints.url) as client:
        texts = await asyncio.gather(
            *(client.complete("go", max_tokens=10, **LETTERS) for _ in range(20))
        )
        assert len({each.text for each in texts}) == 1
        stream = client.stream_complete("go", max_tokens=50, **LETTERS)
        assert "".join([chunk.text async for chunk in stream]).startswith(texts[0].text)
    with pytest.raises(ClosedClientError):
        await client.models()


def test_asynchronous_client_belongs_to_one_loop() -> None:
    client = AsyncClient("http://127.0.0.1:9", max_retries=0)  # a port of no server
    with pytest.raises(GatewayUnreachableError):
        asyncio.run(client.models())
    with pytest.raises(ClosedClientError, match="event loop"):
        asyncio.run(client.models())
