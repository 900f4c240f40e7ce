"""The operations of the HTTP API: what each is for, its body, its answer and its errors. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelswarm_gateway.api.fields.request_model import RequestModel
from modelswarm_gateway.api.http.openai_requests import ChatRequest, CompletionRequest
from modelswarm_gateway.api.http.sessions import ForkRequest, SessionRequest
from modelswarm_gateway.api.messages.headers import (
    ANTHROPIC_VERSION,
    BETA,
    HARMLESS_BETAS,
    VERSIONS,
)
from modelswarm_gateway.api.messages.requests import CountTokensRequest, MessagesRequest
from modelswarm_gateway.api.responses.requests import ResponsesBody
from modelswarm_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest
from modelswarm_gateway.errors import Code

# Of every operation: an unknown query parameter, a refused header, a fault of the gateway.
ALWAYS = (Code.INVALID_REQUEST, Code.UNSUPPORTED, Code.UNKNOWN_PARAMETER, Code.INTERNAL)
# Of every operation with a body.
OF_BODIES = (Code.TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE, Code.NO_CAPACITY)
OF_PROMPTS = (*OF_BODIES, Code.MODEL_NOT_FOUND, Code.CONTEXT_LENGTH, Code.NO_SERVERS)
OF_SESSIONS = (Code.SESSION_BUSY, Code.SESSION_ELSEWHERE)
# Of operations that begin no turn, and search for a session that is not kept here.
OF_SEARCHES = (Code.SESSION_ELSEWHERE, Code.NO_CAPACITY, Code.NO_SERVERS, Code.NOT_FOUND)
OF_TURNS = (
    *OF_PROMPTS,
    *OF_SESSIONS,
    Code.SESSION_LOST,
    Code.SESSION_EXPIRED,
    Code.APPEND_UNKNOWN,
    Code.STREAM_REPLACED,
    Code.STREAM_UNREAD,
    Code.STOPPING,
    Code.STREAM_BROKEN,
)


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    answer: str  # name of its schema
    body: type[RequestModel] | None = None
    event: str = ""  # name of the schema of a stream's events; "": no streams
    codes: tuple[Code, ...] = ()  # of its errors, beside those that all have
    names_session: bool = True  # by a header, if it has streams
    other_status: int = 0  # that the same answer may have; 0: none
    error: str = "Error"  # name of the schema of its errors
    headers: Mapping[str, str] = field(default_factory=dict)  # of its own
    anthropic_answer: str = ""  # name of the schema with Anthropic's version header; "": the same


_RESPONSE = "/v1/responses/{response_id}"
_ANTHROPIC_HEADERS = {
    ANTHROPIC_VERSION: f"One of {', '.join(VERSIONS)}.",
    BETA: f"Names of betas, each with any date: {', '.join(HARMLESS_BETAS)}.",
}
_ANTHROPIC_SHAPE = {ANTHROPIC_VERSION: "With it the answer has Anthropic's shape."}
_SESSION = "/v1/sessions/{session_id}"
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a chat", "ChatCompletion", ChatRequest, "ChatCompletionChunk", OF_TURNS
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue texts", "Completion", CompletionRequest, "CompletionEvent", OF_TURNS
    ),
    ("POST", "/v1/responses"): Operation(
        "Make a response",
        "Response",
        ResponsesBody,
        "ResponseEvent",
        (*OF_TURNS, Code.RESPONSE_NOT_FOUND),
        names_session=False,
    ),
    ("GET", _RESPONSE): Operation("Return a stored response", "Response", codes=OF_SEARCHES),
    ("DELETE", _RESPONSE): Operation(
        "Forget a response", "DeletedResponse", codes=(*OF_SEARCHES, Code.SESSION_BUSY)
    ),
    ("GET", f"{_RESPONSE}/input_items"): Operation(
        "List the input of a stored response", "InputItems", codes=OF_SEARCHES
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer Anthropic's messages",
        "Message",
        MessagesRequest,
        "MessageEvent",
        (*OF_PROMPTS, Code.STREAM_UNREAD, Code.STOPPING, Code.STREAM_BROKEN),
        error="MessagesError",
        headers=_ANTHROPIC_HEADERS,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Count the tokens of Anthropic's messages",
        "TokenCount",
        CountTokensRequest,
        codes=OF_PROMPTS,
        error="MessagesError",
        headers=_ANTHROPIC_HEADERS,
    ),
    ("POST", "/tokenize"): Operation(
        "Return the tokens of a prompt", "Tokens", TokenizeRequest, codes=OF_PROMPTS
    ),
    ("POST", "/detokenize"): Operation(
        "Return the text of tokens", "Text", DetokenizeRequest, codes=OF_PROMPTS
    ),
    ("GET", "/v1/models"): Operation(
        "List the models",
        "Models",
        headers=_ANTHROPIC_SHAPE,
        anthropic_answer="AnthropicModels",
    ),
    ("GET", "/v1/models/{name}"): Operation(
        "Return a model",
        "Model",
        codes=(Code.MODEL_NOT_FOUND, Code.NO_SERVERS),
        headers=_ANTHROPIC_SHAPE,
        anthropic_answer="AnthropicModel",
    ),
    ("POST", "/v1/sessions"): Operation(
        "Open a session with its positions reserved",
        "Session",
        SessionRequest,
        codes=(*OF_PROMPTS, *OF_SESSIONS, Code.SESSION_EXISTS, Code.STOPPING),
    ),
    ("POST", f"{_SESSION}/fork"): Operation(
        "Open another session with the log of this one",
        "Session",
        ForkRequest,
        codes=(
            *OF_PROMPTS,
            *OF_SESSIONS,
            Code.NOT_FOUND,
            Code.SESSION_EXISTS,
            Code.SESSION_LOST,
            Code.SESSION_EXPIRED,
            Code.STOPPING,
        ),
    ),
    ("GET", _SESSION): Operation(
        "Return the state of a session",
        "Session",
        codes=(*OF_SEARCHES, Code.SESSION_BUSY, Code.MODEL_NOT_FOUND),
    ),
    ("DELETE", _SESSION): Operation(
        "Close a session and free its KV",
        "ClosedSession",
        codes=(*OF_SEARCHES, Code.SESSION_BUSY, Code.MODEL_NOT_FOUND),
    ),
    ("GET", "/health"): Operation("Tell that the process runs", "Health"),
    ("GET", "/live"): Operation("Tell that the process runs", "Health"),
    ("GET", "/ready"): Operation(
        "Tell whether the gateway accepts requests", "Readiness", other_status=503
    ),
    ("GET", "/version"): Operation("Return versions, and the ports of the gRPC APIs", "Version"),
    ("GET", "/openapi.json"): Operation("Return this document", "Document"),
}
