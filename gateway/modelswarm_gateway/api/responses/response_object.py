"""The response object: the fields of the request as they took effect, and what the generation made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.api.responses.requests import ResponsesRequest
from modelswarm_gateway.api.responses.response_ids import ResponseId


@dataclass(frozen=True, slots=True)
class Usage:
    """Counted tokens of one response."""

    prompt: int
    cached: int  # of the prompt, whose KV the servers still had
    completion: int
    reasoning: int

    def as_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.completion,
        }


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """Makes the object of one response, while it is in progress and when it has ended."""

    id: ResponseId
    request: ResponsesRequest
    sampling: Sampling  # as it took effect

    def in_progress(self) -> dict[str, Any]:
        return self._describe("in_progress", [], None)

    def ended(
        self, output: Sequence[Mapping[str, Any]], usage: Usage, *, is_complete: bool
    ) -> dict[str, Any]:
        made = self._describe("completed" if is_complete else "incomplete", output, usage.as_json())
        if is_complete:
            made["completed_at"] = int(time.time())
        else:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        return made

    def _describe(
        self, status: str, output: Sequence[Mapping[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        body, answer = self.request.body, self.request.answer
        return {
            "id": str(self.id),
            "object": "response",
            "created_at": self.id.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": list(output),
            "parallel_tool_calls": not answer.one_call,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": self.request.effort, "summary": None},
            "service_tier": "default",
            "store": self.request.is_stored,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": usage,
        }
