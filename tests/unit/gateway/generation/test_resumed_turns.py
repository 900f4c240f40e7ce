"""A resumed turn begins with what its client has not seen, in parts between which other streams go on."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import encode_bytes, model_files

from modelswarm.protocol.messages import FenceAck, Finish, Token
from modelswarm_gateway.api.http.app import build_http_app
from modelswarm_gateway.api.http.openai_requests import parse_completion
from modelswarm_gateway.api.http.openai_responses import ResponseHead
from modelswarm_gateway.api.messages.response import MessageBuilder
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation import generation as generation_module
from modelswarm_gateway.generation.generation import Generation, TurnStart
from modelswarm_gateway.generation.output.turn_output import OutputChunk
from modelswarm_gateway.generation.resumption import LogMark, resume_turn
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import MODEL

SERVER = "s0/1/x"
PROMPT, ANSWER = encode_bytes("abc"), encode_bytes("0123456789 é€ 0123456789")


def answer(node: Node) -> None:
    """Let the server give the whole answer of the only turn."""
    [(handle, (running, hop))] = node._core._recovery.hops.by_handle.items()
    ends = [Finish.NONE] * (len(ANSWER) - 1) + [Finish.LENGTH]
    tokens = [
        Token(handle, running.epoch, position, token, logprob=-1.0, finish=end)
        for position, (token, end) in enumerate(zip(ANSWER, ends, strict=True), start=len(PROMPT))
    ]
    node.on_items(SERVER, [FenceAck(handle, hop.server_handle or 1, running.epoch), *tokens])


async def read(generation: Generation) -> list[OutputChunk]:
    chunks: list[OutputChunk] = []
    while not chunks or chunks[-1].finish is None:
        async with asyncio.timeout(SECONDS):
            chunk = await generation.next_chunk(SECONDS)
        assert chunk is not None
        assert generation.completion_tokens == chunk.received - len(PROMPT), "the usage so far"
        chunks.append(chunk)
    generation.close()
    return chunks


async def test_unseen_text_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part of 30,000 tokens with 20 alternatives each took the gateway's event loop 3 s."""
    monkeypatch.setattr(generation_module, "_UNSEEN_AT_ONCE", 8)
    service, node = await make_service_with_files(model_files())
    body = {"model": MODEL, "prompt": PROMPT, "session_id": "s", "logprobs": 0}
    request = parse_completion(body).to_generation_request()
    _, tokenizer = service.find_model(MODEL)
    sampling = tokenizer.defaults.sampling(request.options, 1)
    turn = TurnRequest(tuple(PROMPT), len(ANSWER), sampling, credit_ahead=64, keeps_logprobs=True)
    generation = Generation(service._context, request, TurnStart(turn, tokenizer, 0.0))
    answer(node)
    await read(generation)
    seen, log = len(PROMPT) + 2, (*PROMPT, *ANSWER)
    kept = service._parked_turn((MODEL, "s"))
    resumed = resume_turn(PROMPT, kept, seen - 1, str(LogMark(log[:seen])))
    start = TurnStart(turn, tokenizer, 0.0, resumed=resumed)
    chunks = await read(Generation(service._context, request, start))
    name, labels = "modelswarm_gateway_tokens_total", {"model": MODEL, "kind": "prompt"}
    counted = service.metrics.registry.get_sample_value(name, labels)
    assert counted == len(PROMPT), "the prompt of a resumed turn counts once"
    assert max(len(chunk.tokens) for chunk in chunks) <= 8 + 2  # with those of half a character
    assert [token for chunk in chunks for token in chunk.tokens] == ANSWER[2:]
    assert "".join(chunk.text for chunk in chunks) == "23456789 é€ 0123456789"
    assert [entry.token for chunk in chunks for entry in chunk.logprobs] == ANSWER[2:]
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    for chunk in chunks:
        assert chunk.mark == str(LogMark(log[: chunk.end]))


async def test_turn_that_another_gateway_takes_over_has_not_failed() -> None:
    service, node = await make_service_with_files(model_files())
    node.recovery_events.observer = service.metrics
    body = {"model": MODEL, "prompt": PROMPT, "session_id": "s"}
    request = parse_completion(body).to_generation_request()
    _, tokenizer = service.find_model(MODEL)
    turn = TurnRequest(tuple(PROMPT), len(ANSWER), tokenizer.defaults.sampling(request.options, 1))
    generation = Generation(service._context, request, TurnStart(turn, tokenizer, 0.0))
    session = generation._session
    node.recovery_events.record_reroute(session, node._streams[session], "link_down")
    node._core._recovery.relinquish(node._core._sessions[session], keeps_log=True)
    node.tick()
    with pytest.raises(ApiError) as ended:
        await generation.next_chunk(SECONDS)
    assert ended.value.code is Code.SESSION_ELSEWHERE
    generation.close()
    for name, labels in {
        "streams": {"outcome": "cancelled"},
        "recoveries": {"outcome": "abandoned", "cause": "link_down"},
    }.items():
        name = f"modelswarm_gateway_{name}_total"
        labels["model"] = MODEL
        assert service.metrics.registry.get_sample_value(name, labels) == 1, name


async def test_stream_without_a_session_has_no_event_ids() -> None:
    """Load generators, as those of vLLM and SGLang, read no event that begins with an id."""
    service, node = await make_service_with_files(model_files())
    transport = httpx.ASGITransport(app=build_http_app(service))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": len(ANSWER), "stream": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(SECONDS):
            while not node._core._recovery.hops.by_handle:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0)  # the answer comes before the link to the server fails
        answer(node)
        events = (await asking).text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events)


async def test_stop_string_within_min_tokens_ends_nothing() -> None:
    """So it is in vLLM, whose field this is."""
    service, node = await make_service_with_files(model_files())
    body = {"model": MODEL, "prompt": PROMPT, "stop": "2", "min_tokens": 5}
    request = parse_completion(body).to_generation_request()
    _, tokenizer = service.find_model(MODEL)
    sampling = tokenizer.defaults.sampling(request.options, 1)
    turn = TurnRequest(tuple(PROMPT), len(ANSWER), sampling, credit_ahead=64)
    generation = Generation(service._context, request, TurnStart(turn, tokenizer, 0.0))
    answer(node)
    text = "".join(chunk.text for chunk in await read(generation))
    assert (text, generation.stop_match) == ("0123456789 é€ 01", "2")


@pytest.mark.parametrize(
    ("more", "reason"), [(0, "max_tokens"), (5, "model_context_window_exceeded")]
)
async def test_message_tells_that_the_context_has_ended(more: int, reason: str) -> None:
    service, _ = await make_service_with_files(model_files())
    request = parse_completion({"model": MODEL, "prompt": PROMPT}).to_generation_request()
    _, tokenizer = service.find_model(MODEL)
    turn = TurnRequest(tuple(PROMPT), len(ANSWER), tokenizer.defaults.sampling(request.options, 1))
    generation = Generation(service._context, request, TurnStart(turn, tokenizer, 0.0))
    head = ResponseHead(MODEL, 1, (PROMPT,))
    builder = MessageBuilder(head, generation, len(ANSWER) + more)
    builder.finish_event("length")
    assert f'"stop_reason": "{reason}"'.encode() in builder.end_events(len(ANSWER))
    generation.close()
