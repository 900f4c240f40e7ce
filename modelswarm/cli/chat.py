"""`modelswarm chat`: one session over its turns, from the terminal."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import click

from modelswarm.cli.completions import Door, DoorError
from modelswarm.cli.sampling import request_fields, sampling_options
from modelswarm.cli.where import base_url, swarm_options
from modelswarm.errors import ModelSwarmError
from modelswarm.local.rundir import find_run
from modelswarm.local.swarm_door import SwarmDoor, SwarmDoorError, route_text

HELP = "/new forgets the conversation, /quit leaves (so does Ctrl-D)."


@dataclass(slots=True)
class Conversation:
    """What was said, and the session in which the servers keep its KV."""

    door: Door
    model: str
    sampling: dict[str, Any]
    system: str | None
    session: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.session = f"chat-{secrets.token_hex(8)}"
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def turn(self, text: str) -> None:
        """Ask, print the answer as it comes. The whole transcript is sent; the session reuses what it has."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self.door.chat(
                self.model, self.messages, session_id=self.session, **self.sampling
            ):
                answer += piece.text
                click.echo(piece.text, nl=False)
        finally:
            click.echo()
            self.messages.append({"role": "assistant", "content": answer})


@click.command()
@click.option("--system", metavar="TEXT", help="Instructions that stand before the conversation.")
@click.option("--verbose", "-v", is_flag=True, help="Say after each answer which servers gave it.")
@click.option(
    "--grpc", "grpc_target", metavar="HOST:PORT", help="The gateway's gRPC door, with --url."
)
@sampling_options
@swarm_options
def chat(
    system: str | None,
    verbose: bool,
    grpc_target: str | None,
    name: str | None,
    url: str | None,
    **sampling: Any,
) -> None:
    """Talk to the model of a running swarm. /new forgets the conversation, /quit leaves."""
    if verbose and grpc_target is None:
        grpc_target = None if url else find_run(name).grpc
    with Door(base_url(name, url)) as door:
        model = door.model()
        if sys.stdin.isatty():
            click.echo(f"{model}. {HELP}")
        _talk(
            Conversation(door, model, request_fields(**sampling), system),
            grpc_target if verbose else None,
        )


def _talk(conversation: Conversation, grpc_target: str | None) -> None:
    while (text := _ask()) not in (None, "/quit"):
        if text == "/new":
            conversation.restart()
        elif text:
            _answer(conversation, text, grpc_target)


def _answer(conversation: Conversation, text: str, grpc_target: str | None) -> None:
    """One turn; a failed one is told and the conversation goes on, Ctrl-C only cuts the answer short."""
    try:
        conversation.turn(text)
    except KeyboardInterrupt:
        click.echo("(cut short)", err=True)
    except ModelSwarmError as error:
        if isinstance(error, DoorError) and not sys.stdin.isatty():
            raise
        click.echo(f"Error: {error}", err=True)
    if grpc_target is not None:
        _show_route(conversation.session, grpc_target)


def _show_route(session: str, grpc_target: str) -> None:
    try:
        with SwarmDoor(grpc_target) as door:
            hops = door.route(session)
    except SwarmDoorError as error:
        click.echo(f"Error: {error}", err=True)
        return
    click.echo(f"[{route_text(hops) or 'no route now'}]", err=True)


def _ask() -> str | None:
    """What the person types next; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
