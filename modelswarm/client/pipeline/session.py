"""`Session`: a chat whose context the servers keep between turns. Made by `pipe.session()`, answered by `pipe.chat`."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.prompts import Message
from modelswarm.client.pipeline.response import Response
from modelswarm.errors import UserError


class Session:
    """A chat with its transcript. One turn runs at a time; a turn that did not end leaves no trace in it."""

    def __init__(
        self, gen_config: GenerationConfig | None, free: Callable[[str, str], object]
    ) -> None:
        """`free` frees the context that servers keep under a name, for a model."""
        self.session_id = _new_name()
        self.gen_config = gen_config
        self.prompt: str | list[Message] | None = None  # of the last turn
        self.response: Response | None = None  # of the last turn
        self.history: list[tuple[str | list[Message], str]] = []  # prompt and answer of each turn
        self.messages: list[Message] = []  # the transcript
        self._free = free
        self._models: set[str] = set()  # each has a context at the servers
        self._turn = threading.Lock()
        self._cancel: Callable[[], object] | None = None  # of the turn that runs
        self._is_closed = False

    @contextmanager
    def turn(self) -> Iterator[Self]:
        """Hold the session for one turn; UserError if it is closed, or another turn is running."""
        self.check_open()
        if not self._turn.acquire(blocking=False):
            raise UserError("session", "a turn of it is running; wait for its end, or abort it")
        try:
            yield self
        finally:
            self._cancel = None
            self._turn.release()

    def on_abort(self, cancel: Callable[[], object], model: str) -> None:
        """Set the function that ends the turn that runs, and the model that it runs on."""
        self._cancel = cancel
        self._models.add(model)

    def check_open(self) -> None:
        """Raise UserError if the session is closed."""
        if self._is_closed:
            raise UserError("session", "it is closed; make a new one by pipe.session()")

    def add_turn(
        self, prompt: str | list[Message], messages: list[Message], response: Response
    ) -> None:
        """Append a turn that has ended. `messages`: the transcript with the new question."""
        self.prompt, self.response = prompt, response
        self.history.append((prompt, response.text))
        self.messages = [*messages, {"role": "assistant", "content": response.text}]

    def abort(self) -> None:
        """End the turn that runs, from any thread; its caller gets AnswerAbortedError."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def reset(self) -> None:
        """Forget the transcript, and free the context at the servers. The session can be used again."""
        with self.turn():
            self._free_contexts()
            self.session_id = _new_name()
            self.prompt, self.response = None, None
            self.history, self.messages = [], []

    def close(self) -> None:
        """End the turn that runs, and free the context at the servers. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.abort()
            self._free_contexts()

    def _free_contexts(self) -> None:
        for model in tuple(self._models):
            self._free(self.session_id, model)
        self._models.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _new_name() -> str:
    return f"pipeline-{secrets.token_hex(12)}"
