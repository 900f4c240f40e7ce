"""The conversation of a chat: its messages, its sampling, and the session whose KV the servers keep."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import click

from modelswarm.cli.chat.printing import Answer, AnswerPrinter
from modelswarm.cli.options.sampling import gather_structure
from modelswarm.client.api import Client, ServedModel
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.errors import ModelSwarmError

Message = dict[str, str]


class Conversation:
    def __init__(
        self,
        client: Client,
        model: ServedModel,
        system: str | None,
        sampling: dict[str, Any],
        swarm: SwarmClient | None,
        make_printer: Callable[[], AnswerPrinter],
    ) -> None:
        """`sampling`: values by `FieldOption.field`, for every request; may be changed between turns."""
        self._client, self._system, self._make_printer = client, system, make_printer
        self._swarm = swarm  # if given, the route of every turn is printed
        self.model, self.sampling = model, sampling
        self._has_session = False  # a request with the session's name was sent
        self._printer = make_printer()
        self._begin()

    def print_break(self, error: ModelSwarmError) -> None:
        """Say that the stream of the answer broke off and is being resumed."""
        self._printer.print_break(error)

    def _begin(self) -> None:
        self._session = f"chat-{secrets.token_hex(8)}"
        self.messages: list[Message] = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})

    def start_again(self) -> None:
        """Close the session, and start another conversation with one of its own."""
        self.end_session()
        self._begin()

    def end_session(self) -> None:
        """Close the session, which frees its KV on the servers. A failure is only reported."""
        if not self._has_session:
            return
        self._has_session = False
        try:
            self._client.close_session(self._session, model=self.model.name)
        except ModelSwarmError as error:
            click.echo(f"note: the session stays open until it has been idle: {error}", err=True)

    def undo_turn(self) -> str | None:
        """Drop the last question and its answer, and return the question; None if there is none.

        The next turn sends the shorter transcript: the servers keep what it shares with the log.
        """
        places = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            return None
        question = self.messages[places[-1]]["content"]
        del self.messages[places[-1] :]
        return question

    def run_turn(self, text: str) -> None:
        """Send `text` and print the answer as it arrives.

        The whole transcript is sent; the servers reuse the KV they keep for the session.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = Answer(sum(message["role"] == "user" for message in asked))
        self._printer = self._make_printer()
        pieces = self._client.stream_chat(  # raises at once for a wrong setting
            asked,
            model=self.model.name,
            session_id=self._session,
            **gather_structure(self.sampling),
        )
        self.messages, self._has_session = asked, True
        try:
            for piece in pieces:
                if self._swarm is not None and not answer.text:
                    answer.route = format_route(self._swarm.fetch_running_route())
                answer.take_piece(piece)
                self._printer.print_text(piece.text)
        finally:
            pieces.close()
            if answer.text or answer.finish_reason:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages.pop()  # without an answer, the question is dropped too
            self._printer.print_end(answer, self.model.max_length, self._swarm is not None)
