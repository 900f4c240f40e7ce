"""The synchronous client: the asynchronous one in a thread of its own, so that it works in notebooks, too."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Self, Unpack

from modelswarm.client.api.answers import (
    ChatCompletion,
    Chunk,
    Completion,
    ServedModel,
    SessionState,
    TokenizedPrompt,
)
from modelswarm.client.api.async_client import MAX_CONNECTIONS, AsyncClient, Message, Prompt
from modelswarm.client.api.checks import check_callback
from modelswarm.client.api.fields import ChatFields, CompletionFields, TokenizeFields
from modelswarm.client.api.loop_thread import LoopThread, in_reader
from modelswarm.client.api.retries import OnBreak


class Client:
    """As `AsyncClient`, for threads. Use it by `with`, or call `close`. Any number of threads may share it.

    `on_break` is called in the thread that reads the stream, and for whole answers in the client's own.
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
        check_callback("on_break", on_break)
        self._client = AsyncClient(
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_connections=max_connections,
            on_break=None if on_break is None else in_reader(on_break),
        )
        self._thread = LoopThread("modelswarm-client", ends_at_exit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the streams, close the connections, and end the thread."""
        if not self._thread.is_closed:
            self._thread.end_streams()
            self._thread.call(self._client.aclose())
            self._thread.close()

    # ---- models and tokens

    def models(self) -> list[ServedModel]:
        """Return the models that the gateway serves, and their adapters; none yet is an empty list.

        GatewayUnreachableError: no gateway answers. NotAGatewayError: something else does.
        """
        return self._thread.call(self._client.models())

    def tokenize(
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
        return self._thread.call(self._client.tokenize(prompt, model=model, **fields))

    def detokenize(self, token_ids: Iterable[int], *, model: str | None = None) -> str:
        """Return the text of token ids, special tokens included. BadRequestError for an id of no token."""
        return self._thread.call(self._client.detokenize(token_ids, model=model))

    # ---- answers

    def complete(
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
        return self._thread.call(self._client.complete(prompt, model=model, **fields))

    def stream_complete(
        self, prompt: Prompt, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> Generator[Chunk, None, None]:
        """Stream the continuation of a text, or of token ids. A lost gateway changes nothing about its chunks' text.

        Each chunk has what is new. One has the `finish_reason`, and the last one has the `usage`, without text.
        An iterator that is left early ends the answer. Arguments and errors: see `complete`. Wrong arguments raise at
        once, the other errors where the stream is read, also in its middle.
        """
        return self._thread.iterate(self._client.stream_complete(prompt, model=model, **fields))

    def chat(
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
        return self._thread.call(self._client.chat(messages, model=model, **fields))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generator[Chunk, None, None]:
        """Stream the answer to the messages of a chat. A lost gateway changes nothing about its chunks' text.

        A chunk has new `text` or `reasoning_content`, or parts of `tool_calls`. The first part of a call has its id
        and name, and each part a piece of its arguments. Arguments: see `chat`; ends and errors: `stream_complete`.
        """
        return self._thread.iterate(self._client.stream_chat(messages, model=model, **fields))

    # ---- sessions

    def open_session(
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
        return self._thread.call(
            self._client.open_session(max_length, session_id=session_id, ttl=ttl, model=model)
        )

    def session_state(self, session_id: str, *, model: str | None = None) -> SessionState:
        """Return a session's state, with its position in tokens. NotFoundError if no running gateway has it."""
        return self._thread.call(self._client.session_state(session_id, model=model))

    def close_session(self, session_id: str, *, model: str | None = None) -> bool:
        """Close a session, which frees its KV at once; False if no running gateway has it.

        ConflictError: it is answering.
        """
        return self._thread.call(self._client.close_session(session_id, model=model))

    def fork_session(
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
        return self._thread.call(
            self._client.fork_session(
                session_id, new_session_id=new_session_id, position=position, model=model
            )
        )
