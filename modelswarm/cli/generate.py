"""`modelswarm generate PROMPT`: continues a text."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import base_url, http_target_options
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.client.openai import OpenAIClient


@click.command()
@click.argument("prompt")
@click.option("--stream", is_flag=True, help="Print the text as it is generated.")
@sampling_options
@http_target_options
def generate(prompt: str, stream: bool, name: str | None, url: str | None, **sampling: Any) -> None:
    """Continue PROMPT with the model of a running swarm."""
    with OpenAIClient(base_url(name, url)) as client:
        pieces = client.stream_completion(
            client.first_model(), prompt, **request_fields(**sampling)
        )
        if stream:
            for piece in pieces:
                print_piece(piece.text)
        else:
            print_piece("".join(piece.text for piece in pieces))
        click.echo()
