"""Runs one generation as a message of Anthropic's: the errors and keepalives differ from those of OpenAI's routes."""

from __future__ import annotations

from starlette.responses import Response

from modelswarm_gateway.api.http.choices import AnswerBuilder
from modelswarm_gateway.api.http.generation_response import GenerationResponse
from modelswarm_gateway.api.http.openai_responses import keepalive_comment
from modelswarm_gateway.api.messages.errors import messages_error_event, messages_error_response
from modelswarm_gateway.api.messages.response import PING, MessageBuilder
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.generation import Generation


class MessagesResponse(GenerationResponse):
    """The response to one request for a message, which has one answer and no session."""

    def _make_builder(self, generation: Generation) -> AnswerBuilder:
        most = self._request.options.max_tokens
        assert most is not None  # the field is required
        return MessageBuilder(self._head([generation]), generation, most)

    def _error_event(self, failure: ApiError) -> bytes:
        return messages_error_event(failure)

    def _error_response(self, failure: ApiError) -> Response:
        return messages_error_response(failure)

    def _format_keepalive(self, reason: str) -> bytes:
        return keepalive_comment(reason) + PING
