"""The commands of a chat, which begin with a slash. `/help` shows them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelswarm.cli.chat.conversation import Conversation
from modelswarm.cli.options.sampling import (
    FIELD_OPTIONS,
    FieldOption,
    field_value,
    gather_structure,
)
from modelswarm.cli.terminal.printing import print_piece
from modelswarm.errors import UserError

QUIT = "/quit"
_ON = {"on": True, "off": False}
_OPTIONS = {option.parameter.replace("_", "-"): option for option in FIELD_OPTIONS}


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command: its arguments and its effect as `/help` shows them, and what it does with the rest of its line."""

    arguments: str
    meaning: str
    effect: Callable[[Conversation, str], None]


def run_command(conversation: Conversation, line: str) -> None:
    """Run the command of a line. UserError for an unknown one, and for arguments that it does not take."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise UserError(name, f"there is no such command; allowed: {', '.join(COMMANDS)}")
    if rest.strip() and not command.arguments:
        raise UserError(name, f"{rest.strip()!r} is not allowed; it has no arguments")
    command.effect(conversation, rest.strip())


def _start_again(conversation: Conversation, rest: str) -> None:
    conversation.start_again()


def _show_help(conversation: Conversation, rest: str) -> None:
    shown = {f"{name} {command.arguments}".strip(): command for name, command in COMMANDS.items()}
    width = max(map(len, shown))
    for title, command in shown.items():
        click.echo(f"{title:<{width}}  {command.meaning}")
    click.echo("A line that begins with a space is sent as it is.")
    click.echo('A message of several lines: \\ at the end of a line, or """ before and after it.')


def _undo(conversation: Conversation, rest: str) -> None:
    question = conversation.undo_turn()
    if question is None:
        raise UserError("/undo", "there is no turn yet; allowed: after a question")
    click.echo(f"(undone: {' '.join(question.split())})", err=True)


def _show_history(conversation: Conversation, rest: str) -> None:
    for message in conversation.messages:
        print_piece(f"{message['role']}: {message['content']}\n")


def _save(conversation: Conversation, rest: str) -> None:
    """Write the messages as a request of the chat API. An existing file is not overwritten."""
    if not rest:
        raise UserError("/save", "a file is missing; allowed: /save FILE")
    path = Path(os.path.expanduser(rest))  # pathlib fails for the home of an unknown user
    fields = gather_structure(conversation.sampling)
    content = {"model": conversation.model.name, "messages": conversation.messages, **fields}
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
    except FileExistsError:
        raise UserError("/save", f"{path} exists; allowed: a new file") from None
    except OSError as error:
        raise UserError("/save", f"{path}: {error.strerror}") from None
    click.echo(f"(saved in {path})", err=True)


def _set(conversation: Conversation, rest: str) -> None:
    """Show the settings, or change one from the next turn on. Without a value it is as the model's file says."""
    if not rest:
        for option_name, option in _OPTIONS.items():
            if option.field in conversation.sampling:
                click.echo(f"{option_name}: {json.dumps(conversation.sampling[option.field])}")
        return
    name, _, text = rest.partition(" ")
    option_named = _OPTIONS.get(name.removeprefix("--").replace("_", "-"))
    if option_named is None:
        raise UserError("/set", f"{name!r} is no setting; allowed: {', '.join(_OPTIONS)}")
    fields = {**conversation.sampling}
    fields.pop(option_named.field, None)
    if text.strip():
        value = _parse_value(option_named, name, text.strip())
        if value is not None:
            fields[option_named.field] = value
    gather_structure(fields)  # two forms of an answer are refused
    conversation.sampling.clear()
    conversation.sampling.update(fields)


def _parse_value(option: FieldOption, name: str, text: str) -> Any:
    """Return the value of a field; None for a flag that is off."""
    try:
        if option.kind is bool:
            if text not in _ON:
                raise UserError(name, f"{text!r} is not allowed; allowed: on, off")
            return option.set_to if _ON[text] else None
        parts = shlex.split(text) if option.multiple else [text]
        values = [option.kind(part) for part in parts]
    except click.BadParameter as error:
        raise UserError(name, error.message) from None
    except ValueError:
        raise UserError(name, f"{text!r} is not allowed; allowed: {_allowed(option)}") from None
    return field_value(option, values if option.multiple else values[0])


def _allowed(option: FieldOption) -> str:
    return "a whole number" if option.kind is int else "text, with its quotes closed"


def _quit(conversation: Conversation, rest: str) -> None:
    """Do nothing: the loop ends at this command."""


COMMANDS = {
    "/new": SlashCommand("", "start a new conversation", _start_again),
    "/undo": SlashCommand("", "forget the last question and its answer", _undo),
    "/history": SlashCommand("", "show the conversation", _show_history),
    "/save": SlashCommand("FILE", "write the conversation as a request in JSON", _save),
    "/set": SlashCommand("[NAME [VALUE]]", "show settings, or change one; no VALUE: default", _set),
    "/help": SlashCommand("", "show these commands", _show_help),
    QUIT: SlashCommand("", "end the chat; so does Ctrl-D", _quit),
}
