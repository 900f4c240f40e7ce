"""The commands against a running swarm (hash model), as typed: `status`, `generate`, `chat`, `plan`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.models.hub_server import COMMIT, serve
from support.models.tiny_models import make_model
from support.processes.forked_process import fork_process
from support.processes.swarm import HASH, plan, write_document

from modelswarm.client.swarm import SwarmClient
from modelswarm.local.run_folder import RunInfo
from modelswarm.local.swarm import LocalSwarm

pytestmark = pytest.mark.full

ESCAPE = "\x1b"


@dataclasses.dataclass(frozen=True)
class Shell:
    """Runs commands with the swarm's runtime folder in the environment, as in the terminal of its start."""

    runtime: Path
    folder: Path  # the model's
    info: RunInfo

    def run(
        self, *arguments: str, typed: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "modelswarm.cli", *arguments),
            input=typed,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime), **environment},
        )

    def output(self, *arguments: str, typed: str = "", **environment: str) -> str:
        done = self.run(*arguments, typed=typed, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keep_session(self, name: str) -> None:
        """Run one turn of a named session, which the gateway keeps afterwards."""
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 5, "session_id": name}
        answer = httpx.post(f"http://{self.info.http}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    runtime = tmp_path_factory.mktemp("runtime")
    folder = make_model(tmp_path_factory.mktemp("model"), "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        settings = dataclasses.replace(HASH, publish=True)
        swarm = LocalSwarm(plan(folder, spans=2, replicas=2), settings, spawn=fork_process)
        try:
            yield Shell(runtime, folder, swarm.start())
        finally:
            swarm.stop()


def test_status_shows_blocks_and_health_of_each_server(shell: Shell) -> None:
    shown = shell.output("status")

    assert "tiny: ready, 4 blocks" in shown
    for name, blocks in [("tiny-s0-r0", "0:2"), ("tiny-s0-r1", "0:2"), ("tiny-s1-r0", "2:4")]:
        assert re.search(rf"{name} +{blocks} +ready", shown)
    assert ESCAPE not in shown


def test_status_as_json_can_be_read_by_scripts(shell: Shell) -> None:
    status = json.loads(shell.output("status", "--json"))

    assert status["models"][0]["ready"]
    assert sorted(server["server"] for server in status["servers"]) == [
        *("tiny-s0-r0", "tiny-s0-r1", "tiny-s1-r0", "tiny-s1-r1")
    ]
    assert {server["first"] for server in status["servers"]} == {0, 2}
    assert all(server["pid"] > 0 and server["ready_seconds"] >= 0 for server in status["servers"])
    assert status["swarm"] == "tiny" and status["gateways"][0]["http"] == shell.info.http


def test_generate_prints_the_same_streamed_or_whole(shell: Shell) -> None:
    once = shell.output("generate", "hello", "--max-tokens", "20")
    streamed = shell.output("generate", "hello", "--max-tokens", "20", "--stream")

    assert len(once) > 5
    assert streamed == once


def test_generate_reads_its_prompt_from_standard_input(shell: Shell) -> None:
    given = shell.output("generate", "hello", "--max-tokens", "5")

    assert shell.output("generate", "-", "--max-tokens", "5", typed="hello\n") == given


def test_generate_as_json_has_the_text_and_its_end(shell: Shell) -> None:
    printed = shell.output("generate", "hello", "--max-tokens", "5")

    told = json.loads(shell.output("generate", "hello", "--max-tokens", "5", "--json"))

    assert set(told) == {"model", "prompt", "choices", "usage"}
    [choice] = told["choices"]
    assert f"{choice['text']}\n" == printed
    assert choice["finish_reason"] == "length"
    assert told["usage"]["completion_tokens"] == 5


def test_bytes_that_are_not_utf8_end_a_chat_with_a_sentence(shell: Shell) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "modelswarm.cli", "chat"),
        input=b"caf\xe9\n",
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(shell.runtime)},
    )

    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: the input is not UTF-8")


def test_ports_of_a_swarm_in_the_wrong_place_are_explained(shell: Shell) -> None:
    info = shell.info
    for flags, kind, meant in (
        (("generate", "x", "--url", f"http://{info.metrics}"), "a metrics port", info.http),
        (("generate", "x", "--url", f"http://{info.grpc}"), "a gRPC port", info.http),
        (("status", "--admin", info.metrics), "a metrics port", info.admin),
        (("status", "--admin", info.http), "the HTTP port of a gateway", info.admin),
    ):
        done = shell.run(*flags)

        assert done.returncode == 1
        assert f" is {kind}; allowed: " in done.stderr and meant in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_generate_samples_by_its_seed(shell: Shell) -> None:
    asked = ("generate", "hello", "--max-tokens", "20", "--do-sample", "--temperature", "2")

    first = shell.output(*asked, "--seed", "1")

    assert shell.output(*asked, "--seed", "1") == first
    assert shell.output(*asked, "--seed", "2") != first


def test_generate_finds_the_swarm_by_its_address_too(shell: Shell) -> None:
    done = subprocess.run(
        (
            sys.executable,
            "-m",
            "modelswarm.cli",
            "generate",
            "hello",
            "--max-tokens",
            "5",
            "--url",
            f"http://{shell.info.http}",
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert done.stdout == shell.output("generate", "hello", "--max-tokens", "5")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "hello", "--max-tokens", "-1"), "Error: max_tokens: "),
        (("generate", "hello", "--temperature", "-1"), "Error: temperature: "),
        (
            ("generate", "hello", "--do-sample", "--greedy"),
            "Error: --greedy: contradicts --do-sample; allowed: one of them",
        ),
        (
            ("chat", "--greedy", "--temperature", "0.5"),
            "Error: --greedy: contradicts --temperature 0.5",
        ),
        (
            ("generate", "hello", "--do-sample", "--temperature", "0"),
            "Error: --do-sample: contradicts --temperature 0",
        ),
        (("generate", "hello", "--temperature", "nan"), "nan is not allowed; allowed: a number"),
        (("generate", "x" * 600), "Error: prompt: the prompt is too long: it has 600 tokens"),
        (
            ("generate", "hello", "--url", "localhost"),
            "Error: --url: 'localhost' is not the URL of a gateway",
        ),
        (("status", "--url", "127.0.0.1:8001"), "allowed: the gateway's HTTP address"),
        (("generate", "hello", "--stream", "--json"), "allowed: --stream or --json"),
        (("routes", "--model", "tyni"), "--model: 'tyni' is not served here; known are: tiny"),
        (("status", "--name", "other"), "no swarm 'other' runs here; allowed: tiny"),
        (("generate",), "no prompt; allowed: PROMPT, --file FILE, or -"),
        (("serve",), "No such command 'serve'"),
        (("plan", "absent.yaml"), "Error: absent.yaml: no such file"),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(
    shell: Shell, arguments: tuple[str, ...], sentence: str
) -> None:
    done = shell.run(*arguments)

    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == ""


def test_missing_gateway_is_one_sentence_and_exit_code_1(shell: Shell) -> None:
    for arguments in (
        ("generate", "hello", "--url", "http://127.0.0.1:1"),
        ("status", "--admin", "127.0.0.1:1"),
        ("routes", "--admin", "127.0.0.1:1"),
    ):
        done = shell.run(*arguments)

        assert done.returncode == 1
        assert "Error: no gateway answers at " in done.stderr
        assert "Traceback" not in done.stderr


def test_commands_without_a_swarm_tell_how_to_start_one(shell: Shell, tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(shell, runtime=tmp_path)

    for arguments in (("status",), ("generate", "hello"), ("chat",)):
        done = elsewhere.run(*arguments)
        assert done.returncode == 1
        assert "start one with `modelswarm up FILE`" in done.stderr


def test_chat_keeps_one_session_until_a_new_one_begins(shell: Shell) -> None:
    output = shell.output("chat", "--max-tokens", "12", typed="hi\nand now?\n/new\nhi\n/quit\n")

    first, second, again = output.split("\n")[:3]
    assert first == again
    assert first != second


def test_chat_closes_its_sessions_when_it_leaves(shell: Shell) -> None:
    with SwarmClient(shell.info.admin) as client:
        before = {session.id for session in client.fetch_snapshot().sessions}
        shell.output("chat", "--max-tokens", "12", typed="hi\n/new\nhi\n/quit\n")
        assert {session.id for session in client.fetch_snapshot().sessions} <= before


def test_refused_first_prompt_leaves_no_session(shell: Shell) -> None:
    with SwarmClient(shell.info.admin) as client:
        before = {session.id for session in client.fetch_snapshot().sessions}
        assert shell.run("generate", "x" * 600).returncode == 2
        assert {session.id for session in client.fetch_snapshot().sessions} <= before


def test_unknown_chat_command_is_an_error_with_the_commands(shell: Shell) -> None:
    done = shell.run("chat", "--max-tokens", "3", typed="/foo\n/help\n /foo\n")

    assert done.stderr.splitlines()[0] == (
        "Error: /foo: there is no such command; "
        "allowed: /new, /undo, /history, /save, /set, /help, /quit"
    )
    assert re.search(r"/new +start a new conversation", done.stdout)
    assert len(done.stdout.splitlines()) > 4, "a line that begins with a space is a message"


def test_answer_that_ended_for_its_length_says_so(shell: Shell) -> None:
    remark = "(stopped after 16 tokens; --max-tokens N allows more)\n"

    assert shell.run("generate", "hello").stderr == remark
    assert shell.run("chat", "--max-tokens", "16", typed="hi\n").stderr == remark


def test_full_context_of_a_chat_mentions_new(shell: Shell) -> None:
    done = shell.run("chat", typed="x" * 480 + "\nhi\n")

    remark, error = done.stderr.splitlines()
    assert re.fullmatch(
        r"\(the model's context of \d+ tokens is full: /new starts a new conversation\)", remark
    )
    assert error.startswith("Error: messages: ")
    assert error.endswith("; /new starts a new conversation")


def test_model_option_chooses_a_served_model(shell: Shell) -> None:
    chosen = shell.output("generate", "hello", "--model", "tiny", "--max-tokens", "5")

    assert chosen == shell.output("generate", "hello", "--max-tokens", "5")
    for command in (("generate", "hello"), ("chat",)):
        done = shell.run(*command, "--model", "tyni")
        assert done.returncode == 2
        assert done.stderr == "Error: --model: 'tyni' is not served here; known are: tiny\n"


def test_routes_shows_costs_and_reasons_of_each_route(shell: Shell) -> None:
    shell.keep_session("kept")
    shown = shell.output("routes")
    status = json.loads(shell.output("routes", "--model", "tiny", "--json"))

    assert re.search(r"tiny-s0-r0 +0:2 +- +\d+\.\d\d ms .* [01]\.\d\d +\w+", shown)
    assert re.search(
        r" parked: costs \d+\.\d\d ms; the best now is \d+\.\d\d ms by tiny-s0-r", shown
    )
    assert re.search(r"    tiny-s1-r\d \[2:4\] chosen at \d+\.\d\d ms.*: the best ", shown)
    assert ESCAPE not in shown
    assert all(server["block_ms"] > 0 and 0 < server["score"] <= 1 for server in status["servers"])
    session = status["sessions"][0]
    assert [hop["options"] for hop in session["hops"]] == [2, 2]
    assert session["cost_ms"] >= session["best_ms"] * (1 - 1e-9) > 0  # equal but for rounding


def test_verbose_chat_names_the_servers(shell: Shell) -> None:
    # The answer is long enough to ask for its route.
    done = shell.run("chat", "-v", "--max-tokens", "450", typed="Go on.\n")

    assert re.search(r"\[tiny-s0-r\d \[0:2\] -> tiny-s1-r\d \[2:4\]\]", done.stderr)


def test_a_failed_turn_does_not_end_the_chat(shell: Shell) -> None:
    done = shell.run("chat", "--max-tokens", "12", typed="x" * 600 + "\nhi\n")

    assert "Error: messages: " in done.stderr
    assert done.returncode == 2
    assert done.stdout.strip() != ""


def test_closed_output_pipe_is_no_traceback(shell: Shell) -> None:
    command = f"{sys.executable} -m modelswarm.cli generate hello --stream | true"
    env = {**os.environ, "XDG_RUNTIME_DIR": str(shell.runtime)}
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=False, env=env
    )

    assert done.stderr == ""


def test_plan_prints_spans_and_memory_and_starts_nothing(shell: Shell, tmp_path: Path) -> None:
    spans = {"ranges": [{"first": 0, "last": 1}, {"first": 1, "last": 4}]}
    sessions = {"maxLength": 100, "concurrent": 3}
    path = write_document(
        tmp_path / "swarm.yaml", shell.folder, spans=spans, replicas=2, sessions=sessions
    )

    shown = dataclasses.replace(shell, runtime=tmp_path).output("plan", str(path))

    # 100 tokens are 7 pages; 3 sessions are 21, and 24 with the pages kept for recoveries.
    assert re.search(r"0 +0:1 +\d+ KiB +256 B +24 +96 KiB +\d+ KiB +\d+ MiB +336", shown)
    assert re.search(r"1 +1:4 +\d+ KiB +768 B +24 +288 KiB +\d+ KiB +\d+ MiB +336", shown)
    assert re.search(r"memory of a server of 0:1: \d+ MiB \(process 768 MiB, weights ", shown)
    assert "2 servers per span, 4 in all" in shown
    assert (
        "A session may have 100 tokens; one server of each span has room for 3 such sessions"
        in shown
    )
    assert list(tmp_path.iterdir()) == [path]


def test_plan_fits_the_memory_it_is_given(shell: Shell, tmp_path: Path) -> None:
    path = write_document(tmp_path / "swarm.yaml", shell.folder)

    small = shell.output("plan", str(path), "--memory", "1Gi")
    large = shell.output("plan", str(path), "--memory", "2Gi")
    refused = shell.run("plan", str(path), "--memory", "700Mi")

    assert "KV" in small and "0:4: 1 GiB (process 768 MiB" in small
    assert "0:4: 2 GiB (process 768 MiB" in large
    assert "allowed: at least" in refused.stderr


def test_plan_of_a_hub_model_downloads_only_headers(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "swarm.yaml"
    model = {"source": "hf://org/tiny", "revision": "main"}
    write_document(path, shell.folder, model=model, spans={"count": 2})
    with serve("org/tiny", shell.folder) as hub:
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        shown = shell.output("plan", str(path), **home)

    assert f"hf://org/tiny@{COMMIT}, 4 blocks" in shown
    fetched = {name for name in hub.fetched if name.endswith(".safetensors")}
    assert fetched < {shard.name for shard in shell.folder.glob("*.safetensors")}


def test_a_hub_that_cannot_be_reached_is_named(shell: Shell, tmp_path: Path) -> None:
    path = write_document(tmp_path / "swarm.yaml", shell.folder, model={"source": "hf://org/tiny"})
    home = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home")}

    done = shell.run("plan", str(path), **home)

    assert done.returncode == 2
    assert "hf://org/tiny" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_written_for_newcomers(shell: Shell) -> None:
    assert "First steps:" in shell.output("--help")
    for command in ("up", "plan", "chat", "generate", "status", "demo"):
        assert "Usage: modelswarm" in shell.output(command, "--help")


def test_drained_server_is_shown_and_used_again_after_undo(shell: Shell) -> None:
    assert shell.output("drain", "tiny-s0-r0") == "tiny-s0-r0: empty\n"
    assert re.search(r"tiny-s0-r0 +0:2 +drained", shell.output("status"))
    assert re.search(r"tiny-s0-r0 +0:2 .* drained\n", shell.output("routes"))
    assert shell.output("drain", "s0-r0") == "tiny-s0-r0: empty\n", "twice is once"
    assert shell.output("drain", "tiny-s0-r0", "--undo") == "tiny-s0-r0: used again\n"
    states = [
        json.loads(line) for line in shell.output("drain", "tiny-s0-r1", "--json").splitlines()
    ]
    assert states[-1]["done"] and states[-1]["server"] == "tiny-s0-r1"
    shell.output("drain", "tiny-s0-r1", "--undo", "--json")
    assert re.search(r"tiny-s0-r0 +0:2 +ready", shell.output("status"))


def test_draining_an_unknown_server_names_the_known_ones(shell: Shell) -> None:
    done = shell.run("drain", "tiny-s9-r9")
    assert done.returncode == 2
    for name in ("tiny-s9-r9", "tiny-s0-r0", "tiny-s0-r1", "tiny-s1-r0", "tiny-s1-r1"):
        assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_drain_of_only_server_is_refused_with_its_blocks(shell: Shell) -> None:
    shell.output("drain", "tiny-s1-r0")
    try:
        for more in ((), ("--wait", "0.3")):
            done = shell.run("drain", "tiny-s1-r1", *more)
            assert done.returncode == 1
            assert "tiny-s1-r1 is the only server that holds blocks 2:4" in done.stderr
            assert re.search(r"tiny-s1-r1 +2:4 +ready", shell.output("status"))
    finally:
        shell.output("drain", "tiny-s1-r0", "--undo")


@pytest.mark.parametrize(
    "arguments", [("tiny-s0-r0", "--wait", "-1"), ("tiny-s0-r0", "--timeout", "0"), ()]
)
def test_a_drain_with_bad_options_is_refused(shell: Shell, arguments: tuple[str, ...]) -> None:
    done = shell.run("drain", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_drain_without_a_gateway_says_so(shell: Shell) -> None:
    done = shell.run("drain", "tiny-s0-r0", "--admin", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no gateway answers at 127.0.0.1:1" in done.stderr


def test_status_finds_a_session_by_its_id(shell: Shell) -> None:
    shell.keep_session("mine")

    [session] = json.loads(shell.output("status", "--session", "mine", "--json"))["sessions"]

    assert session["session"] in shell.output("status", "--session", "mine")
    assert session["route"][0]["server"].startswith("tiny-s0-r")
    missing = shell.run("status", "--session", "other")
    assert missing.returncode == 1
    assert "no session with session_id 'other'" in missing.stderr


def test_interrupted_watch_ends_without_a_traceback(shell: Shell) -> None:
    command = (sys.executable, "-m", "modelswarm.cli", "status", "--watch", "--json")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(shell.runtime)},
    ) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=300)

    assert process.returncode == 130
    assert told.strip() == ""
    assert set(json.loads(first)) == set(json.loads(second))
