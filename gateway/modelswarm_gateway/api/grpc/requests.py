"""Parses the requests of api.proto by the models of the HTTP API: the same fields, ranges and sentences.

Used by the Inference service. The errors have the names of api.proto. Knows no models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelswarm.protocol.messages import BlockRange
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.field_names import rename_field
from modelswarm_gateway.api.http.openai_requests import (
    CompletionRequest,
    parse_body,
    parse_chat,
    parse_completion,
)
from modelswarm_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from modelswarm_gateway.errors import ApiError, invalid_field, invalid_request
from modelswarm_gateway.generation.request import (
    GenerationRequest,
    Prompt,
    RowsPrompt,
    TokenPrompt,
    check_answers,
)
from modelswarm_gateway.generation.rows.returned_rows import RowOptions

_MARK = re.compile("[0-9a-f]{8}")
# Fields of GenerateRequest with the names and the meaning of `POST /v1/completions`.
_SAME_FIELDS = (
    "model",
    "max_tokens",
    "session_id",
    "ignore_eos",
    "append",
    "session_position",
    "logprobs",
    "echo",
    "n",
    "add_special_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "truncation_side",
    "num_beams",
    "use_beam_search",
    "length_penalty",
)
# Fields of a step of a session of blocks, and those that lead to it.
_RANGE_FIELDS = frozenset(
    {
        *("model", "session_id", "append", "session_position", "blocks", "max_tokens"),
        *("hidden_states", "prompt", "tokens", "chat"),  # refused by what they carry
        *("return_hidden_states", "return_logits", "all_positions", "rows_after"),
        *("resume_after", "resume_mark"),
    }
)


def parse_generate_request(request: api_pb2.GenerateRequest) -> GenerationRequest:
    """Return the request. Raise ApiError for a missing field or a value out of range."""
    try:
        return _parse_generate_request(request)
    except ApiError as error:
        raise rename_field(error) from error


def _row_options(request: api_pb2.GenerateRequest) -> RowOptions | None:
    """Return the rows to return; None if there are none. Raise ApiError."""
    if not (request.return_logits or request.return_hidden_states):
        for field in ("all_positions", "rows_after"):
            if field in {each.name for each, _ in request.ListFields()}:
                detail = "it is about rows; set return_logits or return_hidden_states"
                raise invalid_field(field, detail)
        return None
    after = request.rows_after if request.HasField("rows_after") else None
    options = RowOptions(
        request.return_logits, request.return_hidden_states, request.all_positions, after
    )
    for field, is_used in (
        ("n", count_answers(request) > 1),
        ("echo", request.echo),
        ("prompt_logprobs", request.HasField("prompt_logprobs")),
        ("num_beams", request.num_beams > 1),
        ("use_beam_search", request.use_beam_search),
    ):
        if is_used:
            detail = f"an answer with {options.param} cannot have it; leave one of them out"
            raise invalid_field(field, detail)
    return options


def parse_blocks(request: api_pb2.GenerateRequest | api_pb2.OpenSession) -> BlockRange | None:
    """Return the blocks of a session; None: all, on tokens."""
    if not request.HasField("blocks"):
        return None
    return BlockRange(request.blocks.first, request.blocks.last)


def _check_range_fields(request: api_pb2.GenerateRequest) -> None:
    """Raise ApiError for a field without an effect on a session of a range of blocks."""
    if not request.session_id:
        detail = "only a session has blocks; open one with them"
        raise invalid_field("blocks", detail)
    for field, _ in request.ListFields():
        if field.name not in _RANGE_FIELDS:
            detail = "a session of blocks takes and gives rows only; leave it out"
            raise invalid_field(field.name, detail)


def check_unary(request: api_pb2.GenerateRequest) -> None:
    """Raise ApiError for what only a stream can answer."""
    options = _row_options(request)
    if options is not None:
        detail = "rows come in many messages; call GenerateStream or Session"
        raise invalid_field(options.param, detail)


def check_stream(request: api_pb2.GenerateRequest) -> None:
    """Raise ApiError for what only a whole answer can be."""
    for name, is_used in (
        ("num_beams", request.num_beams > 1),
        ("use_beam_search", request.use_beam_search),
    ):
        if is_used:
            detail = "the best answers are known at the end only; call Generate"
            raise invalid_field(name, detail)


def count_answers(request: api_pb2.GenerateRequest) -> int:
    """Return the number of answers to the prompt of a request that was parsed."""
    return request.n if request.HasField("n") else 1


def _parse_generate_request(request: api_pb2.GenerateRequest) -> GenerationRequest:
    if request.HasField("blocks"):
        _check_range_fields(request)
    parsed = parse_completion(_completion_body(request))
    wanted = parsed.to_generation_request()
    check_answers(wanted.options, parsed.answer_count())
    field, prompt = _prompt(request, parsed)
    after = request.resume_after if request.HasField("resume_after") else None
    if after is not None and not request.session_id:
        raise invalid_field("resume_after", "only a named session can be resumed")
    if after is not None and not _MARK.fullmatch(request.resume_mark):
        raise invalid_field(
            "resume_mark", "must be the `mark` of the part that ended at resume_after"
        )
    return replace(
        wanted,
        prompt=prompt,
        prompt_field=field,
        default_max_tokens=None,
        resume_after=after,
        resume_mark=request.resume_mark,
        rows=_row_options(request),
        blocks=parse_blocks(request),
    )


def _completion_body(request: api_pb2.GenerateRequest) -> dict[str, Any]:
    """Return the body of `POST /v1/completions` for the same answer; its prompt stands for all kinds of input."""
    given = {field.name: value for field, value in request.ListFields()}
    body: dict[str, Any] = {name: given[name] for name in _SAME_FIELDS if name in given}
    for field, value in request.sampling.ListFields():
        body[field.name] = _json_value(value)
    if request.early_stopping:
        words = {"true": True, "false": False}
        body["early_stopping"] = words.get(request.early_stopping, request.early_stopping)
    if request.HasField("structured_outputs"):
        body["structured_outputs"] = _structured_outputs(request.structured_outputs)
    return body | {"prompt": request.prompt, "stop": list(request.stop)}


def _structured_outputs(wanted: api_pb2.StructuredOutputs) -> dict[str, Any]:
    """Return vLLM's field of the same name."""
    fields = {field.name: value for field, value in wanted.ListFields()}
    if "choice" in fields:
        fields["choice"] = list(wanted.choice)
    return fields


def _json_value(value: Any) -> Any:
    """Return the value as a client of the HTTP API would write it."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _json_value(part) for key, part in value.items()}
    if isinstance(value, int):
        return value
    return [list(each.ids) if isinstance(each, api_pb2.TokenIds) else each for each in value]


def _prompt(request: api_pb2.GenerateRequest, parsed: CompletionRequest) -> tuple[str, Prompt]:
    kind = request.WhichOneof("input")
    if kind != "prompt" and parsed.add_special_tokens is not None:
        detail = "only a text gets special tokens; leave it out"
        raise invalid_field("add_special_tokens", detail)
    match kind:
        case "prompt":
            return parsed.given_prompt()
        case "tokens":
            return "tokens", TokenPrompt(tuple(request.tokens.ids))
        case "hidden_states":
            for name in ("truncate_prompt_tokens", "truncation_side"):
                if getattr(request, name):
                    raise invalid_request(name, f"{name}: rows are not truncated; leave it out")
            rows = request.hidden_states
            return "hidden_states", RowsPrompt(rows.dtype, tuple(rows.shape), rows.data)
        case "chat":
            body = {"model": parsed.model, "append": parsed.append, **_chat_body(request.chat)}
            return parse_chat(body).given_prompt()
        case _:
            raise invalid_field(
                "input", "one of prompt, chat, tokens and hidden_states is required"
            )


def _chat_body(chat: api_pb2.Messages) -> dict[str, Any]:
    """Return the fields of a chat as the HTTP API has them."""
    body: dict[str, Any] = {"messages": [_message(message) for message in chat.messages]}
    if chat.HasField("add_generation_prompt"):
        body["add_generation_prompt"] = chat.add_generation_prompt
    if chat.continue_final_message:
        body["continue_final_message"] = True
    if chat.chat_template_kwargs:
        body["chat_template_kwargs"] = _json("chat_template_kwargs", chat.chat_template_kwargs)
    if chat.documents:
        body["documents"] = [
            _json(f"documents[{place}]", document) for place, document in enumerate(chat.documents)
        ]
    return body


def _message(message: api_pb2.Message) -> dict[str, Any]:
    given = {field.name: value for field, value in message.ListFields()}
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    return given | ({"tool_calls": calls} if calls else {})


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_request(field, f"{field}: is not JSON: {error}") from error


def parse_tokenize_request(request: api_pb2.TokenizeRequest) -> TokenizeRequest:
    """Return the request of the HTTP API that asks the same. Raise ApiError."""
    body: dict[str, Any] = {"model": request.model} if request.model else {}
    if request.HasField("add_special_tokens"):
        body["add_special_tokens"] = request.add_special_tokens
    body["return_token_strs"] = request.return_token_strs
    try:
        match request.WhichOneof("input"):
            case "prompt":
                body["prompt"] = request.prompt
            case "chat":
                body |= _chat_body(request.chat)
            case _:
                raise invalid_field("input", "one of prompt and chat is required")
        return parse_body(TokenizeRequest, body)
    except ApiError as error:
        raise rename_field(error) from error


def parse_detokenize_request(request: api_pb2.DetokenizeRequest) -> DetokenizeRequest:
    """Return the request of the HTTP API that asks the same. Raise ApiError."""
    body: dict[str, Any] = {"model": request.model} if request.model else {}
    return parse_body(DetokenizeRequest, body | {"tokens": list(request.tokens)})
