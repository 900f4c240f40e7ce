"""Client of the gateway's OpenAI-compatible HTTP API: streamed completions, chunk by chunk.

Used by `chat` and `generate`. Knows OpenAI's wire format; keeps no transcript.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx

from modelswarm.errors import ModelSwarmError, UnavailableError, UserError

CONNECT_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 600.0  # a held session sends comments; a longer silence: a dead gateway
END_OF_STREAM = "[DONE]"


class OpenAIClientError(ModelSwarmError):
    """The gateway could not be reached, or a stream could not be finished."""


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """The content of one server-sent event. Only the last event of a stream has `usage`."""

    text: str
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None


class OpenAIClient:
    def __init__(self, base: str) -> None:
        self._base = base
        timeout = httpx.Timeout(READ_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS)
        self._http = httpx.Client(base_url=base, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def first_model(self) -> str:
        """Return the name of the first model the gateway serves. UnavailableError if there is none."""
        with self._translated_errors():
            answer = self._http.get("/v1/models")
        _raise_for_status(answer)
        models = answer.json()["data"]
        if not models:
            raise UnavailableError(f"the gateway at {self._base} serves no model yet")
        return str(models[0]["id"])

    def stream_chat(
        self, model: str, messages: list[dict[str, str]], **fields: Any
    ) -> Iterator[CompletionChunk]:
        """Stream one chat turn. `fields` are further request fields; those that are None are left out."""
        return self._stream(
            "/v1/chat/completions", {"model": model, "messages": messages, **fields}
        )

    def stream_completion(
        self, model: str, prompt: str, **fields: Any
    ) -> Iterator[CompletionChunk]:
        """Stream the continuation of `prompt`; `fields` as in `stream_chat`."""
        return self._stream("/v1/completions", {"model": model, "prompt": prompt, **fields})

    def _stream(self, path: str, fields: Mapping[str, Any]) -> Iterator[CompletionChunk]:
        body = {name: value for name, value in fields.items() if value is not None}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._translated_errors(), self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                answer.read()
                _raise_for_status(answer)
            yield from _parse_chunks(answer.iter_lines())

    def _translated_errors(self) -> AbstractContextManager[None]:
        return _translate_errors(self._base)


@contextmanager
def _translate_errors(base: str) -> Iterator[None]:
    """Raise OpenAIClientError in place of httpx's transport errors."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise OpenAIClientError(f"no gateway answers at {base}") from error
    except httpx.TransportError as error:
        raise OpenAIClientError(f"the connection to the gateway at {base} broke") from error


def _parse_chunks(lines: Iterator[str]) -> Iterator[CompletionChunk]:
    """Yield the events until `[DONE]`. Comment lines, which only keep the connection open, are skipped."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == END_OF_STREAM:
            return
        event = json.loads(payload)
        if "error" in event:
            raise OpenAIClientError(f"the stream ended early: {event['error']['message']}")
        yield _parse_chunk(event)
    raise OpenAIClientError("the stream ended before [DONE]")


def _parse_chunk(event: Mapping[str, Any]) -> CompletionChunk:
    choices = event.get("choices") or [{}]
    choice = choices[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return CompletionChunk(text, choice.get("finish_reason"), event.get("usage"))


def _raise_for_status(answer: httpx.Response) -> None:
    """Raise the error that an answer other than 200 describes."""
    if answer.status_code == httpx.codes.OK:
        return
    try:
        error = answer.json()["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = f"the gateway answered {answer.status_code}", None
    if answer.status_code in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        raise UnavailableError(message, float(answer.headers.get("retry-after", "1")))
    if answer.is_client_error:
        raise UserError(str(field or "request"), message.removeprefix(f"{field}: "))
    raise OpenAIClientError(message)
