"""`modelswarm chat`: one session with many turns, from the terminal."""

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

HINT = "/new starts a new conversation, /quit or Ctrl-D ends the chat."


class Conversation:
    """The messages so far, and the name of the session whose KV the servers keep."""

    def __init__(
        self,
        client: OpenAIClient,
        system: str | None,
        sampling: dict[str, Any],
        swarm: SwarmClient | None,
    ) -> None:
        self._client, self._system, self._sampling = client, system, sampling
        self._swarm = swarm  # if given, the route of every turn is printed
        self.model = client.first_model()
        self.forget()

    def forget(self) -> None:
        self._session = f"chat-{secrets.token_hex(8)}"
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def run_turn(self, text: str) -> None:
        """Send `text` and print the answer as it arrives.

        The whole transcript is sent; the servers reuse the KV they keep for the session.
        """
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
                self._messages.pop()  # without an answer, the question is dropped too
        if self._swarm is not None:
            click.echo(f"[{route or 'route unknown: other sessions are running too'}]", err=True)


@click.command()
@click.option("--system", metavar="TEXT", help="System message before the conversation.")
@click.option("--verbose", "-v", is_flag=True, help="Print the route after each answer.")
@click.option(
    "--grpc", "target", metavar="HOST:PORT", help="gRPC address, for --verbose with --url."
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
    """Chat with the model of a running swarm. /new starts a new conversation, /quit ends the chat."""
    with ExitStack() as clients:
        client = clients.enter_context(OpenAIClient(base_url(name, url)))
        swarm = clients.enter_context(SwarmClient(grpc_target(name, target))) if verbose else None
        conversation = Conversation(client, system, request_fields(**sampling), swarm)
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
    """Run one turn. Its error is printed and the conversation continues; Ctrl-C only ends the answer."""
    try:
        conversation.run_turn(text)
    except KeyboardInterrupt:
        click.echo("(interrupted)", err=True)
    except ModelSwarmError as error:
        if isinstance(error, OpenAIClientError) and not sys.stdin.isatty():
            raise  # no person is there to try again
        click.echo(f"Error: {error}", err=True)


def _read_input() -> str | None:
    """Read the next line of input; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
