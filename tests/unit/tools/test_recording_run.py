"""A recording that cannot go on ends at once, and says why in a sentence; its terminals close without a wait."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.recording import record_session
from tools.recording.panes import Pane, Recorder
from tools.recording.pseudo_terminal import PseudoTerminal
from tools.recording.record_session import PANES, PROMPT, Session, SessionError, main, open_shell

SHELL = ("bash", "--norc", "--noprofile", "-i")
ENVIRONMENT = {"PS1": "$ ", "TERM": "xterm", "PATH": os.environ["PATH"]}


def test_interactive_shell_ends_when_its_terminal_closes() -> None:
    """It ignores SIGTERM: each of the three cost 30 s, and was killed then."""
    with PseudoTerminal(SHELL, ENVIRONMENT) as terminal:
        terminal.wait_for(PROMPT, 60)
    assert terminal.wait_end(60) == -signal.SIGHUP


def test_swarm_that_does_not_start_ends_the_recording(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    (tmp_path / "bash").symlink_to(bash)
    panes = [Pane(title, rows, 100) for title, rows in PANES]
    recorder = Recorder(panes, "")
    with ExitStack() as stack:
        shells = [
            stack.enter_context(open_shell(pane, recorder, ENVIRONMENT | {"PATH": str(tmp_path)}))
            for pane in panes
        ]
        for shell in shells:
            shell.wait_for(PROMPT, 60)
        with pytest.raises(SessionError, match=r"modelswarm up .* has ended: (.|\n)*not found"):
            Session(recorder, shells).play()


def test_taken_port_without_own_network_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no `unshare`
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(record_session, "PORTS", (port,))
        assert main([]) == 1
    assert f"ports [{port}] are taken; allowed: " in capsys.readouterr().err
