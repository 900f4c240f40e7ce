"""`modelswarm generate PROMPT`: continue a text."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import base_url, swarm_options
from modelswarm.cli.terminal.printing import say
from modelswarm.client.openai import Door


@click.command()
@click.argument("prompt")
@click.option("--stream", is_flag=True, help="Print the text as it comes.")
@sampling_options
@swarm_options
def generate(prompt: str, stream: bool, name: str | None, url: str | None, **sampling: Any) -> None:
    """Continue PROMPT with the model of a running swarm and print what it adds."""
    with Door(base_url(name, url)) as door:
        pieces = door.complete(door.model(), prompt, **request_fields(**sampling))
        if stream:
            for piece in pieces:
                say(piece.text)
        else:
            say("".join(piece.text for piece in pieces))
        click.echo()
