"""Chunks of a stream, collected into the choice that the whole answer has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelswarm.client.api.answers import (
    Choice,
    Chunk,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    Usage,
)


@dataclass(slots=True)
class _GrowingCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def extend_by(self, part: ToolCallPart) -> None:
        self.id = part.id or self.id
        self.name = part.name or self.name
        self.arguments.append(part.arguments)

    def whole(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.arguments))


class Collector:
    """Collects one answer. `fields` are those of the request: they decide what the choice has."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._wants_ids = bool(fields.get("return_token_ids"))
        logprobs = fields.get("logprobs")
        self._wants_logprobs = logprobs is not None and logprobs is not False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: dict[int, _GrowingCall] = {}
        self._prompt: tuple[int, ...] | None = None
        self._finish_reason = ""
        self.usage: Usage | None = None

    def collect(self, chunk: Chunk) -> None:
        self._text.append(chunk.text)
        self._reasoning.append(chunk.reasoning_content)
        self._tokens += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self.usage = chunk.usage or self.usage
        if chunk.prompt_token_ids is not None:
            self._prompt = chunk.prompt_token_ids
        for part in chunk.tool_calls:
            self._calls.setdefault(part.index, _GrowingCall()).extend_by(part)

    def collected(self) -> Choice:
        return Choice(
            0,
            "".join(self._text),
            self._finish_reason,
            tuple(self._tokens) if self._wants_ids else None,
            tuple(self._logprobs) if self._wants_logprobs else None,
            "".join(self._reasoning) or None,
            tuple(self._calls[index].whole() for index in sorted(self._calls)),
            self._prompt,
        )
