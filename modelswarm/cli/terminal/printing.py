"""A model's words on a terminal: what would move the cursor or ring the bell is shown as a dot instead.

Used by `chat`, `generate` and `demo`. Into a file or a pipe the text goes as it is.
"""

from __future__ import annotations

import sys

import click

REPLACEMENT = "·"


def replace_control_characters(text: str) -> str:
    """The text with its control characters replaced, line ends and tabs apart."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else REPLACEMENT
        for character in text
    )


def print_piece(text: str) -> None:
    """Print a piece of an answer at once, without a line end."""
    click.echo(replace_control_characters(text) if sys.stdout.isatty() else text, nl=False)
