"""`modelswarm chat`: one session with many turns, from the terminal."""

from __future__ import annotations

import secrets
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import click

from modelswarm.cli.options.model import choose_model
from modelswarm.cli.terminal.endings import LENGTH, NEW_CONVERSATION, length_remark
from modelswarm.cli.terminal.line_editing import LineReader, history_path
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.cli.terminal.signals import exit_on_signals
from modelswarm.cli.terminal.wrapping import WrappingWriter
from modelswarm.client.api import (
    Chunk,
    Client,
    ConnectionBrokenError,
    ContextLengthError,
    InternalServerError,
    NotAGatewayError,
    ServedModel,
)
from modelswarm.client.api.retries import RESUME_SECONDS
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.errors import ModelSwarmError, UserError

COMMANDS = {
    "/new": "start a new conversation",
    "/help": "show these commands",
    "/quit": "end the chat; so does Ctrl-D",
}
# Errors behind which the next turn fails, too.
BROKEN = (ConnectionBrokenError, NotAGatewayError, InternalServerError)
HINT = "/help shows the commands, /quit or Ctrl-D ends the chat."


class AnswerPrinter:
    """Prints an answer as it arrives: on a terminal with lines broken between words, else unchanged."""

    def __init__(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._writer = WrappingWriter(sys.stdout, width, indent="") if sys.stdout.isatty() else None

    def print_text(self, text: str) -> None:
        if self._writer is None:
            print_piece(text)
        else:
            self._writer.write(text)

    def print_break(self, error: ModelSwarmError) -> None:
        """Say that the stream broke off and is being resumed. The text continues below."""
        remark = f"({error}; reconnecting for {RESUME_SECONDS:.0f} s, Ctrl-C gives up)"
        if self._writer is None:
            click.echo(remark, err=True)
        else:
            self._writer.write_remark(remark)

    def end(self) -> None:
        if self._writer is None:
            click.echo()
        else:
            self._writer.end_line()


class Conversation:
    """The messages so far, and the name of the session whose KV the servers keep."""

    def __init__(
        self,
        client: Client,
        model: ServedModel,
        system: str | None,
        sampling: dict[str, Any],
        swarm: SwarmClient | None,
    ) -> None:
        self._client, self._system, self._sampling = client, system, sampling
        self._swarm = swarm  # if given, the route of every turn is printed
        self.model = model
        self._has_session = False  # a request with the session's name was sent
        self._printer = AnswerPrinter()
        self._begin()

    def _begin(self) -> None:
        self._session = f"chat-{secrets.token_hex(8)}"
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def start_again(self) -> None:
        """Close the session, and start another conversation with one of its own."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Close the session, which frees its KV on the servers. A failure is only reported."""
        if not self._has_session:
            return
        self._has_session = False
        try:
            self._client.close_session(self._session, model=self.model.name)
        except ModelSwarmError as error:
            click.echo(f"note: the session stays open until it has been idle: {error}", err=True)

    def run_turn(self, text: str) -> None:
        """Send `text` and print the answer as it arrives.

        The whole transcript is sent; the servers reuse the KV they keep for the session.
        """
        self._messages.append({"role": "user", "content": text})
        self._has_session = True
        answer, route = "", ""
        last = Chunk()
        self._printer = AnswerPrinter()
        pieces = self._client.stream_chat(
            self._messages, model=self.model.name, session_id=self._session, **self._sampling
        )
        try:
            for piece in pieces:
                if self._swarm is not None and not answer:
                    route = format_route(self._swarm.fetch_running_route())
                answer += piece.text
                self._printer.print_text(piece.text)
                last = _join_ends(last, piece)
        finally:
            pieces.close()
            self._printer.end()
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()  # without an answer, the question is dropped too
        self._print_remarks(last, route)

    def print_break(self, error: ModelSwarmError) -> None:
        self._printer.print_break(error)

    def _print_remarks(self, last: Chunk, route: str) -> None:
        if last.finish_reason == LENGTH and last.usage is not None:
            remark = length_remark(asdict(last.usage), self.model.max_length, in_chat=True)
            click.echo(remark, err=True)
        if self._swarm is not None:
            click.echo(f"[{route or 'route unknown: other sessions are running too'}]", err=True)


def _join_ends(before: Chunk, piece: Chunk) -> Chunk:
    """Return the finish reason and the usage so far: they come in two events."""
    reason = piece.finish_reason or before.finish_reason
    return Chunk(finish_reason=reason, usage=piece.usage or before.usage)


def run_chat(
    base: str,
    target: str | None,
    model: str | None,
    system: str | None,
    sampling: dict[str, Any],
) -> None:
    """Chat over HTTP at `base` until the end of the input. With `target` (the admin address) routes are printed."""
    with ExitStack() as clients:
        client = clients.enter_context(
            Client(base, max_retries=0, on_break=lambda error: conversation.print_break(error))
        )
        swarm = clients.enter_context(SwarmClient(target)) if target else None
        conversation = Conversation(
            client, choose_model(client.models(), model), system, sampling, swarm
        )
        reader = LineReader("> ", history_path("chat_history"))
        if reader.is_interactive:
            click.echo(f"{conversation.model.name}. {HINT}")
        with exit_on_signals():
            try:
                _run_conversation(conversation, reader)
            finally:
                conversation.close()


def _run_conversation(conversation: Conversation, reader: LineReader) -> None:
    while (line := reader.read_line()) is not None:
        text = line.strip()
        if not line.startswith("/"):
            if text:
                _run_turn(conversation, text)
        elif text == "/quit":
            return
        else:
            _run_command(conversation, text)


def _run_command(conversation: Conversation, text: str) -> None:
    if text == "/new":
        conversation.start_again()
    elif text == "/help":
        for command, meaning in COMMANDS.items():
            click.echo(f"{command:<6} {meaning}")
        click.echo("A line that begins with a space is sent as it is.")
    else:
        allowed = ", ".join(COMMANDS)
        error = UserError(text.split()[0], f"there is no such command; allowed: {allowed}")
        click.echo(f"Error: {error}", err=True)


def _run_turn(conversation: Conversation, text: str) -> None:
    """Run one turn. Its error is printed and the conversation continues; Ctrl-C only ends the answer."""
    try:
        conversation.run_turn(text)
    except KeyboardInterrupt:
        click.echo("(interrupted)", err=True)
    except ContextLengthError as error:
        click.echo(f"Error: {error}; {NEW_CONVERSATION}", err=True)
    except ModelSwarmError as error:
        if isinstance(error, BROKEN) and not sys.stdin.isatty():
            raise  # no person is there to try again
        click.echo(f"Error: {error}", err=True)
