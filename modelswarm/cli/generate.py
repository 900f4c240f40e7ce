"""`modelswarm generate PROMPT`: continues a text."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.options.sampling import request_fields, sampling_options
from modelswarm.cli.options.target import base_url, http_target_options, model_option
from modelswarm.cli.terminal.endings import LENGTH, length_remark
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.client.openai import OpenAIClient


@click.command()
@click.argument("prompt")
@click.option("--stream", is_flag=True, help="Print the text as it is generated.")
@model_option
@sampling_options
@http_target_options
def generate(
    prompt: str,
    stream: bool,
    model: str | None,
    name: str | None,
    url: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT with the model of a running swarm. Without --max-tokens, by 16 tokens."""
    fields = request_fields(**sampling)
    with OpenAIClient(base_url(name, url)) as client:
        chosen = client.choose_model(model)
        text, remark = "", ""
        finish = None
        for piece in client.stream_completion(chosen.name, prompt, **fields):
            finish = piece.finish_reason or finish
            if stream:
                print_piece(piece.text)
            else:
                text += piece.text
            if piece.usage is not None and finish == LENGTH:
                remark = length_remark(piece.usage, chosen.max_length)
        print_piece(text)
        click.echo()
        if remark:
            click.echo(remark, err=True)
