"""Prints a model's text on a terminal without its control characters, which could move the cursor.

Used by `chat`, `generate` and `demo`. A file or a pipe gets the text unchanged.
"""

from __future__ import annotations

import sys

import click

REPLACEMENT = "·"


def replace_control_characters(text: str) -> str:
    """Return the text with control characters replaced, except line ends and tabs."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else REPLACEMENT
        for character in text
    )


def print_piece(text: str) -> None:
    """Print a piece of an answer at once, without a line end."""
    click.echo(replace_control_characters(text) if sys.stdout.isatty() else text, nl=False)
