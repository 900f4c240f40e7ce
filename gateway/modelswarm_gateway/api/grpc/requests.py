"""Parses GenerateRequest of api.proto to a GenerationRequest, with the ranges of the HTTP API.

Used by the Inference service. Knows no models.
"""

from __future__ import annotations

import re

from modelswarm.protocol.sampling import MAX_ALLOWED_TOKENS, MAX_LOGIT_BIAS
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.errors import invalid_request
from modelswarm_gateway.generation.request import (
    MAX_SESSION_ID_LENGTH,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_append,
)
from modelswarm_gateway.generation.sampling_ranges import (
    LIST_WORDS,
    MAX_BAD_STRINGS,
    MAX_BAD_WORD_LENGTH,
    MAX_BIAS,
    MAX_STOP_TOKENS,
    RANGES,
)
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

ROLES = ("developer", "system", "user", "assistant", "tool")
_MARK = re.compile("[0-9a-f]{8}")


def parse_generate_request(request: api_pb2.GenerateRequest) -> GenerationRequest:
    """Return the request. Raise ApiError for a missing field or a value out of range."""
    if not request.model:
        raise invalid_request("model", "model: this field is required")
    field, prompt = _prompt(request)
    stops = tuple(request.stop)
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise invalid_request(
            "stop",
            f"stop: must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters",
        )
    if len(request.session_id) > MAX_SESSION_ID_LENGTH:
        raise invalid_request(
            "session_id", f"session_id: at most {MAX_SESSION_ID_LENGTH} characters"
        )
    after = request.resume_after if request.HasField("resume_after") else None
    if after is not None and not request.session_id:
        raise invalid_request("resume_after", "resume_after: only a named session can be resumed")
    if after is not None and not _MARK.fullmatch(request.resume_mark):
        raise invalid_request(
            "resume_mark", "resume_mark: must be the `mark` of the part that ended at resume_after"
        )
    session = request.session_id or None
    position = request.session_position if request.HasField("session_position") else None
    check_append(session, request.append, position)
    return GenerationRequest(
        request.model, prompt, field, _options(request), stops, session,
        resume_after=after, resume_mark=request.resume_mark, append=request.append, position=position,
    )  # fmt: skip


def _prompt(request: api_pb2.GenerateRequest) -> tuple[str, Prompt]:
    match request.WhichOneof("input"):
        case "prompt":
            return "prompt", TextPrompt(request.prompt)
        case "tokens":
            return "tokens", TokenPrompt(tuple(request.tokens.ids))
        case "chat":
            return "chat", ChatPrompt(_messages(request.chat))
        case _:
            raise invalid_request("input", "input: one of prompt, chat and tokens is required")


def _messages(chat: api_pb2.Messages) -> list[dict[str, str]]:
    made = []
    for place, message in enumerate(chat.messages):
        if message.role not in ROLES:
            field = f"chat.messages[{place}].role"
            raise invalid_request(field, f"{field}: must be one of {', '.join(ROLES)}")
        if not message.HasField("content"):
            field = f"chat.messages[{place}].content"
            raise invalid_request(field, f"{field}: this field is required")
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": message.content}
        made.append({**entry, "name": message.name} if message.name else entry)
    if not made:
        raise invalid_request("chat.messages", "chat.messages: at least one message is needed")
    return made


def _options(request: api_pb2.GenerateRequest) -> SamplingOptions:
    given = request.sampling
    numbers = {field.name: value for field, value in given.ListFields() if field.name in RANGES}
    for name, value in numbers.items():
        if value not in RANGES[name]:
            field = f"sampling.{name}"
            raise invalid_request(field, f"{field}: must be {RANGES[name].words}, not {value:g}")
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    _check_lists(given)
    return SamplingOptions(
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        bad_words=tuple(given.bad_words),
        stop_token_ids=tuple(given.stop_token_ids),
        allowed_token_ids=tuple(given.allowed_token_ids),
        **numbers,
    )


def _check_lists(given: api_pb2.Sampling) -> None:
    biases, words = given.logit_bias, given.bad_words
    valid = {
        "logit_bias": len(biases) <= MAX_LOGIT_BIAS
        and all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases.values()),
        "bad_words": len(words) <= MAX_BAD_STRINGS
        and all(1 <= len(word) <= MAX_BAD_WORD_LENGTH for word in words),
        "stop_token_ids": len(given.stop_token_ids) <= MAX_STOP_TOKENS,
        "allowed_token_ids": len(given.allowed_token_ids) <= MAX_ALLOWED_TOKENS,
    }
    for name, is_valid in valid.items():
        if not is_valid:
            field = f"sampling.{name}"
            raise invalid_request(field, f"{field}: must be {LIST_WORDS[name]}")
