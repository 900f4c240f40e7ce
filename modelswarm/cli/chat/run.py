"""The loop of a chat: reads messages and commands until the end of the input."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import click

from modelswarm.cli.chat.conversation import Conversation
from modelswarm.cli.chat.message_input import read_message
from modelswarm.cli.chat.printing import JsonPrinter, TextPrinter
from modelswarm.cli.chat.slash_commands import QUIT, run_command
from modelswarm.cli.entry.failures import exit_code_of
from modelswarm.cli.options.model import choose_model
from modelswarm.cli.terminal.endings import NEW_CONVERSATION
from modelswarm.cli.terminal.line_editing import LineReader, history_path
from modelswarm.cli.terminal.signals import exit_on_signals
from modelswarm.client.api import (
    Client,
    ConnectionBrokenError,
    ContextLengthError,
    InternalServerError,
    NotAGatewayError,
)
from modelswarm.client.swarm import SwarmClient
from modelswarm.errors import ModelSwarmError, UnavailableError, UserError

# Errors behind which the next turn fails, too, or that no person is there to answer.
BROKEN = (ConnectionBrokenError, NotAGatewayError, InternalServerError, UnavailableError)
PIPED_RETRIES = 8  # of a question that is refused for now, in about 40 s
HINT = "/help shows the commands, /quit or Ctrl-D ends the chat."


def run_chat(
    base: str,
    target: str | None,
    model: str | None,
    system: str | None,
    sampling: dict[str, Any],
    as_json: bool,
) -> int:
    """Chat over HTTP at `base` until the end of the input, and return the exit code.

    With `target` (the admin address) routes are printed.
    """
    max_retries = 0 if sys.stdin.isatty() else PIPED_RETRIES  # a person sees the error and decides
    with ExitStack() as clients:
        client = clients.enter_context(
            Client(
                base,
                max_retries=max_retries,
                on_break=lambda error: conversation.print_break(error),
            )
        )
        swarm = clients.enter_context(SwarmClient(target)) if target else None
        printer = JsonPrinter if as_json else TextPrinter
        chosen = choose_model(client.models(), model)
        conversation = Conversation(client, chosen, system, sampling, swarm, printer)
        reader = LineReader(history_path("chat_history"))
        if reader.is_interactive and not as_json:
            click.echo(f"{chosen.name}. {HINT}")
        with exit_on_signals():
            try:
                exit_code = _run_conversation(conversation, reader)
            finally:
                conversation.end_session()
    return 0 if sys.stdin.isatty() else exit_code  # a person has seen the errors


def _run_conversation(conversation: Conversation, reader: LineReader) -> int:
    """Return the highest exit code of an error; 0 if every message had its answer, and every command its effect."""
    exit_code = 0
    while True:
        try:
            message = read_message(reader)
        except KeyboardInterrupt:
            if not reader.is_interactive:
                raise
            click.echo("(/quit or Ctrl-D ends the chat)", err=True)
            continue
        if message is None or (message.strip() == QUIT and message.startswith("/")):
            return exit_code
        if message.startswith("/"):
            exit_code = max(exit_code, _run_command(conversation, message))
        elif message.strip():
            exit_code = max(exit_code, _run_turn(conversation, message.strip()))


def _run_command(conversation: Conversation, line: str) -> int:
    """Run a command. Return the exit code of its error, which is printed; 0 without one."""
    try:
        run_command(conversation, line)
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        return exit_code_of(error)
    return 0


def _run_turn(conversation: Conversation, text: str) -> int:
    """Run one turn. Return the exit code of its error, which is printed; the conversation continues.

    On a terminal, Ctrl-C only ends the answer.
    """
    try:
        conversation.run_turn(text)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise  # the next question would follow
        click.echo("(interrupted)", err=True)
    except ContextLengthError as error:
        click.echo(f"Error: {error}; {NEW_CONVERSATION}", err=True)
        return exit_code_of(error)
    except ModelSwarmError as error:
        if isinstance(error, BROKEN) and not sys.stdin.isatty():
            raise  # no person is there to try again
        click.echo(f"Error: {error}", err=True)
        return exit_code_of(error)
    return 0
