"""`modelswarm generate PROMPT`: continues a text. The options are in `commands/generate.py`."""

from __future__ import annotations

from typing import Any

import click

from modelswarm.cli.terminal.endings import LENGTH, length_remark
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.client.openai import OpenAIClient


def print_continuation(
    base: str, model: str | None, prompt: str, fields: dict[str, Any], stream: bool
) -> None:
    """Print the continuation of `prompt` by the gateway at `base`: piece by piece, or at its end."""
    with OpenAIClient(base) as client:
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
