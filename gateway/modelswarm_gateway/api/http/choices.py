"""The answers to one prompt (`n` above 1), read side by side and written with their indexes.

Used by `generation_response.py`. Nothing is written before every answer has begun, so a family is refused as a whole
(R12, admission). Knows generations by what they give, and neither HTTP nor sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from modelswarm_gateway.api.http.response_writer import ResponseWriter
from modelswarm_gateway.api.merged_chunks import merge_chunks
from modelswarm_gateway.generation.generation import Generation
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.output.turn_output import OutputChunk
from modelswarm_gateway.generation.resumption import format_event_id
from modelswarm_gateway.generation.tool_calls.events import OutputEvent, TextDelta

NO_TEXT = (TextDelta(""),)


@dataclass(slots=True)
class _Answer:
    """The output of one choice, for a response that is not streamed."""

    output: list[OutputEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""


class AnswerBuilder(Protocol):
    """Writes one answer, whole or as the events of a stream."""

    def opening(self) -> bytes:
        """Return the event before the first text; may be empty."""
        ...

    def output_event(
        self,
        output: Sequence[OutputEvent],
        tokens: Sequence[int],
        event_id: str,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        """Return the event of some output. `event_id`: the last log position that it covers (R17, sampling).

        It is empty in a stream that cannot be resumed.
        """
        ...

    def finish_event(self, finish: str) -> bytes:
        """Return the event with the finish reason of this answer."""
        ...

    def end_events(self, completion: int) -> bytes:
        """Return the end of the stream."""
        ...

    def choice(
        self,
        output: Sequence[OutputEvent],
        tokens: Sequence[int],
        finish: str,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        """Return the whole answer, for a response that is not streamed."""
        ...

    def body(self, choices: Sequence[dict[str, Any]], completion: int) -> dict[str, Any]:
        """Return the whole response. `completion`: tokens of all choices."""
        ...


class PendingOutput:
    """Tokens and log probabilities of an answer, from those that have shown nothing yet."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def format_chunk(self, builder: AnswerBuilder, chunk: OutputChunk) -> bytes:
        """Return the event; empty for a chunk that shows nothing yet, unless it is the last one."""
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        output = chunk.output
        if not output and (chunk.finish is None or not self._tokens):
            return b""
        # Load generators, as those of vLLM and SGLang, read no event that begins with an id.
        event_id = format_event_id(chunk.end - 1, chunk.mark) if chunk.mark else ""
        # Without output the delta has an empty text, as clients expect of an event with tokens.
        event = builder.output_event(output or NO_TEXT, self._tokens, event_id, self._logprobs)
        self._tokens, self._logprobs = [], []
        return event


class Choices:
    def __init__(
        self,
        generations: Sequence[Generation],
        builders: Sequence[AnswerBuilder],
        clock: Callable[[], float],
    ) -> None:
        self._generations, self._builders, self._clock = generations, builders, clock

    async def send_body(self, writer: ResponseWriter, keepalive: float) -> None:
        answers = [_Answer() for _ in self._generations]
        async with aclosing(merge_chunks(self._generations, keepalive)) as chunks:
            async for each in chunks:
                if each is None:
                    continue
                index, chunk = each
                answer = answers[index]
                answer.output += chunk.output
                answer.tokens += chunk.tokens
                answer.logprobs += chunk.logprobs
                answer.finish = chunk.finish or ""
                self._generations[index].acknowledge(chunk)
        choices = [
            builder.choice(each.output, each.tokens, each.finish, each.logprobs)
            for builder, each in zip(self._builders, answers, strict=True)
        ]
        body = self._builders[0].body(choices, sum(len(each.tokens) for each in answers))
        await writer.write_json(body)

    async def send_stream(self, writer: ResponseWriter, keepalive: float) -> None:
        pending = [PendingOutput() for _ in self._generations]
        is_open, last_sent_at = False, self._clock()
        async with aclosing(merge_chunks(self._generations, keepalive)) as chunks:
            async for each in chunks:
                await writer.start_stream()
                if not is_open:
                    opening = b"".join(builder.opening() for builder in self._builders)
                    await writer.write(opening)
                    is_open = True
                if each is None:
                    await writer.write_keepalive(self._hold_reason())
                    last_sent_at = self._clock()
                    continue
                index, chunk = each
                event = pending[index].format_chunk(self._builders[index], chunk)
                if chunk.finish is not None:
                    event += self._builders[index].finish_event(chunk.finish)
                if event:
                    await writer.write(event)
                    last_sent_at = self._clock()
                elif self._clock() - last_sent_at >= keepalive:  # the chunks show nothing
                    await writer.write_keepalive(self._hold_reason())
                    last_sent_at = self._clock()
                self._generations[index].acknowledge(chunk)
        completion = sum(each.completion_tokens for each in self._generations)
        await writer.write(self._builders[0].end_events(completion), more=False)

    def _hold_reason(self) -> str:
        reasons = [each.hold_reason for each in self._generations]
        return next((reason for reason in reasons if reason), "")
