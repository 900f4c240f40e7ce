"""Tokens that an answer does not show: the client of its stream still gets keepalives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message
from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import encode_bytes, model_files

from modelswarm.protocol.messages import FenceAck, Finish, Sampling
from modelswarm_gateway.api.http.choices import Choices
from modelswarm_gateway.api.http.openai_responses import ChatResponseBuilder, ResponseHead
from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.backend.token_stream import TokenEvent
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.generation.generation import Generation, TurnStart
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.tool_calls.answer import AnswerOptions
from modelswarm_gateway.generation.tool_calls.families import find_format
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import MODEL

PROMPT = tuple(encode_bytes("x<think>"))
NEVER = 1e9  # seconds


def start_hidden(service: GenerationService, node: Node) -> list[Generation]:
    """Start two answers that leave their reasoning out."""
    card = node.model_card(MODEL)
    assert card is not None and card.tokenizer is not None
    answer, form = AnswerOptions(include_reasoning=False), find_format("</think>")
    prompt = TokenPrompt(PROMPT)
    request = GenerationRequest(MODEL, prompt, "prompt", SamplingOptions(), answer=answer)
    start = TurnStart(TurnRequest(PROMPT, 9, Sampling()), card.tokenizer, 0.0, form=form)
    made = [Generation(service._context, request, start) for _ in range(2)]
    hops = enumerate(node._core._recovery.hops.by_handle.items(), 1)
    for number, (handle, (running, _)) in list(hops):
        node.on_items("s0/1/x", [FenceAck(handle, number, running.epoch)])
    return made


def think(generations: list[Generation], more: int) -> None:
    """Let each answer have its token behind so many others."""
    for generation in generations:
        event = TokenEvent(len(PROMPT) + more, encode_bytes("a")[0], Finish.NONE)
        generation._stream.add_event(event)


async def wait_until(is_met: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not is_met():  # noqa: ASYNC110 (a stream has no event for it)
            await asyncio.sleep(0.01)


async def test_hidden_tokens_of_several_answers_need_keepalives() -> None:
    service, node = await make_service_with_files(model_files())
    generations = start_hidden(service, node)
    now, sent = 0.0, list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    first = ChatResponseBuilder(ResponseHead(MODEL, 1, (PROMPT, PROMPT)))
    builders = [first, ChatResponseBuilder(ResponseHead(MODEL, 1, (PROMPT, PROMPT)), 1, first)]
    choices = Choices(generations, builders, lambda: now)
    sending = asyncio.create_task(choices.send_stream(ResponseWriter(send), NEVER))
    think(generations, 0)
    await wait_until(lambda: len(sent) == 2)  # the head, and the openings
    await wait_until(lambda: all(each.completion_tokens == 1 for each in generations))
    now = NEVER
    think(generations, 1)
    await wait_until(lambda: len(sent) == 3)
    assert sent[2]["body"].startswith(b": waiting")
    for generation in generations:
        generation.close()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
