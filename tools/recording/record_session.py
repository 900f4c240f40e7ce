"""Record session.cast and draw session.svg in docs/pictures: `up`, `chat`, a kill in mid-answer, `status`, `drain`.

    make recording        (a minute; or .venv/bin/python -m tools.recording.record_session [--draw])

Three shells on pseudo-terminals are typed to as a person would. Nothing on the screen is made up. An answer with a lost
or doubled number ends the recording with an error and writes no file. `--draw` only draws the picture again. Where one
of the ports 8000 to 8003 is taken, the session runs in a network namespace of its own (needs root).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.ci.newcomer.checks import counts
from tools.recording.cast import Cast, read_cast
from tools.recording.panes import Pane, Recorder
from tools.recording.pseudo_terminal import CTRL_C, PseudoTerminal, TerminalError
from tools.recording.svg import READY, STILL, draw

ROOT = Path(__file__).resolve().parents[2]
CAST, PICTURE = (ROOT / "docs" / "pictures" / name for name in ("session.cast", "session.svg"))
TITLE = "ModelSwarm: a server is killed in the middle of an answer"
COLUMNS = 100
PANES = (  # title and rows of each terminal
    ("terminal 1: the swarm", 8),
    ("terminal 2: a chat", 8),
    ("terminal 3: a kill, a drain", 11),
)
DOCUMENT = "examples/counting.yaml"
FIRST_RANGE, KILL_RANGE, DRAIN_RANGE = (3, 9), (1, 150), (151, 250)
KILL_AT, DRAIN_AT = 45, 155  # numbers of these answers
PROMPT, CHAT_PROMPT = r"^\$ $", r"^> $"
SECONDS_PER_KEY = 0.04
SECONDS_PER_LOOK = 0.05  # frames of the recording
SECONDS_TO_READ = 2.5
SECONDS = 300.0  # for any answer of the programs, on a slow machine
PORTS = (8000, 8001, 8002, 8003)
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


class SessionError(RuntimeError):
    """The session did not go as the recording is to show it."""


class Session:
    """The three shells, and what is done in them."""

    def __init__(self, recorder: Recorder, shells: Sequence[PseudoTerminal]) -> None:
        self._recorder = recorder
        self._swarm, self._chat, self._shell = shells

    def play(self) -> None:
        self._start()
        self._kill_in_mid_answer()
        self._run("modelswarm status")
        time.sleep(SECONDS_TO_READ)
        self._drain_in_mid_answer()
        self._run("clear; modelswarm status")
        time.sleep(SECONDS_TO_READ)
        self._end()

    def _start(self) -> None:
        command, start = f"modelswarm up {DOCUMENT}", len(self._swarm.text)
        self._type(self._swarm, f"{command}\r")
        found = self._swarm.wait_for(rf"ready: counting at|{PROMPT}", SECONDS, start + len(command))
        if "ready" not in found[0]:
            raise SessionError(f"{command} has ended: {self._swarm.text[start:].strip()}")
        self._recorder.mark(READY)
        self._type(self._chat, "modelswarm chat\r")
        self._chat.wait_for(CHAT_PROMPT, SECONDS)
        self._wait_answer(*self._ask(FIRST_RANGE))

    def _kill_in_mid_answer(self) -> None:
        """Kill the last server of the chat's route by its process id, while the answer runs."""
        server = self._route()[-1]
        pid = self._pid(server)
        self._type(self._shell, f"kill -9 {pid}   # {server}")
        asked = self._ask(KILL_RANGE)
        self._chat.wait_for(rf"\b{KILL_AT}\s", SECONDS, asked[1])
        self._shell.type("\r")
        self._recorder.mark(f"kill: {server}")
        self._wait_answer(*asked)
        self._recorder.mark(f"{STILL}: {KILL_RANGE[0]} to {KILL_RANGE[1]}")
        killed = self._swarm.wait_for("SIGKILL", SECONDS).start()
        self._swarm.wait_for(f"{server}: ready", SECONDS, killed)

    def _drain_in_mid_answer(self) -> None:
        """Drain the first server of the chat's route, while another answer runs."""
        server = self._route()[0]
        self._run("clear")
        self._type(self._shell, f"modelswarm drain {server}")
        asked = self._ask(DRAIN_RANGE)
        self._chat.wait_for(rf"\b{DRAIN_AT}\s", SECONDS, asked[1])
        start = len(self._shell.text)
        self._shell.type("\r")
        self._recorder.mark(f"drain: {server}")
        self._wait_answer(*asked)
        self._recorder.mark(f"{STILL}: {DRAIN_RANGE[0]} to {DRAIN_RANGE[1]}")
        self._shell.wait_for(rf"{server}: empty", SECONDS, start)
        self._shell.wait_for(PROMPT, SECONDS, start)
        time.sleep(SECONDS_TO_READ)

    def _end(self) -> None:
        self._type(self._chat, "/quit\r")
        time.sleep(1.0)
        self._swarm.type(CTRL_C)
        self._swarm.wait_for("stopped", SECONDS)
        self._recorder.mark("end")

    def _ask(self, numbers: tuple[int, int]) -> tuple[tuple[int, int], int]:
        """Type a question; return its numbers and the place of the answer."""
        question = f"Count from {numbers[0]} to {numbers[1]}."
        start = len(self._chat.text)
        self._type(self._chat, question)
        self._chat.wait_for(re.escape(question), SECONDS, start)
        self._chat.type("\r")
        return numbers, len(self._chat.text)

    def _wait_answer(self, numbers: tuple[int, int], start: int) -> None:
        end = self._chat.wait_for(CHAT_PROMPT, SECONDS, start).start()
        answer = self._chat.text[start:end]
        if fault := counts(*numbers)(answer):
            raise SessionError(f"{fault}: {answer}")

    def _run(self, command: str) -> None:
        start = len(self._shell.text)
        self._type(self._shell, f"{command}\r")
        self._shell.wait_for(PROMPT, SECONDS, start + len(command))

    def _type(self, terminal: PseudoTerminal, keys: str) -> None:
        terminal.type(keys, SECONDS_PER_KEY)

    def _route(self) -> list[str]:
        """Return the servers of the only session."""
        [session] = fetch_status()["sessions"]
        return [hop["server"] for hop in session["route"]]

    def _pid(self, server: str) -> int:
        [pid] = [each["pid"] for each in fetch_status()["servers"] if each["server"] == server]
        return int(pid)


def fetch_status() -> dict[str, Any]:
    """Return `status --json`, which the recording does not show."""
    command = (ROOT / ".venv/bin/modelswarm", "status", "--json")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="record_session", description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw the picture again")
    parser.add_argument("--own-network", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if not chosen.draw:
        if chosen.own_network:
            start_loopback()
        elif taken := taken_ports():
            if not can_have_network():
                return fail(
                    f"ports {taken} are taken; allowed: end what listens there, or run as root on Linux, "
                    "which gives the session a network of its own"
                )
            return subprocess.call(("unshare", "--net", sys.executable, "-m", *MODULE))
        try:
            record().write(CAST)
        except (SessionError, TerminalError) as error:
            return fail(f"no file was written: {error}")
    PICTURE.write_text(draw(read_cast(CAST)), encoding="utf-8")
    for file in (CAST, PICTURE):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1000:.0f} kB")
    return 0


def record() -> Cast:
    """Play the session and return its recording."""
    panes = [Pane(title, rows, COLUMNS) for title, rows in PANES]
    recorder = Recorder(panes, TITLE)
    with ExitStack() as stack:
        environment = stack.enter_context(shell_environment())
        shells = [stack.enter_context(open_shell(pane, recorder, environment)) for pane in panes]
        for shell in shells:
            shell.wait_for(PROMPT, SECONDS)
        with frames(recorder):
            Session(recorder, shells).play()
    return recorder.cast


def open_shell(pane: Pane, recorder: Recorder, environment: dict[str, str]) -> PseudoTerminal:
    return PseudoTerminal(
        ("bash", "--norc", "--noprofile", "-i"),
        environment,
        pane.rows,
        pane.columns,
        ROOT,
        lambda piece: recorder.feed(pane, piece),
    )


@contextmanager
def shell_environment() -> Iterator[dict[str, str]]:
    """Give a shell's environment without this person's files; `status --json` of this process finds the same swarm."""
    folder = tempfile.mkdtemp(prefix="modelswarm-recording-")
    found = {"HOME": folder, "XDG_RUNTIME_DIR": folder, "XDG_STATE_HOME": folder}
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        yield {
            **found,
            "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PS1": "$ ",
            "TERM": "xterm-256color",
            "LANG": "C.UTF-8",
            "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def frames(recorder: Recorder) -> Iterator[None]:
    """Let the recorder look at the screen many times a second."""
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(SECONDS_PER_LOOK):
            recorder.take()

    looking = threading.Thread(target=take)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()


def fail(message: str) -> int:
    print(f"record_session: {message}", file=sys.stderr)
    return 1


def taken_ports() -> list[int]:
    return [port for port in PORTS if is_taken(port)]


def is_taken(port: int) -> bool:
    with socket.socket() as channel:
        return channel.connect_ex(("127.0.0.1", port)) == 0


def can_have_network() -> bool:
    """Return whether a network namespace can be made here."""
    try:
        return subprocess.run(("unshare", "--net", "true"), capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def start_loopback() -> None:
    """Switch `lo` of a new network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        fcntl.ioctl(channel, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


MODULE = ("tools.recording.record_session", "--own-network")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
