"""Valid input that must not harm other requests: huge numbers, long lists, broken model files and run files."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import make_tokenizer, model_files
from unit.gateway.models.test_model_registry import HELLO, RegistryHarness

from modelswarm.protocol.identity import Address, Epoch
from modelswarm.protocol.messages import Create, Fence, Sampling, Turn
from modelswarm.protocol.sampling import find_problem
from modelswarm.protocol.wire import api_pb2
from modelswarm.protocol.wire.frames import pack
from modelswarm_gateway.api.grpc.requests import parse_generate_request
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.http.openai_requests import parse_chat, parse_completion
from modelswarm_gateway.api.messages.conversation import read_conversation
from modelswarm_gateway.api.responses.requests import parse_responses
from modelswarm_gateway.discovery.dialer import Dialer
from modelswarm_gateway.discovery.file_source import FileSource
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation import request as request_module
from modelswarm_gateway.generation.request import (
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
    encode_prompt,
)
from modelswarm_gateway.generation.service import GenerationService, ServiceSettings
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.registry import ModelRegistry
from modelswarm_gateway.models.sampling_defaults import (
    SamplingDefaults,
    SamplingOptions,
    read_defaults,
)
from tools.dashboard.metric_registries import MODEL

MANY = 300_000  # entries: a body of about 1 MiB
MARKER = "in no body but that of one test"
HERE = "stands for an object with the marker"
TEXT = {"type": "input_text", "text": "hi"}


def can_cross_a_link(sampling: Sampling) -> bool:
    fence = Fence(0, 1, Epoch(1, 1), 0, 0, Create("s", 0, 1), Turn(1, 1, sampling))
    return bool(list(pack([fence])))


@pytest.mark.parametrize("top_k", [2**63, 2**64, 10**30])
def test_huge_top_k_crosses_the_link(top_k: int) -> None:
    request = parse_completion(
        {"model": "m", "prompt": [1], "top_k": top_k}
    ).to_generation_request()
    sampling = SamplingDefaults().sampling(request.options, 1)
    assert sampling.top_k >= 1 << 30
    assert can_cross_a_link(sampling)


def test_invalid_model_defaults_are_left_out() -> None:
    config = {
        "do_sample": True,
        "top_k": float("nan"),
        "temperature": float("inf"),
        "repetition_penalty": 10**400,
        "eos_token_id": [-1, True, 2, 1 << 70],
    }
    defaults = read_defaults(config, {}, None)
    assert defaults.eos == (2,)
    assert defaults.top_k == 0
    assert can_cross_a_link(defaults.sampling(SamplingOptions(), 1))


def test_model_defaults_beyond_the_wire_are_limited() -> None:
    """A server ends the link over which it gets others. transformers takes those of 1 and more as off, too."""
    config = {"do_sample": True, "top_p": 1.5, "min_p": -1, "typical_p": 7}
    sampling = read_defaults(config, {}, None).sampling(SamplingOptions(), 1)
    assert find_problem(sampling) is None
    assert (sampling.top_p, sampling.min_p, sampling.typical_p) == (1.0, 0.0, 1.0)


def test_tiny_temperature_is_zero_and_tiny_penalty_is_raised() -> None:
    assert SamplingDefaults().sampling(SamplingOptions(temperature=1e-300), 1).temperature == 0.0
    assert SamplingDefaults().sampling(SamplingOptions(temperature=0.01), 1).temperature == 0.01
    assert (
        SamplingDefaults()
        .sampling(SamplingOptions(repetition_penalty=5e-324), 1)
        .repetition_penalty
        > 1e-9
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_completion, {"prompt": [True] * MANY}),
        (parse_completion, {"prompt": [[True] * MANY]}),
        (parse_chat, {"messages": [1] * MANY}),
        (parse_chat, {"messages": [{"role": "user", "content": [1] * MANY}]}),
        (parse_chat, {"messages": [{"role": "user", "tool_calls": [1] * MANY}]}),
        (parse_chat, {"messages": [{"role": "user", "content": "a"}], "stop": [1] * MANY}),
    ],
)
def test_long_invalid_list_is_refused_at_its_first_entry(parse, body) -> None:  # type: ignore[no-untyped-def]
    began = time.process_time()
    with pytest.raises(ApiError):
        parse({"model": "m", **body})
    assert time.process_time() - began < 0.5  # 12 s and 1 GB if every entry is checked


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_completion, {"prompt": "a", "logit_bias": {"a": 1, "b": 1, "c": 1}}),
        (parse_completion, {"prompt": "a", "logit_bias": {"1": "x", "2": "x", "3": "x"}}),
        (parse_responses, {"input": "a", "metadata": {"a": 1, "b": 1, "c": 1}}),
    ],
)
def test_objects_are_refused_at_their_first_entry(
    parse: Callable[[object], object], body: dict[str, Any]
) -> None:
    """A body has room for two million of them: findings about all would take gigabytes and half a minute."""
    with pytest.raises(ApiError) as refused:
        parse({"model": "m", **body})
    cause = refused.value.__cause__
    assert isinstance(cause, ValidationError)
    assert cause.error_count() == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "text", "text": "a" * 40}),
        ("assistant", {"type": "thinking", "thinking": "a" * 40}),
    ],
)
def test_message_of_many_blocks_is_read_in_linear_time(role: str, block: dict[str, str]) -> None:
    """A body has room for four times as many blocks. Each one must not copy the text before it."""
    message = {"role": role, "content": [block] * 50_000}
    began = time.process_time()
    read_conversation(None, [message, {"role": "user", "content": "go on"}])
    assert time.process_time() - began < 1.0  # 2 and 20 s if each block copies the text before it


def test_grpc_session_id_is_limited_as_over_http() -> None:
    with pytest.raises(ApiError, match="session_id"):
        parse_generate_request(api_pb2.GenerateRequest(model="m", prompt="a", session_id="x" * 257))


async def test_unparsable_model_files_are_given_up() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    harness.send_files("s0/1/a", {**model_files(), "tokenizer_config.json": deep}, size=1 << 20)
    await harness.wait_until_idle()
    [entry] = harness.registry.entries()
    assert entry.fetch is None
    assert entry.retry_at > harness.now


async def test_broken_symlink_and_pipe_do_not_hide_members(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "b.json")
    (tmp_path / "s0.json").write_text('{"peer": "s0/1/a", "target": "127.0.0.1:1"}')
    dialled: list[Address] = []
    dialer = Dialer(FileSource(tmp_path), dialled.append, lambda: 0.0)
    await asyncio.wait_for(asyncio.to_thread(dialer.dial_due), SECONDS)
    assert dialled == [Address("s0/1/a", "127.0.0.1:1")]


async def test_files_follow_the_revision_that_turns_use() -> None:
    harness = RegistryHarness()
    revisions = ["r1"]
    harness.registry = ModelRegistry(
        harness.sent.extend,
        lambda: harness.now,
        lambda: 77.5,
        lambda: None,
        lambda model: revisions[0],
    )
    harness.registry.on_peer_connected(HELLO)
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.send_files("s0/1/a", model_files())
    await harness.wait_until_idle()
    harness.registry.on_peer_connected(replace(HELLO, peer="s1/1/b", revision="r2"))
    assert harness.take_asked_peers() == ["s1/1/b"]
    harness.send_files("s1/1/b", model_files())
    await harness.wait_until_idle()
    [entry] = harness.registry.entries()
    assert entry.revision == "r1"
    revisions[0] = "r2"
    harness.registry.tick()
    assert harness.take_asked_peers() == []
    assert entry.revision == "r2"


@pytest.mark.full
async def test_text_beyond_any_context_is_refused_before_tokenizing() -> None:
    text = make_tokenizer()
    request = GenerationRequest("m", TextPrompt("a " * 4_000_000), "prompt", SamplingOptions())
    began = time.process_time()
    with pytest.raises(ApiError) as caught:
        await encode_prompt(request, text, 512)
    assert caught.value.code is Code.CONTEXT_LENGTH
    assert time.process_time() - began < 0.2
    ids = await encode_prompt(replace(request, prompt=TextPrompt("a " * 5000)), text, 1 << 20)
    assert len(ids) > 0


async def test_requests_that_are_starting_count_as_running() -> None:
    """Each waits with its prompt; here for a server that is asked for the session, and says nothing."""
    _, node = await make_service_with_files(model_files())
    limited = ServiceSettings(max_generations=2)
    service = GenerationService(node, Metrics(node), asyncio.get_running_loop().time, limited)
    request = GenerationRequest(MODEL, TokenPrompt((5,)), "prompt", SamplingOptions())
    waiting = [
        asyncio.create_task(service.start_generation(replace(request, session_id=name)))
        for name in "ab"
    ]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refused:
        await service.start_generation(request)
    assert (refused.value.code, refused.value.retry_after) == (Code.NO_CAPACITY, 1.0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    (await service.start_generation(request)).close()


async def test_turn_of_a_client_that_takes_nothing_is_ended() -> None:
    _, node = await make_service_with_files(model_files())
    now = 0.0
    service = GenerationService(node, Metrics(node), lambda: now)
    request = GenerationRequest(MODEL, TokenPrompt((5,)), "prompt", SamplingOptions())
    unread = await service.start_generation(request)
    served = await service.start_generation(request)
    waiting = asyncio.create_task(served.next_chunk(SECONDS))
    await asyncio.sleep(0)
    now = 119.0
    service.end_unread()
    assert service.running_count == 2
    now = 120.0
    service.end_unread()
    assert service.running_count == 1, "the other one waits for its next token"
    assert len(node.sessions()) == 1
    with pytest.raises(ApiError) as ended:
        await unread.next_chunk(0)
    assert ended.value.code is Code.STREAM_UNREAD
    served.end(ended.value)
    with pytest.raises(ApiError):
        await waiting


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [5]}),
        ("completions", {"prompt": [5], "session_id": "named"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ("responses", {"input": "hi"}),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "hi", "annotations": HERE}],
                "session_id": "a",
            },
        ),
        ("responses", {"input": [{"role": "user", "content": "hi", "phase": HERE}]}),
        ("responses", {"input": [{"role": "user", "content": [TEXT | {"annotations": HERE}]}]}),
    ],
)
async def test_fields_without_effect_are_not_kept(path: str, fields: dict[str, Any]) -> None:
    """They may have 26 times the bytes of their JSON: 16 MiB of empty lists. An answer may take minutes."""
    service, _ = await make_service_with_files(model_files())
    transport = httpx.ASGITransport(app=build_http_app(service))
    caller = "metadata" if path == "messages" else "user"
    body = {"model": MODEL, **fields, caller: {MARKER: [[]]}}
    content = json.dumps(body).replace(json.dumps(HERE), json.dumps({MARKER: [[]]})).encode()
    del body
    async with httpx.AsyncClient(transport=transport, base_url="http://here/v1") as client:
        asking = asyncio.create_task(client.post(path, content=content))
        async with asyncio.timeout(SECONDS):
            while await service.wait_until_idle(0):  # noqa: ASYNC110 (it has not begun)
                await asyncio.sleep(0.01)
        found = [each for each in gc.get_objects() if type(each) is dict and MARKER in each]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert not found


def test_many_template_variables_are_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ApiError) as refused:
        parse_chat(body | {"chat_template_kwargs": {"a": [[]] * MANY}}).to_generation_request()
    assert (refused.value.param, "256 KiB" in str(refused.value)) == ("chat_template_kwargs", True)


def test_large_documents_are_refused() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ApiError) as refused:
        parse_chat(body | {"documents": [{"a": [[]] * (2 * MANY)}]}).to_generation_request()
    assert (refused.value.param, "2048 KiB" in str(refused.value)) == ("documents", True)


def test_letters_of_other_alphabets_count_as_they_are_sent() -> None:
    """Escaped, each of three bytes would have six: half a document would be refused."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    documents = [{"text": "\u4e2d" * 400_000}]
    parse_chat(body | {"documents": documents}).to_generation_request()
    with pytest.raises(ApiError, match="2048 KiB"):
        parse_chat(body | {"documents": 2 * documents}).to_generation_request()


async def test_token_ids_of_all_answers_have_a_limit() -> None:
    """Each answer sends its own to the servers: 128 times 10,000 of them, or 64 times for two prompts."""
    service, _ = await make_service_with_files(model_files())
    transport = httpx.ASGITransport(app=build_http_app(service))
    ids = list(range(10_000))
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 64, "allowed_token_ids": ids}
    async with httpx.AsyncClient(transport=transport, base_url="http://here/v1") as client:
        answer = await client.post("completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")
    assert "128 answers with 10000 token ids each" in answer.json()["error"]["message"]
    sampling = api_pb2.Sampling(allowed_token_ids=ids)
    with pytest.raises(ApiError, match="at most 1048576 in all"):
        parse_generate_request(
            api_pb2.GenerateRequest(model="m", prompt="a", n=128, sampling=sampling)
        )


async def test_log_probabilities_of_prompts_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway keeps 2 KB for each token of a prompt with 20 alternatives until the answer is written."""
    monkeypatch.setattr(request_module, "MAX_PROMPT_SCORES", 4000)
    service, _ = await make_service_with_files(model_files())
    body = {"model": MODEL, "prompt": [5] * 50, "prompt_logprobs": 20}
    request = parse_completion(body).to_generation_request()
    running = [await service.start_generation(request)]
    with pytest.raises(ApiError, match="4200 log probabilities of prompts; at most") as refused:
        service.start_choices(running, 5)
    assert (refused.value.param, refused.value.mapping.status) == ("prompt_logprobs", 400)
    service.start_choices(running, 3)
    with pytest.raises(ApiError, match="3150 log probabilities of prompts are kept") as refused:
        await service.start_generation(request)
    assert refused.value.code is Code.NO_CAPACITY
    for generation in running:
        generation.close()
    (await service.start_generation(request)).close()


async def test_echo_in_one_event_of_a_stream_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log probabilities of a prompt of 100,000 tokens would hold the event loop for seconds."""
    monkeypatch.setattr(request_module, "MAX_EVENT_SCORES", 1000)
    service, _ = await make_service_with_files(model_files())
    body = {"model": MODEL, "prompt": [5] * 50, "echo": True, "logprobs": 20}
    for more in ({}, {"stream": True, "logprobs": 2}, {"stream": True, "logprobs": None}):
        request = parse_completion(body | more).to_generation_request()
        (await service.start_generation(request)).close()
    request = parse_completion(body | {"stream": True}).to_generation_request()
    with pytest.raises(ApiError, match="1050 log probabilities of the prompt in") as refused:
        await service.start_generation(request)
    assert (refused.value.param, refused.value.mapping.status) == ("stream", 400)
