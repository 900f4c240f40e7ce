"""Parsing of targets and flags, exit codes and the log, shared by the command lines of all processes."""

from __future__ import annotations

import subprocess
import sys
from typing import NoReturn

import click
import pytest

from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.process.command_line import (
    USER_ERROR_EXIT_CODE,
    read_flags,
    run_with_exit_code,
    split_target,
)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_target_splits_into_host_and_port(target: str, parts: tuple[str, int]) -> None:
    assert split_target("--http", target) == parts


@pytest.mark.parametrize("target", ["8000", ":8000", "a:", "a:b", "a:65536", "a:-1", "a:٣", ""])
def test_invalid_target_is_refused_with_flag_and_example(target: str) -> None:
    with pytest.raises(UserError, match=r"^--http: .* is not HOST:PORT, like 10\.0\.0\.7:7000$"):
        split_target("--http", target, example="10.0.0.7:7000")


def _raise(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UserError("max_length", "is too large"), "--max_length: is too large"),
        (ModelSwarmError("two\nlines"), "two lines"),
        (click.UsageError("no such option: --x"), "no such option: --x"),
        (click.Abort(), "interrupted"),
    ],
)
def test_user_error_prints_one_line_and_exits_with_2(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_with_exit_code("program", lambda: _raise(error), name_flag="--{}".format)
        == USER_ERROR_EXIT_CODE
        == 2
    )
    assert capsys.readouterr().err == f"program: {sentence}\n"


def test_other_errors_and_exit_codes_pass_through() -> None:
    assert run_with_exit_code("program", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        run_with_exit_code("program", lambda: 1 // 0)


def test_flags_become_settings_and_help_exits_with_0() -> None:
    command = click.Command(
        "program", params=[click.Option(["--n"], type=int)], callback=_make_settings
    )
    assert read_flags(command, complex, ["--n", "3"]) == 3j
    with pytest.raises(SystemExit) as ended:
        read_flags(command, complex, ["--help"])
    assert ended.value.code == 0


def _make_settings(n: int) -> complex:
    return complex(0, n)


LOGGED_REQUESTS = """
import http.server, logging, threading
import httpx, httpx2
from modelswarm.process.logs import start_log

class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None: ...

start_log("s0")
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
    threading.Thread(target=server.serve_forever).start()
    for library in (httpx, httpx2):
        library.head(f"http://127.0.0.1:{server.server_port}/?Signature=secret", trust_env=False)
    server.shutdown()
logging.getLogger("modelswarm").info("serves")
"""


def test_log_has_no_urls_of_http_requests() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGGED_REQUESTS],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "s0 INFO serves" in done.stderr
    assert "secret" not in done.stderr
