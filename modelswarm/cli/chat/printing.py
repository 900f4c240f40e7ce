"""Prints the answers of a chat: for a person as they arrive, or as one line of JSON for each."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Protocol

import click

from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.terminal.endings import LENGTH, length_remark
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.cli.terminal.wrapping import WrappingWriter
from modelswarm.client.api import Chunk, Usage
from modelswarm.client.api.retries import RESUME_SECONDS
from modelswarm.errors import ModelSwarmError

_USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come."""

    turn: int  # number of the question, from 1
    text: str = ""
    finish_reason: str | None = None  # None: not at its end
    usage: Usage | None = None
    route: str = ""  # as `--verbose` shows it

    def take_piece(self, piece: Chunk) -> None:
        """Add a piece. The finish reason and the usage come in two events."""
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage

    @property
    def counts(self) -> dict[str, int] | None:
        """Return the counts of tokens by OpenAI's names; None before they came."""
        if self.usage is None:
            return None
        counts = asdict(self.usage)
        return {name: counts[name] for name in _USAGE}


class AnswerPrinter(Protocol):
    """Prints one answer."""

    def print_text(self, text: str) -> None:
        """Take the next piece of the text."""

    def print_break(self, error: ModelSwarmError) -> None:
        """Say that the stream broke off and is being resumed. The text continues."""

    def print_end(self, answer: Answer, context: int | None, with_route: bool) -> None:
        """Take the end of the answer, which may have been interrupted. `context`: positions of the model's context."""


class TextPrinter:
    """Prints an answer as it arrives: on a terminal with lines broken between words, else unchanged."""

    def __init__(self) -> None:
        width = shutil.get_terminal_size().columns - 1
        self._writer = WrappingWriter(sys.stdout, width, indent="") if sys.stdout.isatty() else None

    def print_text(self, text: str) -> None:
        if self._writer is None:
            print_piece(text)
        else:
            self._writer.write(text)

    def print_break(self, error: ModelSwarmError) -> None:
        remark = _break_remark(error)
        if self._writer is None:
            click.echo(remark, err=True)
        else:
            self._writer.write_remark(remark)

    def print_end(self, answer: Answer, context: int | None, with_route: bool) -> None:
        has_answer = answer.text or answer.finish_reason is not None
        if self._writer is not None:
            self._writer.end_line()
        elif has_answer:
            click.echo()
        if answer.finish_reason == LENGTH:
            click.echo(length_remark(answer.counts or {}, context, in_chat=True), err=True)
        if with_route and answer.finish_reason is not None:
            click.echo(
                f"[{answer.route or 'route unknown: other sessions are running too'}]", err=True
            )


class JsonPrinter:
    """Prints one object for each answer, at its end."""

    def print_text(self, text: str) -> None:
        """Wait for the whole answer."""

    def print_break(self, error: ModelSwarmError) -> None:
        click.echo(_break_remark(error), err=True)

    def print_end(self, answer: Answer, context: int | None, with_route: bool) -> None:
        if not answer.text and answer.finish_reason is None:
            return  # there is no answer
        print_json(
            {
                "turn": answer.turn,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "usage": answer.counts,
                "route": answer.route or None,
            }
        )


def _break_remark(error: ModelSwarmError) -> str:
    return f"({error}; reconnecting for {RESUME_SECONDS:.0f} s, Ctrl-C gives up)"
