"""`POST /tokenize` and `POST /detokenize`, with vLLM's fields: what a prompt is for the model, without running it.

Added to the HTTP API by `app.py`; the gRPC API calls the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.responses import JSONResponse

from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.fields.tokenization import DETOKENIZE, TOKENIZE
from modelswarm_gateway.api.http.json_body import BodyBudget, read_json
from modelswarm_gateway.api.http.openai_requests import ListOf, TokenId, parse_body, parse_chat
from modelswarm_gateway.api.http.request_log import set_model
from modelswarm_gateway.errors import invalid_field
from modelswarm_gateway.generation.request import (
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
    encode_prompt,
    fit_to_model,
)
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import longest_text

# Fields that `parse_chat` reads.
_CHAT_FIELDS = (
    "model",
    "messages",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "tools",
)


class TokenizeRequest(RequestModel):
    table = TOKENIZE
    model: str = Field(min_length=1)
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def to_generation_request(self) -> GenerationRequest:
        """Return a request with this prompt. Raise ApiError."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid_field("prompt", "give one of prompt and messages")
        if self.prompt is not None:
            if self.tools:
                raise invalid_field("tools", "a text has none; send messages")
            prompt = TextPrompt(self.prompt, self.add_special_tokens is not False)
            return GenerationRequest(self.model, prompt, "prompt", SamplingOptions())
        if self.add_special_tokens:
            detail = "the chat template writes the special tokens of a chat; leave it out"
            raise invalid_field("add_special_tokens", detail)
        return parse_chat(
            {name: getattr(self, name) for name in _CHAT_FIELDS}
        ).to_generation_request()


class DetokenizeRequest(RequestModel):
    table = DETOKENIZE
    model: str = Field(min_length=1)
    tokens: ListOf[TokenId]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The token ids of a prompt."""

    tokens: tuple[int, ...]
    max_length: int  # positions of the model's context; 0: unknown
    names: list[str] | None  # of the tokens, if they were asked for


async def tokenize_prompt(service: GenerationService, asked: TokenizeRequest) -> TokenizedPrompt:
    """Return what the prompt is for its model, without running it. Raise ApiError."""
    wanted = asked.to_generation_request()
    card, tokenizer = await service.wait_for_model(asked.model)
    wanted, _ = fit_to_model(wanted, tokenizer, service.settings.tool_call_parser)
    limit = longest_text(card.max_length)
    tokens = await encode_prompt(wanted, tokenizer, limit, can_be_empty=True)
    names = tokenizer.token_names(tokens) if asked.return_token_strs else None
    return TokenizedPrompt(tokens, card.max_length, names)


async def detokenize(service: GenerationService, asked: DetokenizeRequest) -> str:
    """Return the text of token ids. Raise ApiError."""
    card, tokenizer = await service.wait_for_model(asked.model)
    prompt = TokenPrompt(tuple(asked.tokens))
    wanted = GenerationRequest(asked.model, prompt, "tokens", SamplingOptions())
    limit = longest_text(card.max_length)  # a body has room for eight million
    tokens = await encode_prompt(wanted, tokenizer, limit, can_be_empty=True)  # checks the ids
    return tokenizer.decode_all(tokens)


def add_tokenization_routes(app: FastAPI, service: GenerationService) -> None:
    budget = BodyBudget()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = parse_body(TokenizeRequest, await read_json(request, budget))
        set_model(request.scope, asked.model)
        found = await tokenize_prompt(service, asked)
        return JSONResponse(
            {
                "count": len(found.tokens),
                "max_model_len": found.max_length or None,
                "tokens": list(found.tokens),
                "token_strs": found.names,
            }
        )

    @app.post("/detokenize")
    async def text_of_tokens(request: Request) -> Response:
        asked = parse_body(DetokenizeRequest, await read_json(request, budget))
        set_model(request.scope, asked.model)
        return JSONResponse({"prompt": await detokenize(service, asked)})
