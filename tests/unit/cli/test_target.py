"""The options that name a gateway: `--name`, `--url` and `--admin`, and the completion of names."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from support.eventually import SECONDS
from support.ports import free_port, http_port
from typing_extensions import override

from modelswarm.cli import run
from modelswarm.cli.commands import commands
from modelswarm.cli.options.config_file import config_path
from modelswarm.cli.options.document import read_document
from modelswarm.cli.options.target import (
    AdminTarget,
    HttpTarget,
    admin_target,
    find_elsewhere,
    http_target,
)
from modelswarm.client import announcement
from modelswarm.client.announcement import announced_grpc_port
from modelswarm.errors import ModelSwarmError, UnreachableError, UserError
from modelswarm.local.run_folder import GatewayAddresses, NoSwarmError, RunFolder, RunInfo

INFO = RunInfo(
    "one", "m", 1, "127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002", "127.0.0.1:9003"
)
CLI_PAGE = Path(__file__).resolve().parents[3] / "docs" / "cli.md"
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "counting.yaml"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(announcement, "CHOICE_SECONDS", SECONDS)  # for a busy machine


@contextmanager
def running(*names: str) -> Iterator[None]:
    """Publish swarms of these names, each with a server `NAME-s0-r0`."""
    with ExitStack() as folders:
        for name in names:
            folder = RunFolder.claim(name)
            folders.callback(folder.release)
            (folder.members / f"{name}-s0-r0.json").write_text("{}")
            (folder.members / f".{name}-s0-r1.json.7.tmp").write_text("")
            folder.publish(replace(INFO, name=name))
        yield


def test_only_swarm_of_the_machine_needs_no_name() -> None:
    with running("one"):
        assert http_target(None, None).base == "http://127.0.0.1:9000"
        assert admin_target(None, None, None) == AdminTarget("127.0.0.1:9003", INFO, "gateway")


def test_several_swarms_are_listed_by_the_error() -> None:
    with running("one", "two"):
        with pytest.raises(UserError, match=r"--name: several swarms run here.*one, two"):
            http_target(None, None)
        assert admin_target("two", None, None).run == replace(INFO, name="two")


def test_no_swarm_tells_how_to_start_one() -> None:
    with pytest.raises(NoSwarmError, match="start one with `modelswarm up FILE`"):
        admin_target(None, None, None)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("http://modelswarm-gateway", "http://modelswarm-gateway"),
        ("http://[::1]:9/", "http://[::1]:9"),
        ("http://host/swarm/v1", "http://host/swarm"),
    ],
)
def test_url_is_taken_with_and_without_v1(url: str, base: str) -> None:
    assert http_target(None, url).base == base


class Announcing(BaseHTTPRequestHandler):
    """Announces an admin port at /version, like a gateway."""

    answer = b'{"version": "1", "grpc_port": 9010, "admin_port": 9011}'

    def do_GET(self) -> None:
        self.send_response(200 if self.path in ("/version", "/swarm/version") else 404)
        self.end_headers()
        self.wfile.write(self.answer)

    @override
    def log_message(self, *parts: object) -> None:
        """Print nothing."""


class Foreign(Announcing):
    answer = b"<html>\xff</html>"


def test_url_tells_the_admin_port_of_its_gateway() -> None:
    with http_port(Announcing) as port:
        for path in ("", "/v1", "/swarm", "/swarm/v1/"):
            found = admin_target(None, f"http://127.0.0.1:{port}{path}", None)
            assert found == AdminTarget("127.0.0.1:9011")
    with http_port(Foreign) as port, pytest.raises(UnreachableError, match="not the address of a"):
        admin_target(None, f"http://127.0.0.1:{port}", None)
    with pytest.raises(UnreachableError, match=r"no gateway answers at http://127\.0\.0\.1:"):
        admin_target(None, f"http://127.0.0.1:{free_port()}", None)


def test_first_gateway_that_answers_is_taken() -> None:
    with http_port(Announcing) as port, running("one"):
        folder = RunFolder.claim("two")
        second = GatewayAddresses(
            "gateway2", f"127.0.0.1:{port}", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:9011"
        )
        lost = replace(INFO, name="two", http=f"127.0.0.1:{free_port()}", other_gateways=(second,))
        folder.publish(lost)
        try:
            assert http_target("two", None).base == f"http://127.0.0.1:{port}"
            assert admin_target("two", None, None) == AdminTarget(
                "127.0.0.1:9011", lost, "gateway2"
            )
            folder.publish(replace(lost, http=second.http))
            assert admin_target("two", None, None).gateway == "gateway"
            folder.publish(replace(lost, other_gateways=(replace(second, http=lost.http),)))
            assert admin_target("two", None, None).gateway == "gateway"
        finally:
            folder.release()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost",
        "127.0.0.1:8001",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host?x",
        "http://[::1",
    ],
)
def test_url_of_another_form_is_refused(url: str) -> None:
    for call in (lambda: http_target(None, url).base, lambda: admin_target(None, url, None)):
        with pytest.raises(UserError, match=r"--url: .*allowed: the gateway's HTTP address"):
            call()


def test_admin_address_wins_over_the_default_port() -> None:
    assert admin_target(None, "http://host", "other:7") == AdminTarget("other:7")
    assert admin_target(None, "https://host", "other:7") == AdminTarget("other:7")
    assert admin_target(None, None, "other:7") == AdminTarget("other:7")


def test_https_needs_an_admin_address() -> None:
    assert http_target(None, "https://host").base == "https://host"
    with pytest.raises(UserError, match="--admin: needed with an https:// address"):
        admin_target(None, "https://host", None)


@pytest.mark.parametrize("admin", ["http://host:8001", "host", "host:x", ":1"])
def test_admin_address_of_another_form_is_refused(admin: str) -> None:
    with pytest.raises(UserError, match="--admin: "):
        admin_target(None, None, admin)


def test_drain_option_without_an_effect_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "s", "--undo", "--wait", "5"]) == 2

    assert "--wait has an effect only without --undo" in capsys.readouterr().err


def test_name_beside_an_address_is_refused() -> None:
    with pytest.raises(UserError, match="either --name or --url"):
        http_target("one", "http://host")
    with pytest.raises(UserError, match="either --name or --admin"):
        admin_target("one", None, "host:1")


def completions(*arguments: str, incomplete: str = "") -> list[str]:
    shell = ShellComplete(commands, {}, "modelswarm", "_MODELSWARM_COMPLETE")
    return [item.value for item in shell.get_completions(list(arguments), incomplete)]


def test_names_of_swarms_and_servers_are_completed() -> None:
    with running("one", "two"):
        assert completions("status", "--name") == ["one", "two"]
        assert completions("chat", "--name", incomplete="t") == ["two"]
        assert completions("drain") == ["one-s0-r0", "two-s0-r0"]
        assert completions("drain", "--name", "two") == ["two-s0-r0"]
        assert completions("drain", incomplete="one-") == ["one-s0-r0"]
    assert completions("drain") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0

    assert f"_MODELSWARM_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "cmd"]) == 2

    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_name_of_up_replaces_that_of_the_document() -> None:
    assert read_document(EXAMPLE).metadata.name == "counting"

    document = read_document(EXAMPLE, "other")

    assert (document.metadata.name, document.served_name) == ("other", "other")


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "x" * 200])
def test_impossible_name_of_up_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^--name: "):
        read_document(EXAMPLE, name)


def test_taken_name_says_which_flag_changes_it() -> None:
    with (
        running("one"),
        pytest.raises(ModelSwarmError, match="give this one another name with --name"),
    ):
        RunFolder.claim("one")


def test_foreign_run_file_is_passed_over() -> None:
    with running("one"):
        folder = RunFolder.claim("two")
        whole = json.dumps(asdict(replace(INFO, name="two")))
        strange = [whole.replace("[]", wrong) for wrong in ("1", "[1]", '[{"name": 1}]')]
        for content in ("[]", "{", '{"name": "two"}', '{"pid": "x"}', *strange):
            (folder.path / "run.json").write_text(content)
            assert http_target(None, None).base == "http://127.0.0.1:9000"
        folder.release()
    assert os.listdir(folder.path.parent) == []


def write_config(content: str) -> Path:
    path = config_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def test_option_variable_file_and_local_swarm_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running("one"):
        assert http_target(None, None) == HttpTarget("http://127.0.0.1:9000")
        write_config('url = "http://file/v1"\nmodel = "m"\nadmin = "file:1"\n')
        assert http_target(None, None) == HttpTarget("http://file", "m")
        assert admin_target(None, None, None) == AdminTarget("file:1")
        monkeypatch.setenv("MODELSWARM_URL", "https://variable/")
        assert http_target(None, None) == HttpTarget("https://variable")
        with pytest.raises(UserError, match="--admin: needed with an https:// address"):
            admin_target(None, None, None)
        assert http_target(None, "http://option") == HttpTarget("http://option")
        assert http_target("one", None) == HttpTarget("http://127.0.0.1:9000")
        assert admin_target(None, None, "option:2") == AdminTarget("option:2")
        assert find_elsewhere("one", None) is None


def test_first_url_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = f"http://127.0.0.1:{free_port()}"
    with http_port(Announcing) as port:
        monkeypatch.setenv("MODELSWARM_URL", f"{lost}, http://127.0.0.1:{port}/v1")
        assert http_target(None, None) == HttpTarget(f"http://127.0.0.1:{port}")
        assert admin_target(None, None, None) == AdminTarget("127.0.0.1:9011")
    monkeypatch.setenv("MODELSWARM_URL", f"{lost},http://127.0.0.1:{port}")
    assert http_target(None, None) == HttpTarget(lost), "the error names the first one"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("url = x", r"config\.toml: not TOML: .*line 1"),
        ("url = 'http://[::1'", r"config\.toml: url: .* is not a URL"),
        ("url = 8000", r"config\.toml: url: 8000 is not allowed; allowed: text in quotes"),
        ("ulr = 'http://x'", r"config\.toml: ulr: unknown key; did you mean url\?"),
        ("colour = 'x'", r"colour: unknown key; allowed: url, admin, model"),
        ("model = 'm'", r"config\.toml: url: required beside model"),
    ],
)
def test_wrong_config_file_is_named_with_its_key(content: str, sentence: str) -> None:
    write_config(content)

    with pytest.raises(UserError, match=sentence):
        http_target(None, None)
    assert http_target(None, "http://option").base == "http://option", "the file is not read"


def test_folder_in_place_of_the_config_file_is_named() -> None:
    config_path().mkdir(parents=True)

    with pytest.raises(UserError, match=r"config\.toml: Is a directory; allowed: a file of TOML"):
        http_target(None, None)


@pytest.mark.parametrize("url", ["http://a b", "http://a\tb", "http://a/\n"])
def test_url_with_a_blank_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is not the URL of a gateway"):
        http_target(None, url + "/x")


def test_wrong_url_in_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSWARM_URL", "localhost")

    with pytest.raises(UserError, match=r"^MODELSWARM_URL: 'localhost' is not the URL"):
        http_target(None, None)


def test_example_of_the_config_file_is_one() -> None:
    [example] = re.findall(r"```toml\n(.*?)```", CLI_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    write_config(example)

    assert http_target(None, None) == HttpTarget("https://swarm.example.com", "llama")
    assert admin_target(None, None, None) == AdminTarget("swarm.example.com:8003")


def test_https_gateway_is_asked_by_tls() -> None:
    first: list[bytes] = []

    def accept(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            first.append(connection.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        with pytest.raises(UnreachableError):
            announced_grpc_port(f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert first == [b"\x16"]  # a handshake
