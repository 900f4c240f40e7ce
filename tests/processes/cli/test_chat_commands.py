"""The commands of `modelswarm chat`: undo, set, save, history, messages of several lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.processes.swarm import MODEL, Endpoints, HashSwarm

pytestmark = pytest.mark.full

FIELDS = {"model": MODEL, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
FLAGS = ("--greedy", "--max-tokens", "12", "--ignore-eos")


def chat(
    gateway: Endpoints, typed: str, *flags: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        (sys.executable, "-m", "modelswarm.cli", "chat", *FLAGS, *flags, "--url", gateway.url),
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def answers(gateway: Endpoints, typed: str, *flags: str) -> list[str]:
    lines = chat(gateway, typed, "--json", *flags).stdout.splitlines()
    return [json.loads(line)["text"] for line in lines]


def asked(gateway: Endpoints, *texts: str, **fields: Any) -> str:
    """Return the answer to a conversation of the user's and the assistant's texts in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {**FIELDS, "messages": messages, **fields}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_undo_forgets_the_last_turn(gateway: Endpoints) -> None:
    first, second, third = answers(gateway, "one\ntwo\n/undo\nthree\n")

    assert first == asked(gateway, "one")
    assert second == asked(gateway, "one", first, "two")
    assert third == asked(gateway, "one", first, "three")


def test_undo_without_a_turn_is_refused(gateway: Endpoints) -> None:
    done = chat(gateway, "one\n/undo\n/undo\n", "--system", "be brief", code=2)

    assert done.stderr.splitlines()[-2:] == [
        "(undone: one)",
        "Error: /undo: there is no turn yet; allowed: after a question",
    ]


def test_setting_counts_from_the_next_turn_on(gateway: Endpoints) -> None:
    typed = "hi\n/new\n/set max-tokens 3\nhi\n/new\n/set max_tokens 12\n/set stop e a\n/set\nhi\n"
    done = chat(gateway, typed + "/set stop\n/set\n", "--json")

    lines = done.stdout.splitlines()
    assert lines.count('stop: ["e", "a"]') == 1 and lines.count("max-tokens: 12") == 2
    whole, short, stopped = (json.loads(line) for line in lines if line.startswith("{"))
    assert whole["usage"]["completion_tokens"] == 12
    assert short["text"] == asked(gateway, "hi", max_tokens=3)
    assert stopped["text"] == asked(gateway, "hi", stop=["e", "a"])


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/set colour red", "/set: 'colour' is no setting; allowed: max-tokens, min-tokens, "),
        ("/set top-k few", "top-k: 'few' is not allowed; allowed: a whole number"),
        ("/set min-p nan", "min-p: nan is not allowed; allowed: a number"),
        ("/set ignore-eos yes", "ignore-eos: 'yes' is not allowed; allowed: on, off"),
        ('/set stop "a', "stop: '\"a' is not allowed; allowed: text, with its quotes closed"),
        ("/set logit-bias 5", "logit-bias: '5' is not allowed; allowed: ID=BIAS"),
        ("/set json-schema {", "--json-schema: not JSON ("),
        ("/set regex a\n/set choice b", "--regex: contradicts --choice; allowed: one of them"),
        ("/save", "/save: a file is missing; allowed: /save FILE"),
        ("/save absent/folder/x", "/save: absent/folder/x: No such file or directory"),
        ("/new now", "/new: 'now' is not allowed; it has no arguments"),
    ],
)
def test_wrong_command_is_one_sentence_and_the_chat_goes_on(
    gateway: Endpoints, line: str, sentence: str
) -> None:
    done = chat(gateway, f"{line}\n/help\n", code=2)

    assert done.stderr.startswith(f"Error: {sentence}")
    assert len(done.stderr.splitlines()) == 1
    assert "/undo" in done.stdout


def test_saved_conversation_is_a_request(gateway: Endpoints, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"

    done = chat(
        gateway, f"one\n/set stop x\n/save {path}\n/save {path}\n", "--system", "be brief", code=2
    )

    assert done.stderr.splitlines()[-2:] == [
        f"(saved in {path})",
        f"Error: /save: {path} exists; allowed: a new file",
    ]
    saved = json.loads(path.read_text(encoding="utf-8"))
    roles = [message["role"] for message in saved["messages"]]
    assert roles == ["system", "user", "assistant"] and saved["stop"] == ["x"]
    saved["messages"].append({"role": "user", "content": "two"})
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=saved, timeout=60)
    assert answer.status_code == 200, answer.text


def test_refused_message_is_told_by_the_exit_code(gateway: Endpoints) -> None:
    done = chat(gateway, "/set temperature 99\none\n/set temperature 0\ntwo\n", code=2)

    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1 and "temperature" in errors[0]
    assert done.stdout.splitlines()[0] == asked(gateway, "two"), "nothing for the first"


def test_message_of_several_lines_is_one_question(gateway: Endpoints) -> None:
    expected = asked(gateway, "one\ntwo\nthree")

    assert answers(gateway, "one\\\ntwo\\\nthree\n") == [expected]
    assert answers(gateway, '"""one\ntwo\nthree"""\n') == [expected]
    assert answers(gateway, '"""\none\ntwo\nthree\n"""\n/quit\nnever\n') == [expected]
    assert answers(gateway, '"""/new"""\n') == [asked(gateway, "/new")]
    assert answers(gateway, '"""one\ntwo\nthree\n') == [expected], "the end of the input ends it"


def test_history_shows_the_conversation(gateway: Endpoints) -> None:
    done = chat(gateway, "one\n/history\n", "--system", "be brief")

    assert f"system: be brief\nuser: one\nassistant: {done.stdout[:5]}" in done.stdout


# ---- servers that are lost between two messages of a piped chat


class PipedChat:
    """A chat whose messages a program writes; answers are lines of JSON."""

    def __init__(self, gateway: Endpoints) -> None:
        command = (sys.executable, "-m", "modelswarm.cli", "chat", *FLAGS, "--json")
        self.process = subprocess.Popen(
            (*command, "--url", gateway.url),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read_answer(self) -> str:
        assert self.process.stdout is not None
        text: str = json.loads(self.process.stdout.readline())["text"]
        return text

    def ask(self, line: str) -> str:
        self.write(line)
        return self.read_answer()


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[HashSwarm]:
    """One server for all blocks: without it no question can be answered."""
    with HashSwarm(tmp_path) as swarm:
        swarm.server("s0", "0:4")
        swarm.servers_ready("s0")
        yield swarm


def restart(swarm: HashSwarm, name: str) -> None:
    (swarm.members / f"{name}.json").unlink()
    swarm.server(name, "0:4")


def test_piped_question_waits_for_a_server(lonely: HashSwarm) -> None:
    gateway = lonely.gateway("--hold-limit", "0.5")
    chat = PipedChat(gateway)
    with chat.process:
        first = chat.ask("one")
        lonely.kill("s0")
        chat.write("two")
        eventually("the question is refused", lambda: is_refused(gateway))
        restart(lonely, "s0")
        second = chat.read_answer()
        chat.write("/quit")
    assert chat.process.returncode == 0
    assert second == asked(gateway, "one", first, "two")


def is_refused(gateway: Endpoints) -> bool:
    return gateway.metric("modelswarm_gateway_requests_total", code="503") >= 1


def test_turn_after_undo_survives_the_kill_of_its_server(lonely: HashSwarm) -> None:
    gateway = lonely.gateway()
    chat = PipedChat(gateway)
    with chat.process:
        first = chat.ask("one")
        chat.ask("two")
        chat.write("/undo")
        lonely.kill("s0")
        restart(lonely, "s0")
        third = chat.ask("three")
        chat.write("/quit")
    assert chat.process.returncode == 0
    assert third == asked(gateway, "one", first, "three")
