"""Messages of api.proto for the chunks of answers: the parts of a stream, and whole answers.

Used by `answers.py` and the Inference service. Knows no sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.output.turn_output import OutputChunk
from modelswarm_gateway.generation.rows.returned_rows import RowBlock
from modelswarm_gateway.models.tokenizer import ModelTokenizer

_ENTRIES_AT_ONCE = 64
"""Entries of a prompt that are made before other tasks run: some 4 ms with 20 alternatives each."""


async def response_part(
    name: str, chunk: OutputChunk, generation: Generation, index: int
) -> api_pb2.GenerateResponse:
    """Return the next part of the answer `index`. Other tasks run while one with an echoed prompt is made."""
    part = api_pb2.GenerateResponse(
        id=name,
        text=chunk.text,
        token_ids=chunk.tokens,
        position=chunk.position,
        mark=chunk.mark,
        index=index,
        finish_reason=chunk.finish or "",
    )
    await _add_logprobs(part.logprobs, chunk.logprobs, generation.tokenizer)
    if chunk.rows is not None:
        _add_rows(part, chunk.rows)
    return part


def _add_rows(part: api_pb2.GenerateResponse, rows: RowBlock) -> None:
    part.rows_position = rows.start
    for tensor, data in ((part.logits, rows.logits), (part.hidden_states, rows.hidden_states)):
        if data:
            tensor.dtype, tensor.data = rows.sizes.dtype, data
            size = len(data) // rows.count // rows.sizes.number_bytes
            tensor.shape.extend((rows.count, size))


def rows_end(part: api_pb2.GenerateResponse) -> int:
    """Return the position behind the last row of a part with rows."""
    shape = part.logits.shape or part.hidden_states.shape
    return part.rows_position + shape[0]


async def add_prompt(
    part: api_pb2.GenerateResponse, generation: Generation, request: api_pb2.GenerateRequest
) -> None:
    """Add to the first part of a stream what the request asks for about the prompt. Other tasks run meanwhile."""
    prompt = generation.prompt
    if request.return_prompt_token_ids:
        part.prompt_token_ids.extend(prompt)
    if request.HasField("prompt_logprobs"):
        count, scores = request.prompt_logprobs, [None, *generation.prompt_logprobs]
        entries = (
            TokenLogprob(token, None, (), 0)
            if score is None
            else TokenLogprob(token, score.logprob, score.top[:count], 0)
            for token, score in zip(prompt, scores, strict=True)
        )
        await _add_logprobs(part.prompt_logprobs, entries, generation.tokenizer)


async def _add_logprobs(
    made: Any, entries: Iterable[TokenLogprob], tokenizer: ModelTokenizer
) -> None:
    """Append the entries to a field of a message. Other tasks run meanwhile."""
    for count, entry in enumerate(entries, 1):
        made.append(_logprob(entry, tokenizer))
        if count % _ENTRIES_AT_ONCE == 0:
            await asyncio.sleep(0)


def usage_of(generations: Sequence[Generation]) -> api_pb2.Usage:
    """Return the usage of all answers to one prompt."""
    prompt = len(generations[0].prompt)
    completion = sum(each.completion_tokens for each in generations)
    return api_pb2.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_tokens=generations[0].cached_tokens,
    )


def _logprob(entry: TokenLogprob, tokenizer: ModelTokenizer) -> api_pb2.TokenLogprob:
    return api_pb2.TokenLogprob(
        token_id=entry.token,
        token=tokenizer.token_bytes(entry.token),
        logprob=entry.logprob,
        top=[
            api_pb2.TopLogprob(
                token_id=top.token, token=tokenizer.token_bytes(top.token), logprob=top.logprob
            )
            for top in entry.top
        ],
        text_offset=entry.offset,
    )


def join_parts(parts: Sequence[api_pb2.GenerateResponse], answers: int) -> api_pb2.GenerateResponse:
    """Return the whole response that the parts of a stream make. There is at least one part."""
    first, last = parts[0], parts[-1]
    made = api_pb2.GenerateResponse(
        id=first.id,
        position=first.position,
        mark=last.mark,
        usage=last.usage,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
    )
    if answers > 1:
        made.choices.extend(
            _choice(index, [part for part in parts if part.index == index])
            for index in range(answers)
        )
        return made
    whole = _choice(0, parts)
    made.text, made.finish_reason = whole.text, whole.finish_reason
    made.token_ids.extend(whole.token_ids)
    made.logprobs.extend(whole.logprobs)
    return made


def _choice(index: int, parts: Sequence[api_pb2.GenerateResponse]) -> api_pb2.Choice:
    made = api_pb2.Choice(index=index, text="".join(part.text for part in parts))
    for part in parts:
        made.token_ids.extend(part.token_ids)
        made.logprobs.extend(part.logprobs)
        made.finish_reason = part.finish_reason
    return made
