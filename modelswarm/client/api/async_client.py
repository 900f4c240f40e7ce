"""The asynchronous client of the gateway's OpenAI-compatible HTTP API.

Answers survive the loss of servers and gateways: `turns.py` resumes them. Knows neither servers nor routes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar, Unpack
from urllib.parse import quote

from modelswarm.client.api.answers import (
    ChatCompletion,
    Choice,
    Chunk,
    Completion,
    ServedModel,
    SessionState,
    TokenizedPrompt,
    Usage,
)
from modelswarm.client.api.checks import (
    check_api_key,
    check_callback,
    check_count,
    check_fields,
    check_limits,
    check_messages,
    check_prompt,
    check_session_name,
    check_tokens,
    check_urls,
)
from modelswarm.client.api.collecting import Collector
from modelswarm.client.api.connection import Connections, Limits
from modelswarm.client.api.errors import (
    ApiError,
    ConflictError,
    ConnectionBrokenError,
    NotFoundError,
    ServiceUnavailableError,
    bad_request,
)
from modelswarm.client.api.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    TOKENIZE_FIELDS,
    ChatFields,
    CompletionFields,
    TokenizeFields,
)
from modelswarm.client.api.parsing import parse_body, parse_models, parse_session, parse_tokens
from modelswarm.client.api.retries import OnBreak, Retries
from modelswarm.client.api.turns import Turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_CONNECTIONS = 256
READ_SECONDS = 10.0  # of silence, for facts that a gateway has at hand: its models, a session
DELETE_SECONDS = 10.0  # of silence, for the answer to the close of a session
CLOSING_SECONDS = 5.0  # for the sessions of turns, when the client is closed
LEFT_SECONDS = 0.5  # for streams that were left to end, likewise
BUSY_RETRIES = (
    6  # of the close of a turn's session: its gateway may not know yet that its client left
)
Parsed = TypeVar("Parsed")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_log = logging.getLogger(__name__)


class AsyncClient:
    """Client of one swarm, for one event loop. Use it by `async with`, or call `aclose`.

    `base_url`: URL of a gateway, or a list of URLs of gateways of one swarm. An answer goes on at another one when its
    gateway is lost. Default: MODELSWARM_URL (with commas between), else http://127.0.0.1:8000.
    `api_key` is sent as a bearer token, for a proxy that needs one.
    `timeout`: seconds without a byte until an answer counts as broken.
    `max_retries`: further tries of a request that was refused or had no connection, where a repeat does no harm.
    `max_connections`: requests at a time; further ones wait.
    `on_break` is called with the error when an answer breaks off, before the first try to resume it.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 2,
        max_connections: int = MAX_CONNECTIONS,
        on_break: OnBreak | None = None,
    ) -> None:
        check_limits(timeout, max_retries, max_connections)
        check_api_key(api_key)
        check_callback("on_break", on_break)
        limits = Limits(timeout, max_connections)
        self._connections = Connections(check_urls(base_url), api_key, limits)
        self._max_retries = max_retries
        self._on_break = on_break
        self._closing: set[asyncio.Task[None]] = set()
        self._n_streams = 0
        self._stream_ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections. Calls that run end with an error."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEFT_SECONDS):
                # asyncio ends an iterator that was left soon, but not at once
                while self._n_streams:
                    self._stream_ended.clear()
                    await self._stream_ended.wait()
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSING_SECONDS)
        for task in self._closing:
            task.cancel()
        await self._connections.close()

    # ---- models and tokens

    async def models(self) -> list[ServedModel]:
        """Return the models that the gateway serves, and their adapters; none yet is an empty list.

        GatewayUnreachableError: no gateway answers. NotAGatewayError: something else does.
        """
        return await self._call("GET", "/v1/models", parse_models)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[TokenizeFields],
    ) -> TokenizedPrompt:
        """Return the tokens of a text, or of the messages of a chat, as a request would have them.

        `prompt`: a text, or a list of messages with `role` and `content`, which the chat template writes.
        `model`: a served name; by default the first one. `fields`: those of `TokenizeFields`.
        `max_length` of the answer are the positions of the model's context, in tokens.

        BadRequestError names a wrong field. NotFoundError: the model is not served.
        """
        body = check_fields(fields, TOKENIZE_FIELDS, "tokenize")
        if isinstance(prompt, str):
            body["prompt"] = prompt
        else:
            body["messages"] = check_messages(prompt)
        return await self._call("POST", "/tokenize", parse_tokens, await self._named(body, model))

    async def detokenize(self, token_ids: Iterable[int], *, model: str | None = None) -> str:
        """Return the text of token ids, special tokens included. BadRequestError for an id of no token."""
        body = await self._named({"tokens": check_tokens("token_ids", token_ids)}, model)
        return await self._call("POST", "/detokenize", lambda made: str(made["prompt"]), body)

    # ---- answers

    async def complete(
        self, prompt: Prompt, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> Completion:
        """Return the continuation of a text, or of token ids. It survives the loss of its gateway.

        `prompt`: a text, or a sequence of token ids. `model`: a served name; by default the first one.
        `fields`: those of `CompletionFields`, such as `max_tokens` (16), `temperature`, `stop`, `logprobs`, `n`.
        The answer has `text`, `finish_reason` (stop or length) and `usage` in tokens, of the first choice.

        BadRequestError names a wrong field, and ContextLengthError is one. NotFoundError: no such model.
        RateLimitError and ServiceUnavailableError: no room or no server, after `max_retries` further tries.
        ConnectionBrokenError: the answer could not be resumed.
        """
        body = _completion_body(prompt, fields, "complete")
        return Completion(*await self._whole(COMPLETIONS, body, model))

    def stream_complete(
        self, prompt: Prompt, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of a text, or of token ids. A lost gateway changes nothing about its chunks' text.

        Each chunk has what is new. One has the `finish_reason`, and the last one has the `usage`, without text.
        An iterator that is left early ends the answer. Arguments and errors: see `complete`. Wrong arguments raise at
        once, the other errors where the stream is read, also in its middle.
        """
        return self._stream(COMPLETIONS, _completion_body(prompt, fields, "stream_complete"), model)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion:
        """Return the answer to the messages of a chat. It survives the loss of its gateway.

        `messages`: a list of mappings with `role` (system, user, assistant, tool) and `content`, as in OpenAI's API.
        `fields`: those of `ChatFields`, such as `max_tokens` (up to the end of the context), `tools`, `temperature`.
        The answer has `text`, `reasoning_content` and `tool_calls`, whose `arguments` are JSON text. Its
        `finish_reason` is stop, length or tool_calls.

        Model and errors: see `complete`. BadRequestError: also for a model that cannot chat.
        """
        body = _chat_body(messages, fields, "chat")
        return ChatCompletion(*await self._whole(CHAT, body, model))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the answer to the messages of a chat. A lost gateway changes nothing about its chunks' text.

        A chunk has new `text` or `reasoning_content`, or parts of `tool_calls`. The first part of a call has its id
        and name, and each part a piece of its arguments. Arguments: see `chat`; ends and errors: `stream_complete`.
        """
        return self._stream(CHAT, _chat_body(messages, fields, "stream_chat"), model)

    # ---- sessions

    async def open_session(
        self,
        max_length: int,
        *,
        session_id: str | None = None,
        ttl: int | None = None,
        model: str | None = None,
    ) -> SessionState:
        """Open a session with room for `max_length` positions. RateLimitError if there is no room.

        `ttl`: seconds that it is kept without a turn. `session_id`: its name; by default a random one.
        """
        body: dict[str, Any] = {"max_length": check_count("max_length", max_length, 2)}
        if ttl is not None:
            body["ttl"] = check_count("ttl", ttl, 1)
        name = _new_name(session_id)
        body = await self._named(body | {"session_id": name}, model)
        return await self._create("/v1/sessions", body, name, body["model"], {})

    async def session_state(self, session_id: str, *, model: str | None = None) -> SessionState:
        """Return a session's state, with its position in tokens. NotFoundError if no running gateway has it."""
        path, params = _session_path(session_id), await self._query(model)
        return await self._call("GET", path, parse_session, params=params)

    async def close_session(self, session_id: str, *, model: str | None = None) -> bool:
        """Close a session, which frees its KV at once; False if no running gateway has it.

        ConflictError: it is answering.
        """
        path, params = _session_path(session_id), await self._query(model)
        try:
            return await self._delete(path, params, self._max_retries)
        except NotFoundError:
            return False

    async def fork_session(
        self,
        session_id: str,
        *,
        new_session_id: str | None = None,
        position: int | None = None,
        model: str | None = None,
    ) -> SessionState:
        """Open a session with the log of another one, or its first `position` entries. The servers copy the KV.

        NotFoundError: no running gateway has it. ConflictError: the new name is in use. RateLimitError: no room.
        """
        name = _new_name(new_session_id)
        body: dict[str, Any] = {"session_id": name}
        if position is not None:
            body["position"] = check_count("position", position, 1)
        path, params = f"{_session_path(session_id)}/fork", await self._query(model)
        return await self._create(path, body, name, params["model"], params)

    # ---- inside

    async def _delete(self, path: str, params: Mapping[str, str], max_retries: int) -> bool:
        """Close a session. One that is gone after a lost connection counts as closed by this call's earlier try."""
        retries = Retries(max_retries)
        broke = False
        while True:
            try:
                made, _ = await self._connections.call(
                    "DELETE", path, _parse_deleted, params=params, silence=DELETE_SECONDS
                )
                return made
            except ApiError as error:
                if broke and isinstance(error, NotFoundError):
                    return True
                failure = error
                broke = broke or type(error) is ConnectionBrokenError  # it may have been sent
            await retries.before_retry(failure, is_repeatable=True)

    async def _create(
        self, path: str, body: Mapping[str, Any], name: str, model: str, params: Mapping[str, str]
    ) -> SessionState:
        """Create a session. A name that exists after a lost connection counts as created by this call's earlier try."""
        retries = Retries(self._max_retries)
        broke = False
        while True:
            try:
                made, _ = await self._connections.call("POST", path, parse_session, body, params)
                return made
            except ConflictError as error:
                if broke and error.code == "session_exists":
                    return await self.session_state(name, model=model)
                failure: ApiError = error
            except ApiError as error:
                failure = error
                broke = broke or error.status is None
            await retries.before_retry(failure, is_repeatable=True)

    async def _call(
        self,
        method: str,
        path: str,
        parse: Callable[[Any], Parsed],
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Parsed:
        made, _ = await self._call_with_id(method, path, parse, body, params)
        return made

    async def _call_with_id(
        self,
        method: str,
        path: str,
        parse: Callable[[Any], Parsed],
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> tuple[Parsed, str | None]:
        """Return the parsed answer of a call that may be repeated, and its request id."""
        retries = Retries(self._max_retries)
        silence = READ_SECONDS if method == "GET" else None
        while True:
            try:
                return await self._connections.call(method, path, parse, body, params, silence)
            except ApiError as error:
                failure = error
            await retries.before_retry(failure, is_repeatable=not _appends_again(body or {}))

    async def _whole(
        self, path: str, body: dict[str, Any], model: str | None
    ) -> tuple[str, tuple[Choice, ...], Usage, str | None]:
        """Return model, choices, usage and request id of an answer."""
        body = await self._named(body, model)
        if not _can_be_streamed(body):
            (name, choices, usage), request_id = await self._call_with_id(
                "POST", path, parse_body, body
            )
            return name, choices, usage, request_id
        turn, collector = self._turn(path, body), Collector(body)
        async with aclosing(turn.chunks()) as chunks:
            async for chunk in chunks:
                collector.collect(chunk)
        if collector.usage is None:
            raise ServiceUnavailableError("the stream of the answer had no usage")
        return body["model"], (collector.collected(),), collector.usage, turn.request_id

    async def _stream(
        self, path: str, body: dict[str, Any], model: str | None
    ) -> AsyncGenerator[Chunk, None]:
        turn = self._turn(path, await self._named(body, model))
        self._n_streams += 1
        try:
            async with aclosing(turn.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._n_streams -= 1
            self._stream_ended.set()

    def _turn(self, path: str, body: Mapping[str, Any]) -> Turn:
        return Turn(
            self._connections, path, body, self._max_retries, self._close_later, self._on_break
        )

    async def _named(self, body: dict[str, Any], model: str | None) -> dict[str, Any]:
        """Return the body with its model: by default the first one that the gateway serves."""
        return {"model": await self._choose_model(model), **body}

    async def _query(self, model: str | None) -> dict[str, str]:
        return {"model": await self._choose_model(model)}

    async def _choose_model(self, model: str | None) -> str:
        if model is not None:
            if not isinstance(model, str):
                raise bad_request("model", f"{model!r} is not allowed; send a string, or None")
            if not model:
                raise bad_request("model", "it is empty; leave it out for the first served model")
            return model
        if self._connections.default_model is None:
            served = await self.models()
            if not served:
                raise ServiceUnavailableError("the gateway serves no model yet")
            self._connections.default_model = served[0].name
        return self._connections.default_model

    def _close_later(self, model: str, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._close_turn(model, name))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_turn(self, model: str, name: str) -> None:
        """Close the session of a turn. If that fails, the gateway drops it when it has been idle."""
        try:
            await self._delete(_session_path(name), {"model": model}, BUSY_RETRIES)
        except ApiError as error:
            _log.debug("session %s not closed: %s; it ends when it has been idle", name, error)


def _completion_body(prompt: Prompt, fields: CompletionFields, call: str) -> dict[str, Any]:
    return {"prompt": check_prompt(prompt), **check_fields(fields, COMPLETION_FIELDS, call)}


def _chat_body(messages: Sequence[Message], fields: ChatFields, call: str) -> dict[str, Any]:
    return {"messages": check_messages(messages), **check_fields(fields, CHAT_FIELDS, call)}


def _parse_deleted(body: Mapping[str, Any]) -> bool:
    return bool(body["deleted"])


def _can_be_streamed(body: Mapping[str, Any]) -> bool:
    """Return whether a stream that can be resumed has all of the answer.

    None has several choices or `prompt_logprobs`, and those of an echoed prompt have a limit in a stream.
    """
    has_prompt_scores = "prompt_logprobs" in body or (body.get("echo") and "logprobs" in body)
    return body.get("n", 1) == 1 and not has_prompt_scores


def _appends_again(body: Mapping[str, Any]) -> bool:
    """Return whether a repeated request would append its input twice."""
    return bool(body.get("append")) and "session_position" not in body


def _new_name(session_id: str | None) -> str:
    return f"sess_{secrets.token_hex(12)}" if session_id is None else check_session_name(session_id)


def _session_path(session_id: str) -> str:
    return f"/v1/sessions/{quote(check_session_name(session_id), safe='')}"
