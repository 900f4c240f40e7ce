"""Named sessions that are given only new input: `append`, `session_position`, and both after lost processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.models.tokenizers import encode_bytes
from support.processes.swarm import BLOCKS, ENDLESS, MODEL, VOCABULARY, Endpoints, HashSwarm

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_serving.model.hash_model import reference_tokens

LEASE = ("--lease", "2")
NEW = 5  # tokens of an answer


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with HashSwarm(tmp_path_factory.mktemp("append"), context=ENDLESS) as made:
        for name, blocks in (("s0", "0:2"), ("s1", "2:4"), ("t0", "0:2"), ("t1", "2:4")):
            made.server(name, blocks, *LEASE)
        made.servers_ready("s0", "s1", "t0", "t1")
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE, name="main")


def post(at: Endpoints, path: str = "completions", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": NEW, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{at.url}/v1/{path}", json=body | fields, timeout=60)


def answer(at: Endpoints, path: str = "completions", **fields: Any) -> dict[str, Any]:
    made = post(at, path, **fields)
    assert made.status_code == 200, made.text
    content: dict[str, Any] = made.json()
    return content


def prompt_of(body: dict[str, Any]) -> list[int]:
    """Return the tokens of the prompt, which a chat has beside its choices."""
    tokens: list[int] = (body | body["choices"][0])["prompt_token_ids"]
    return tokens


def log_of(body: dict[str, Any]) -> list[int]:
    return [*prompt_of(body), *body["choices"][0]["token_ids"]]


def refusal(made: httpx.Response) -> tuple[int, str, str]:
    error = made.json()["error"]
    return made.status_code, error["code"], error["param"]


def expected(tokens: list[int]) -> list[int]:
    end = len(tokens) + NEW
    return reference_tokens(tokens, Sampling(), NEW, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def test_appended_input_continues_behind_the_log(endpoints: Endpoints) -> None:
    first = answer(endpoints, prompt="once", session_id="story")
    second = answer(endpoints, prompt=" more", session_id="story", append=True)

    whole = [*log_of(first), *encode_bytes(" more")]
    assert prompt_of(second) == whole
    assert second["choices"][0]["token_ids"] == expected(whole)
    assert second["usage"]["total_tokens"] == len(whole) + NEW


def cached(body: dict[str, Any]) -> int:
    count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_usage_counts_the_tokens_that_servers_still_had(endpoints: Endpoints) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = answer(endpoints, "chat/completions", messages=messages, session_id="counted")
    first = answer(endpoints, prompt="once", session_id="cached")

    more = answer(endpoints, prompt=" more", session_id="cached", append=True)
    again = answer(endpoints, "chat/completions", messages=messages, session_id="counted")

    assert (cached(chat), cached(first)) == (0, 0)
    assert len(log_of(first)) - 1 <= cached(more) <= len(log_of(first))
    assert len(prompt_of(chat)) - 1 <= cached(again) <= len(prompt_of(chat))


def test_each_event_counts_the_tokens_that_servers_still_had(endpoints: Endpoints) -> None:
    messages = [{"role": "user", "content": "hello"}]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"messages": messages, "session_id": "events"}
    first = answer(endpoints, "chat/completions", **fields)

    again = post(endpoints, "chat/completions", **fields, stream=True, stream_options=usage)

    lines = [line[6:] for line in again.text.splitlines() if line.startswith("data: {")]
    counts = [cached(json.loads(line)) for line in lines]
    assert len(prompt_of(first)) - 1 <= counts[-1] <= len(prompt_of(first))
    assert set(counts) == {counts[-1]} and len(counts) > 2


def test_grpc_counts_the_tokens_that_servers_still_had(endpoints: Endpoints) -> None:
    first = answer(endpoints, prompt="once", session_id="called")
    request = api_pb2.GenerateRequest(
        model=MODEL, prompt=" more", session_id="called", append=True, max_tokens=NEW
    )
    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        usage = stub.Generate(request, timeout=60).usage
        request.session_id, request.append = "", False
        alone = stub.Generate(request, timeout=60).usage
    assert len(log_of(first)) - 1 <= usage.cached_tokens <= len(log_of(first))
    assert usage.prompt_tokens == len(log_of(first)) + len(encode_bytes(" more"))
    assert alone.cached_tokens == 0


def test_whole_input_continues_from_the_longest_common_prefix(endpoints: Endpoints) -> None:
    """Input without `append` is the whole input, so a client that sends only what is new starts anew."""
    first = answer(endpoints, prompt="once", session_id="habit")
    again = answer(endpoints, prompt=[*log_of(first)[:6], 9], session_id="habit")
    assert prompt_of(again) == [*log_of(first)[:6], 9]

    new = answer(endpoints, prompt=" more", session_id="habit")
    assert prompt_of(new) == encode_bytes(" more")


def test_appended_messages_are_rendered_behind_the_answer(endpoints: Endpoints) -> None:
    hello = {"role": "user", "content": "hello"}
    first = answer(endpoints, "chat/completions", messages=[hello], session_id="chat")
    text = first["choices"][0]["message"]["content"]
    more = {"role": "user", "content": "and?"}

    second = answer(endpoints, "chat/completions", messages=[more], session_id="chat", append=True)

    transcript = [hello, {"role": "assistant", "content": "X"}, more]
    rendered = prompt_of(answer(endpoints, "chat/completions", messages=transcript))
    end = rendered[rendered.index(encode_bytes("X")[0]) + 1 :]
    assert text and prompt_of(second) == [*log_of(first), *end]


def test_position_rewinds_and_makes_a_repetition_safe(endpoints: Endpoints) -> None:
    first = answer(endpoints, prompt="once", session_id="again")
    place: dict[str, Any] = {
        "append": True,
        "session_position": len(log_of(first)),
        "session_id": "again",
    }
    second = answer(endpoints, prompt=" more", **place)
    assert log_of(answer(endpoints, prompt=" more", **place)) == log_of(second)

    back = answer(endpoints, prompt="!", append=True, session_position=2, session_id="again")
    assert prompt_of(back) == encode_bytes("on!")


def test_input_that_cannot_be_appended_is_refused_by_name(endpoints: Endpoints) -> None:
    gone = post(endpoints, prompt="x", session_id="never", append=True)
    assert refusal(gone) == (404, "session_expired", "session_id")
    assert "send the whole input without append" in gone.text
    nameless = post(endpoints, prompt="x", append=True)
    assert refusal(nameless) == (400, "invalid_request", "append")
    placed = post(endpoints, prompt="x", session_id="never", session_position=3)
    assert refusal(placed) == (400, "invalid_request", "session_position")
    answer(endpoints, prompt="x", session_id="short")
    beyond = post(endpoints, prompt="x", session_id="short", append=True, session_position=99)
    assert refusal(beyond) == (410, "session_lost", "session_position")


def test_grpc_appends_by_the_same_rule(endpoints: Endpoints) -> None:
    def request(**fields: Any) -> api_pb2.GenerateRequest:
        return api_pb2.GenerateRequest(model=MODEL, max_tokens=NEW, ignore_eos=True, **fields)

    with grpc.insecure_channel(endpoints.grpc) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        first = stub.Generate(request(prompt="once", session_id="grpc"), timeout=60)
        second = stub.Generate(request(prompt="!", session_id="grpc", append=True), timeout=60)
        with pytest.raises(grpc.RpcError) as gone:
            stub.Generate(request(prompt="!", session_id="none", append=True), timeout=60)

    whole = [*encode_bytes("once"), *first.token_ids, *encode_bytes("!")]
    assert list(second.token_ids) == expected(whole)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


def test_append_goes_on_after_lost_server_and_lost_gateway(
    swarm: HashSwarm, endpoints: Endpoints
) -> None:
    owner = swarm.gateway(*LEASE, name="owner")
    log = log_of(answer(owner, prompt="once", session_id="kept"))
    for text, lost in (("a", ""), ("b", "s1"), ("c", "owner")):
        if lost:
            swarm.kill(lost)
        body = answer(endpoints, prompt=text, session_id="kept", append=True)
        whole = [*log, *encode_bytes(text)]
        assert body["choices"][0]["token_ids"] == expected(whole), (text, lost)
        log = [*whole, *expected(whole)]


def test_refused_append_changes_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    """The session's one hop has no room, and neither has the replica."""
    with HashSwarm(tmp_path, context=ENDLESS) as swarm:
        for name in ("s0", "t0"):
            swarm.server(name, "0:4", "--pages", "40")  # of 16 positions
        swarm.servers_ready("s0", "t0")
        at = swarm.gateway()
        log = log_of(answer(at, prompt="hello", session_id="chat"))
        fillers = [
            httpx.post(
                f"{at.url}/v1/sessions", json={"model": MODEL, "max_length": 480}, timeout=60
            )
            for _ in range(2)
        ]
        assert [each.status_code for each in fillers] == [200, 200]
        more: dict[str, Any] = {
            "prompt": "again",
            "session_id": "chat",
            "append": True,
            "max_tokens": 400,
        }
        for _ in range(2):
            refused = post(at, **more)
            assert refusal(refused)[:2] == (429, "no_capacity")
            assert refused.headers["x-should-retry"] == "true"
            state = httpx.get(f"{at.url}/v1/sessions/chat", timeout=60)
            assert (state.status_code, state.json()["position"]) == (200, len(log))
        for each in fillers:
            httpx.delete(f"{at.url}/v1/sessions/{each.json()['id']}", timeout=60)
        assert prompt_of(answer(at, **more)) == [*log, *encode_bytes("again")]
