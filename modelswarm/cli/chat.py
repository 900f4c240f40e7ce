"""`modelswarm chat`: one session over its turns, from the terminal."""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from typing import Any

import click

from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import base_url, grpc_target, http_target_options
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.client.openai import OpenAIClient, OpenAIClientError
from modelswarm.client.swarm import SwarmClient, format_route
from modelswarm.errors import ModelSwarmError

HINT = "/new forgets the conversation, /quit leaves (so does Ctrl-D)."


class Conversation:
    """What was said, and the name of the session in which the servers keep its KV."""

    def __init__(
        self, client: OpenAIClient, system: str | None, sampling: dict[str, Any], swarm: SwarmClient | None
    ) -> None:
        self._client, self._system, self._sampling = client, system, sampling
        self._swarm = swarm  # asked for the route of every turn, if given
        self.model = client.first_model()
        self.forget()

    def forget(self) -> None:
        self._session = f"chat-{secrets.token_hex(8)}"
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def run_turn(self, text: str) -> None:
        """Ask, print the answer as it comes. The whole transcript is sent; the session reuses what it has."""
        self._messages.append({"role": "user", "content": text})
        answer, route = "", ""
        try:
            for piece in self._client.stream_chat(
                self.model, self._messages, session_id=self._session, **self._sampling
            ):
                if self._swarm is not None and not answer:
                    route = format_route(self._swarm.fetch_running_route())
                answer += piece.text
                print_piece(piece.text)
        finally:
            click.echo()
            if answer:
                self._messages.append({"role": "assistant", "content": answer})
            else:
                self._messages.pop()  # as if it had not been asked
        if self._swarm is not None:
            click.echo(f"[{route or 'the route is not known: other sessions run too'}]", err=True)


@click.command()
@click.option("--system", metavar="TEXT", help="Instructions that stand before the conversation.")
@click.option("--verbose", "-v", is_flag=True, help="Say after each answer which servers gave it.")
@click.option(
    "--grpc", "target", metavar="HOST:PORT", help="The gRPC door, for --verbose with --url."
)
@sampling_options
@http_target_options
def chat(
    system: str | None,
    verbose: bool,
    target: str | None,
    name: str | None,
    url: str | None,
    **sampling: Any,
) -> None:
    """Talk to the model of a running swarm. /new forgets the conversation, /quit leaves."""
    with ExitStack() as doors:
        door = doors.enter_context(OpenAIClient(base_url(name, url)))
        swarm = doors.enter_context(SwarmClient(grpc_target(name, target))) if verbose else None
        conversation = Conversation(door, system, request_fields(**sampling), swarm)
        if sys.stdin.isatty():
            click.echo(f"{conversation.model}. {HINT}")
        _run_conversation(conversation)


def _run_conversation(conversation: Conversation) -> None:
    while (text := _read_input()) not in (None, "/quit"):
        if text == "/new":
            conversation.forget()
        elif text:
            _run_turn(conversation, text)


def _run_turn(conversation: Conversation, text: str) -> None:
    """One turn; a failed one is told and the conversation goes on, Ctrl-C only cuts the answer short."""
    try:
        conversation.run_turn(text)
    except KeyboardInterrupt:
        click.echo("(cut short)", err=True)
    except ModelSwarmError as error:
        if isinstance(error, OpenAIClientError) and not sys.stdin.isatty():
            raise  # nobody is there who could try again
        click.echo(f"Error: {error}", err=True)


def _read_input() -> str | None:
    """What the person types next; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
