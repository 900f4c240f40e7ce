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
        self._client = AsyncClient(
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_connections=max_connections,
            on_break=None if on_break is None else in_reader(on_break),
        )
        self._thread = LoopThread("modelswarm-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and end the thread."""
        if not self._thread.is_closed:
            self._thread.call(self._client.aclose())
            self._thread.close()

    # ---- models and tokens

    def models(self) -> list[ServedModel]:
        """Return the models that the gateway serves; none yet is an empty list."""
        return self._thread.call(self._client.models())

    def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[TokenizeFields],
    ) -> TokenizedPrompt:
        """Return the tokens of a text, or of the messages of a chat, as a request would have them."""
        return self._thread.call(self._client.tokenize(prompt, model=model, **fields))

    def detokenize(self, token_ids: Iterable[int], *, model: str | None = None) -> str:
        """Return the text of token ids, special tokens included."""
        return self._thread.call(self._client.detokenize(token_ids, model=model))

    # ---- answers

    def complete(
        self, prompt: Prompt, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> Completion:
        """Return the continuation of a text, or of token ids. It survives the loss of its gateway."""
        return self._thread.call(self._client.complete(prompt, model=model, **fields))

    def stream_complete(
        self, prompt: Prompt, *, model: str | None = None, **fields: Unpack[CompletionFields]
    ) -> Generator[Chunk, None, None]:
        """Stream the continuation of a text, or of token ids. A lost gateway changes nothing about its chunks' text."""
        return self._thread.iterate(self._client.stream_complete(prompt, model=model, **fields))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> ChatCompletion:
        """Return the answer to the messages of a chat. It survives the loss of its gateway."""
        return self._thread.call(self._client.chat(messages, model=model, **fields))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        **fields: Unpack[ChatFields],
    ) -> Generator[Chunk, None, None]:
        """Stream the answer to the messages of a chat. A lost gateway changes nothing about its chunks' text."""
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
        """Return a session's state. NotFoundError if no running gateway has it."""
        return self._thread.call(self._client.session_state(session_id, model=model))

    def close_session(self, session_id: str, *, model: str | None = None) -> bool:
        """Close a session, which frees its KV at once; False if no running gateway has it."""
        return self._thread.call(self._client.close_session(session_id, model=model))

    def fork_session(
        self,
        session_id: str,
        *,
        new_session_id: str | None = None,
        position: int | None = None,
        model: str | None = None,
    ) -> SessionState:
        """Open a session with the log of another one, or its first `position` entries. The servers copy the KV."""
        return self._thread.call(
            self._client.fork_session(
                session_id, new_session_id=new_session_id, position=position, model=model
            )
        )
