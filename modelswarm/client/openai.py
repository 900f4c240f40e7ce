"""Client of the gateway's OpenAI-compatible HTTP API: streamed completions, chunk by chunk.

Used by `chat` and `generate`. Knows OpenAI's wire format; keeps no transcript.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx

from modelswarm.errors import ModelSwarmError, UnavailableError, UnreachableError, UserError

CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 600.0  # a held session sends comments; a longer silence: a dead gateway
CLOSE_TIMEOUT_SECONDS = 5.0  # for the answer to the close of a session
END_OF_STREAM = "[DONE]"
# Codes of errors that end a stream, but not its turn: another request may continue it.
RESUMABLE_CODES = ("gateway_stopping", "session_elsewhere")
CONTEXT_LENGTH_CODE = "context_length_exceeded"
_RETRYABLE_STATUSES = (
    httpx.codes.CONFLICT,  # the session still answers its last request
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.SERVICE_UNAVAILABLE,
)


class OpenAIClientError(ModelSwarmError):
    """The gateway could not be reached, or a stream could not be finished."""


class ConnectionBrokenError(OpenAIClientError):
    """The connection could not be made, or broke off. A stream with a session may be resumed."""


class GatewayUnreachableError(ConnectionBrokenError, UnreachableError):
    """As its base, with the address: a port of another kind may be the cause."""


class NotAGatewayError(OpenAIClientError, UnreachableError):
    """Something else than a gateway answers at the address."""


class ContextFullError(UserError):
    """The prompt does not fit into the model's context."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """The content of one server-sent event. Only the last event of a stream has `usage`."""

    text: str
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None
    event_id: str | None = None  # a broken stream of a session is resumed behind it


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the gateway serves."""

    name: str
    max_length: int | None  # positions of a context; None: not known yet


class OpenAIClient:
    def __init__(self, base: str) -> None:
        self._base = base
        timeout = httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
        self._http = httpx.Client(base_url=base, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def fetch_models(self) -> list[ServedModel]:
        """Return the models that the gateway serves. UnavailableError if there is none."""
        with self._translated_errors():
            answer = self._http.get("/v1/models")
        _raise_for_status(answer, self._base)
        try:
            models = answer.json()["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise _not_a_gateway(answer, self._base) from error
        if not models:
            raise UnavailableError(f"the gateway at {self._base} serves no model yet")
        return [ServedModel(str(each["id"]), each.get("max_model_len")) for each in models]

    def choose_model(self, name: str | None) -> ServedModel:
        """Return the model of that name, by default the first one. UserError names those that are served."""
        models = self.fetch_models()
        for model in models:
            if name in (None, model.name):
                return model
        known = ", ".join(model.name for model in models)
        raise UserError("--model", f"{name!r} is not served here; known are: {known}")

    def end_session(self, model: str, session_id: str) -> bool:
        """Close a named session, which frees its KV; False if no gateway holds it."""
        with self._translated_errors():
            answer = self._http.delete(
                f"/v1/sessions/{quote(session_id, safe='')}",
                params={"model": model},
                timeout=CLOSE_TIMEOUT_SECONDS,
            )
        if answer.status_code == httpx.codes.NOT_FOUND:
            return False
        _raise_for_status(answer, self._base)
        return True

    def stream_chat(
        self,
        model: str,
        messages: list[dict[str, str]],
        *,
        last_event_id: str | None = None,
        **fields: Any,
    ) -> Iterator[CompletionChunk]:
        """Stream one chat turn. `fields` are further request fields; those that are None are left out.

        `last_event_id` resumes a turn of a named session behind that event; everything else must be as before.
        """
        return self._stream(
            "/v1/chat/completions", {"model": model, "messages": messages, **fields}, last_event_id
        )

    def stream_completion(
        self, model: str, prompt: str, **fields: Any
    ) -> Iterator[CompletionChunk]:
        """Stream the continuation of `prompt`; `fields` as in `stream_chat`."""
        return self._stream("/v1/completions", {"model": model, "prompt": prompt, **fields})

    def _stream(
        self, path: str, fields: Mapping[str, Any], last_event_id: str | None = None
    ) -> Iterator[CompletionChunk]:
        body = {name: value for name, value in fields.items() if value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        with (
            self._translated_errors(),
            self._http.stream("POST", path, json=body, headers=headers) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                answer.read()
                _raise_for_status(answer, self._base)
            yield from _parse_chunks(answer.iter_lines())

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise OpenAIClientError in place of httpx's transport errors."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            message = f"no gateway answers at {self._base}"
            raise GatewayUnreachableError(message, self._base, "HTTP") from error
        except httpx.TransportError as error:
            message = f"the connection to the gateway at {self._base} broke"
            raise GatewayUnreachableError(message, self._base, "HTTP") from error


def _parse_chunks(lines: Iterator[str]) -> Iterator[CompletionChunk]:
    """Yield the events until `[DONE]`. Comment lines, which only keep the connection open, are skipped.

    An event counts once its blank line has come: an event that broke off is sent again when the stream is resumed.
    """
    payload, event_id = "", None
    for line in lines:
        if line.startswith("data:"):
            payload = line.removeprefix("data:").strip()
            if payload == END_OF_STREAM:
                return
        elif line.startswith("id:"):
            event_id = line.removeprefix("id:").strip()
        elif not line and payload:
            yield _parse_chunk(json.loads(payload), event_id)
            payload, event_id = "", None
    raise ConnectionBrokenError("the stream ended before [DONE]")


def _parse_chunk(event: Mapping[str, Any], event_id: str | None) -> CompletionChunk:
    if "error" in event:
        kind = (
            ConnectionBrokenError
            if event["error"].get("code") in RESUMABLE_CODES
            else OpenAIClientError
        )
        raise kind(f"the stream ended early: {event['error']['message']}")
    choices = event.get("choices") or [{}]
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return CompletionChunk(text, choice.get("finish_reason"), event.get("usage"), event_id)


def _raise_for_status(answer: httpx.Response, base: str) -> None:
    """Raise the error that an answer other than 200 describes."""
    if answer.status_code == httpx.codes.OK:
        return
    try:
        error = answer.json()["error"]
        message, field, code = str(error["message"]), error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _not_a_gateway(answer, base) from None
    if answer.status_code in _RETRYABLE_STATUSES:
        raise UnavailableError(message, float(answer.headers.get("retry-after", "1")))
    if answer.is_client_error:
        kind = ContextFullError if code == CONTEXT_LENGTH_CODE else UserError
        raise kind(str(field or "request"), message.removeprefix(f"{field}: "))
    raise OpenAIClientError(message)


def _not_a_gateway(answer: httpx.Response, base: str) -> NotAGatewayError:
    message = f"{base} answers {answer.status_code}, but not as a gateway does"
    return NotAGatewayError(message, base, "HTTP")
