"""Other streams go on while a long answer is encoded: it may have the log probabilities of 128k tokens."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from starlette.types import Message
from support.gateway_service import turns_of_another_task
from support.models.tokenizers import make_tokenizer

from modelswarm.protocol.messages import PromptLogprob, TopLogprob
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.responses import add_prompt
from modelswarm_gateway.api.http.logprobs_json import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.generation.output.logprobs import TokenLogprob

TOKENS = 2000
LEAST_TURNS = 10  # of another task, while one answer is encoded
TOP = tuple(TopLogprob(token, -token / 3) for token in range(20))
SCORES = [PromptLogprob(token % 50, -1.5, TOP) for token in range(TOKENS - 1)]
ENTRIES = [TokenLogprob(token % 50, -1.5, TOP, 4 * token) for token in range(TOKENS)]
NAMES = TokenNames(lambda token: f"t{token}".encode())


async def test_long_body_is_encoded_in_turn_with_other_tasks() -> None:
    body = {
        "id": "a",
        "choices": [
            {"index": 0, "logprobs": chat_logprobs(ENTRIES, NAMES), "token_ids": [1, 2]},
            {"index": 1, "logprobs": completion_logprobs(ENTRIES, NAMES), "text": "\u00e9"},
        ],
        "usage": {},
        "prompt_logprobs": prompt_logprobs(SCORES, 20, NAMES),
        "nothing": prompt_logprobs([], 20, NAMES),
        "empty": [],
    }
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    turns = await turns_of_another_task(ResponseWriter(send).write_json(body))
    start, *parts = sent
    encoded = b"".join(part["body"] for part in parts)
    assert encoded.decode() == json.dumps(body, default=list)
    assert (b"content-length", str(len(encoded)).encode()) in start["headers"]
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 1
    assert turns >= LEAST_TURNS


async def test_scores_over_grpc_are_made_in_turn_with_other_tasks() -> None:
    part, tokenizer = api_pb2.GenerateResponse(), make_tokenizer()
    prompt = [token % 50 for token in range(TOKENS)]
    scored: Any = SimpleNamespace(prompt=prompt, prompt_logprobs=SCORES, tokenizer=tokenizer)
    request = api_pb2.GenerateRequest(prompt_logprobs=3)
    assert await turns_of_another_task(add_prompt(part, scored, request)) >= LEAST_TURNS
    assert [entry.token_id for entry in part.prompt_logprobs] == prompt
    assert {len(entry.top) for entry in part.prompt_logprobs} == {0, 3}
