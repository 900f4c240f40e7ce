"""Answers of the Python client while servers and gateways are killed: the text is that of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.swarm import ENDLESS, Endpoints, HashSwarm, two_spans

from modelswarm import Client

LEASE = ("--lease", "2")
SILENCE = 10.0  # seconds until a frozen gateway is left
LENGTH = 500  # tokens of an answer: some seconds
FIELDS: dict[str, Any] = {
    "max_tokens": LENGTH,
    "temperature": 1.0,
    "seed": 7,
    "ignore_eos": True,
    "return_token_ids": True,
    "allowed_token_ids": encode_bytes("abcdefghijklmnop"),
}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("failures"), *LEASE, context=ENDLESS) as running:
        running.server("s1-b", "2:4", *LEASE)
        running.servers_ready("s1-b")
        yield running


def gateways(swarm: HashSwarm, *flags: str) -> tuple[Endpoints, Endpoints]:
    one, two = (swarm.gateway(*LEASE, *flags, name=name) for name in ("one", "two"))
    return one, two


def calm_text(endpoints: Endpoints, **changes: Any) -> str:
    with Client(endpoints.url) as client:
        return client.complete("go", **FIELDS | changes).text


def generated(endpoints: Endpoints) -> float:
    return endpoints.metric("modelswarm_gateway_tokens_total", kind="generated")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.full),
    ],
)
def test_stream_goes_on_at_another_gateway(swarm: HashSwarm, number: signal.Signals) -> None:
    one, two = gateways(swarm, "--drain-timeout", "0", "--keepalive", "1")
    calm, before = calm_text(two), generated(two)
    text, tokens, prompts, ends = "", 0, 0, []
    with Client([one.url, two.url], timeout=SILENCE) as client:
        for chunk in client.stream_complete("go", **FIELDS):
            text += chunk.text
            prompts += chunk.prompt_token_ids is not None
            had, tokens = tokens, tokens + len(chunk.token_ids)
            if had < 20 <= tokens:
                swarm.kill("one", number)
            ends += [chunk.usage.completion_tokens] if chunk.usage else []
    assert text == calm and tokens == LENGTH
    assert ends == [LENGTH] and prompts == 1
    assert generated(two) > before, "the stream was resumed"
    swarm.kill("one")
    swarm.kill("two")


@pytest.mark.full
def test_whole_answers_survive_their_gateway(swarm: HashSwarm) -> None:
    """A chat with logprobs, and an appended turn of a session of the caller."""
    one, two = gateways(swarm)
    chat = [{"role": "user", "content": "hi"}]
    last = FIELDS | {"session_id": "mine", "append": True}
    with Client(two.url) as client:
        calm = client.chat(chat, **FIELDS, logprobs=True)
        first = client.complete("go", **FIELDS | {"session_id": "calm"})
        turn = last | {"session_id": "calm", "session_position": first.usage.total_tokens}
        calm_turn = client.complete("on", **turn)
        before = generated(two)
    with Client([one.url, two.url]) as client, ThreadPoolExecutor() as pool:
        assert client.complete("go", **FIELDS | {"session_id": "mine"}).text == first.text
        told = generated(one)
        answer = pool.submit(client.chat, chat, **FIELDS, logprobs=True)
        appended = pool.submit(client.complete, "on", **last)
        eventually("both answers have begun", lambda: generated(one) > told + 50)
        swarm.kill("one")
        made = answer.result(120)
        assert (made.text, made.token_ids) == (calm.text, calm.token_ids)
        assert made.logprobs == calm.logprobs and made.usage == calm.usage
        assert appended.result(120).choices == calm_turn.choices
    assert generated(two) > before, "the answers were resumed"
    swarm.kill("two")


@pytest.mark.full
def test_loss_of_a_server_is_not_seen(swarm: HashSwarm) -> None:
    endpoints = swarm.gateway(*LEASE, name="alone")
    calm = calm_text(endpoints)
    with Client(endpoints.url) as client:
        opened = client.open_session(3 * LENGTH, session_id="watched")
        text = ""
        for chunk in client.stream_complete("go", **FIELDS | {"session_id": opened.id}):
            if len(text) < 20 <= len(text) + len(chunk.text):
                swarm.kill(client.session_state(opened.id).route[-1].server)
            text += chunk.text
        assert text == calm
        assert client.session_state(opened.id).reroutes > 0
    swarm.kill("alone")
