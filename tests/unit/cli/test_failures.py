"""Errors of commands: one sentence on stderr, an exit code, no traceback; for any input."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import click
import pytest
from support.ports import http_port
from typing_extensions import override

from modelswarm.cli import run
from modelswarm.cli.entry.failures import DEBUG_VARIABLE, report_failure
from modelswarm.cli.entry.standard_streams import prepare_streams, require_utf8
from modelswarm.errors import ModelSwarmError, UnavailableError, UserError
from modelswarm.local.supervisor import LOG_ROOM_BYTES, StartError, describe_full_disk

BAD_BYTES = b"caf\xe9"


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("--name", "not allowed"), 2, "Error: --name: not allowed\n"),
        (ModelSwarmError("it failed"), 1, "Error: it failed\n"),
        (UnavailableError("no server"), 1, "Error: no server\n"),
        (StartError("a wrong model", is_user_error=True), 2, "Error: a wrong model\n"),
        (StartError("it ended"), 1, "Error: it ended\n"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "Error: /x: Permission denied\n",
        ),
        (OSError(28, "No space left on device"), 1, "Error: No space left on device\n"),
        (MemoryError(), 1, "Error: out of memory\n"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_expected_error_is_one_sentence(
    error: BaseException, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(error) == code
    assert capsys.readouterr().err == sentence


def test_unexpected_error_is_one_sentence_and_70(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(KeyError("nope")) == 70

    told = capsys.readouterr().err
    assert told.startswith("Error: a bug in modelswarm: KeyError: 'nope'")
    assert f"{DEBUG_VARIABLE}=1" in told
    assert len(told.splitlines()) == 1


def test_debug_variable_adds_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")

    assert report_failure(KeyError("nope")) == 70

    assert "KeyError: 'nope'\nError: " in capsys.readouterr().err


def test_argument_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    argument = os.fsdecode(BAD_BYTES)

    with pytest.raises(UserError, match=r"argument 'caf\\xe9': not UTF-8"):
        require_utf8(["generate", argument])

    path = tmp_path / argument
    path.write_text("")
    require_utf8(["plan", str(path)])  # names of files are bytes


def run_bytes(
    *arguments: str | bytes, typed: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "modelswarm.cli", *arguments],
        input=typed,
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "typed"),
    [
        (("generate", BAD_BYTES, "--url", "http://127.0.0.1:1"), b""),
        (("generate", "-", "--url", "http://127.0.0.1:1"), BAD_BYTES),
        (("plan", "-"), BAD_BYTES),
        (("plan", BAD_BYTES), b""),
        (("status", "--name", BAD_BYTES), b""),
    ],
)
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_not_utf8_are_one_sentence(
    arguments: tuple[str | bytes, ...], typed: bytes, locale: str
) -> None:
    done = run_bytes(*arguments, typed=typed, LC_ALL=locale)

    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: ")
    assert b"not UTF-8" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_closed_standard_streams_are_no_traceback() -> None:
    command = f"{sys.executable} -m modelswarm.cli plan - <&- >&-"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=300, check=False)

    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: standard input: holds 0 documents")


@pytest.mark.parametrize("flag", ["--json", "--memory=4Gi"])
def test_closed_output_pipe_is_silent(flag: str) -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "counting.yaml"
    command = f"{sys.executable} -m modelswarm.cli plan {flag} {example} | true"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=300, check=False)

    assert done.stderr == b""


def test_full_disk_of_the_output_is_one_sentence() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = f"{sys.executable} -m modelswarm.cli --help > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, timeout=300, check=False)

    assert done.stderr == b"Error: No space left on device\n"
    assert done.returncode == 1


def test_unusable_runtime_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))

    assert run(["status"]) == 2

    assert f"{tmp_path}/absent/modelswarm-{os.getuid()}: cannot be created" in (
        capsys.readouterr().err
    )


def test_full_disk_is_the_cause_of_a_failed_start(tmp_path: Path) -> None:
    assert describe_full_disk(tmp_path, 0) == f"; the disk of {tmp_path} is full (0 bytes are free)"
    assert describe_full_disk(tmp_path, LOG_ROOM_BYTES) == ""


def test_piped_input_is_utf8_in_every_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.TextIOWrapper(io.BytesIO("café".encode()), encoding="iso8859-1")
    monkeypatch.setattr(sys, "stdin", piped)
    prepare_streams()
    assert sys.stdin.read() == "café"


class OneBusySession(BaseHTTPRequestHandler):
    """A gateway whose session `busy` is answering."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m"}]}')

    def do_DELETE(self) -> None:
        if "busy" in self.path:
            self._answer(409, b'{"error": {"message": "it is answering", "code": "session_busy"}}')
        else:
            self._answer(200, b'{"deleted": true}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *parts: object) -> None:
        """Print nothing."""


def test_busy_session_leaves_no_other_one_open(capsys: pytest.CaptureFixture[str]) -> None:
    with http_port(OneBusySession) as port:
        url = f"http://127.0.0.1:{port}"
        assert run(["sessions", "close", "busy", "idle", "--url", url]) == 1
    assert capsys.readouterr().out == "busy: it is answering\nidle: closed\n"
