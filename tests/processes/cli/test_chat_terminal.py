"""`modelswarm chat` on a pseudo-terminal: line editing, history, wrapped answers, a killed gateway, a clean end."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.models.tiny_models import make_toy
from support.processes.forked_process import fork_process
from support.processes.programs.terminal import Terminal
from support.processes.swarm import ENDLESS, HASH, plan

from modelswarm.client.swarm import SwarmClient
from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.local.swarm import LocalSwarm

pytestmark = pytest.mark.full

PROMPT = "> "
UP, RIGHT, CTRL_A, CTRL_D, CTRL_R = "\x1b[A", "\x1b[C", "\x01", "\x04", "\x12"
SHORT, LONG = 500, 6000  # tokens of an answer; the long one takes seconds
NO_TOKEN = 9999  # an end token that the model never samples


@dataclasses.dataclass(frozen=True, slots=True)
class Chats:
    """A swarm, and the environment of its chats."""

    swarm: LocalSwarm
    environment: dict[str, str]

    def open(self, tokens: int = SHORT, width: int = 80) -> Terminal:
        arguments = ("chat", "--greedy", "--max-tokens", str(tokens))
        return Terminal(arguments, self.environment, width)

    @property
    def sessions(self) -> int:
        with SwarmClient(self.swarm.admin) as client:
            return len(client.fetch_snapshot().sessions)


def endless_model(folder: Path) -> Path:
    """Write a model for the hash function, without an end token that it samples."""
    made = make_toy(folder, length=ENDLESS)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": NO_TOKEN},
        "generation_config.json": {"eos_token_id": NO_TOKEN},
        "tokenizer_config.json": {"eos_token": None},
    }
    for name, fields in changes.items():
        path = made / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **fields}))
    return made


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chats]:
    folder = endless_model(tmp_path_factory.mktemp("model"))
    environment = {
        "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("runtime")),
        "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
        settings = dataclasses.replace(HASH, publish=True, lease=2.0, restart_limit=0.1)
        sessions = {"maxLength": ENDLESS, "concurrent": 4}
        planned = plan(folder, spans=1, replicas=1, sessions=sessions)
        with LocalSwarm(planned, settings, spawn=fork_process) as swarm:
            yield Chats(swarm, environment)


def end_of_answer(tokens: int) -> str:
    return f"(stopped after {tokens} tokens; --max-tokens N allows more)"


def read_answer(terminal: Terminal, tokens: int = SHORT) -> str:
    """Send a question, and return the output up to the remark at the answer's end."""
    terminal.wait_for(PROMPT)
    terminal.type("go\r")
    start = terminal.wait_for("go\n")
    remark = end_of_answer(tokens)
    end = terminal.wait_for(remark, start) - len(remark)
    return terminal.text[start:end]


def without_spaces(text: str) -> str:
    return re.sub(r"\s|\x1b\[\?2004[hl]", "", text)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_answer_has_no_line_wider_than_the_terminal(chats: Chats, width: int) -> None:
    with chats.open(width=width) as terminal:
        answer = read_answer(terminal)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    lines = answer.replace("\x1b[?2004l\r", "").splitlines()
    assert len(lines) > 3
    assert all(len(line) <= width for line in lines)


def test_ctrl_d_ends_the_line_and_closes_the_session(chats: Chats) -> None:
    with chats.open() as terminal:
        read_answer(terminal)
        assert chats.sessions == 1
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
        assert terminal.text.endswith("\n")
    eventually("the session is closed", lambda: chats.sessions == 0)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_hangup_and_termination_close_the_session(chats: Chats, number: signal.Signals) -> None:
    with chats.open() as terminal:
        read_answer(terminal)
        terminal.process.send_signal(number)
        assert terminal.wait_end() == 128 + number
    eventually("the session is closed", lambda: chats.sessions == 0)


def test_lines_are_edited_and_kept_in_a_private_history(chats: Chats) -> None:
    with chats.open() as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/fox\r")
        shown = terminal.wait_for("Error: /fox: there is no such command")
        terminal.wait_for(PROMPT, shown)
        terminal.type(f"{UP}{CTRL_A}{RIGHT}x\r")
        shown = terminal.wait_for("Error: /xfox: there is no such command", shown)
        terminal.wait_for(PROMPT, shown)
        terminal.type("/quit\r")
        assert terminal.wait_end() == 0
    history = Path(chats.environment["XDG_STATE_HOME"], "modelswarm", "chat_history")
    assert {"/fox", "/xfox", "/quit"} <= set(history.read_text().splitlines())
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    with chats.open() as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(f"{CTRL_R}/xf\r")
        terminal.wait_for("Error: /xfox: there is no such command")


def test_answer_continues_after_its_gateway_was_killed(chats: Chats) -> None:
    with chats.open(LONG) as terminal:
        expected = read_answer(terminal, LONG)
    with chats.open(LONG) as terminal:
        shown = terminal.wait_for(PROMPT)
        terminal.type("go\r")
        shown = terminal.wait_for("go\n", shown)
        eventually("a line of the answer", lambda: "\n" in terminal.text[shown + 20 :])
        killed = chats.swarm.kill(GATEWAY_JOB)
        remark = end_of_answer(LONG)
        end = terminal.wait_for(remark, shown) - len(remark)
        answer = terminal.text[shown:end]
        assert chats.swarm.wait_replaced(GATEWAY_JOB, killed.incarnation, 60)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    broken = r"\([^()]*;reconnectingfor90s,Ctrl-Cgivesup\)"
    assert re.search(broken, without_spaces(answer)), answer
    assert re.sub(broken, "", without_spaces(answer)) == without_spaces(expected)


def test_ctrl_c_ends_the_answer_and_not_the_chat(chats: Chats) -> None:
    with chats.open(LONG) as terminal:
        shown = terminal.wait_for(PROMPT)
        terminal.type("go\r")
        shown = terminal.wait_for("go\n", shown)
        eventually("a line of the answer", lambda: "\n" in terminal.text[shown + 20 :])
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.wait_for("(interrupted)", shown)
        shown = terminal.wait_for(PROMPT, shown)
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.wait_for("(/quit or Ctrl-D ends the chat)", shown)
        shown = terminal.wait_for(PROMPT, shown)
        terminal.type("/undo\r")
        terminal.wait_for("(undone: go)", shown)
        terminal.type("go\r")
        terminal.wait_for(end_of_answer(LONG), shown)
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    eventually("the session is closed", lambda: chats.sessions == 0)


def test_refused_history_folder_is_only_a_note(chats: Chats, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with Terminal(("chat",), chats.environment | {"XDG_STATE_HOME": str(blocked)}) as terminal:
        terminal.wait_for("note: the history is not saved in ")
        terminal.wait_for(PROMPT)
        terminal.type("/help\r")
        terminal.wait_for("start a new conversation")
