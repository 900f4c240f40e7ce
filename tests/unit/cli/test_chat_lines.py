"""Lines of a chat: prompts that are no output, and answers that are shown again."""

from __future__ import annotations

import io
import os
import pty
import sys
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from modelswarm.cli.chat.conversation import Conversation
from modelswarm.cli.chat.printing import TextPrinter
from modelswarm.cli.chat.run import _run_turn
from modelswarm.cli.chat.slash_commands import run_command
from modelswarm.cli.terminal.line_editing import LineReader
from modelswarm.client.api import Client, ServedModel
from modelswarm.errors import UserError


class Screen(io.StringIO):
    """Output to a terminal."""

    @override
    def isatty(self) -> bool:
        return True


def test_prompt_is_no_part_of_piped_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person types, and a program reads the lines of `chat --json`."""
    screen, keyboard = pty.openpty()
    os.write(screen, b"hello\n")
    with os.fdopen(keyboard) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        assert LineReader(tmp_path / "history").read_line("> ") == "hello"
    os.close(screen)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "> ")


def test_history_shows_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's text could clear the screen, or write a line of its own choice."""
    screen = Screen()
    conversation = conversation_of(Conversation)
    conversation.messages.append({"role": "assistant", "content": "\x1b[2Jhi"})
    monkeypatch.setattr(sys, "stdout", screen)
    run_command(conversation, "/history")
    assert screen.getvalue() == "assistant: ·[2Jhi\n"


class Interrupted(Conversation):
    @override
    def run_turn(self, text: str) -> None:
        raise KeyboardInterrupt


def conversation_of(kind: type[Conversation]) -> Conversation:
    client: Any = None
    return kind(client, ServedModel("m"), None, {}, None, TextPrinter)


def test_ctrl_c_ends_a_chat_that_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of the questions that follow would have to be interrupted."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("the next question\n"))
    with pytest.raises(KeyboardInterrupt):
        _run_turn(conversation_of(Interrupted), "one")
    monkeypatch.setattr(sys, "stdin", Screen())
    assert _run_turn(conversation_of(Interrupted), "one") == 0


def test_save_for_an_unknown_user_is_one_sentence(tmp_path: Path) -> None:
    conversation = conversation_of(Conversation)
    with pytest.raises(UserError, match=r"^/save: ~unknown-user/chat: No such file"):
        run_command(conversation, "/save ~unknown-user/chat")


def test_question_with_a_wrong_setting_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """The next question would follow one without an answer, which many templates refuse."""
    with Client("http://127.0.0.1:9") as client:
        settings = {"min_tokens": -1}
        conversation = Conversation(client, ServedModel("m"), None, settings, None, TextPrinter)
        assert _run_turn(conversation, "Hi") == 2
    assert "min_tokens: -1 is not allowed" in capsys.readouterr().err
    assert conversation.messages == []
