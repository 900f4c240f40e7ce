"""`--json`: constant fields, numbers as numbers, names as in the tables; documented in docs/cli.md."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import pytest

from modelswarm.cli import run
from modelswarm.cli.chat.printing import Answer, JsonPrinter
from modelswarm.cli.commands import commands
from modelswarm.cli.json_output.completion import completion_fields
from modelswarm.cli.json_output.conversion import conversion_fields
from modelswarm.cli.json_output.printing import print_json
from modelswarm.cli.json_output.sessions import list_fields, session_fields
from modelswarm.cli.json_output.start import process_fields, start_fields
from modelswarm.cli.json_output.status import status_fields
from modelswarm.cli.json_output.up import print_change, print_event, print_progress
from modelswarm.cli.options.target import AdminTarget
from modelswarm.client.api.answers import (
    Choice,
    Chunk,
    Completion,
    Hop,
    SessionState,
    TokenLogprob,
    Usage,
)
from modelswarm.client.message_fields import message_fields
from modelswarm.local.run_folder import GatewayAddresses, RunFolder, RunInfo, StartInfo
from modelswarm.local.start_state import IMPORTING, ProcessStart
from modelswarm.local.supervisor import JobChange, JobState, JobStatus
from modelswarm.process.start_progress import StartProgress
from modelswarm.protocol.identity import session_wire_name
from modelswarm.protocol.wire import api_pb2

ROOT = Path(__file__).resolve().parents[3]
DOCS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "counting.yaml"
SECOND = GatewayAddresses(
    "gateway2", "127.0.0.1:9010", "127.0.0.1:9011", "127.0.0.1:9012", "127.0.0.1:9013"
)
INFO = RunInfo(
    "one", "m", 1, "127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002", "127.0.0.1:9003", (SECOND,)
)
SESSION = session_wire_name("m", "mine")
STARTING = ProcessStart("one-s0-r0", "0:4", 0, IMPORTING)
HOP = api_pb2.Hop(peer="s/1/x", first=0, last=4)
SNAPSHOT = api_pb2.Snapshot(
    models=[api_pb2.ModelState(model="m")],
    servers=[api_pb2.Server(peer="s/1/x", steps=2**63)],
    sessions=[api_pb2.Session(id=SESSION, model="m", route=[HOP])],
    unlinked=[api_pb2.UnlinkedServer(peer="t/1/x", reason="connection refused")],
)


def documented(heading: str) -> dict[str, set[str]]:
    """Return the documented fields of one command in docs/cli.md, by object."""
    section = re.search(rf"^### `{heading}.*?(?=^##|\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    rows = [line.split(" | ") for line in section.group().splitlines() if line.startswith("| ")]
    named = {row[0].strip("| `"): set(re.findall(r"`(\w+)`", row[1])) for row in rows}
    return {name.removeprefix("(top)"): fields for name, fields in named.items() if fields}


def shape(shown: dict[str, Any], name: str = "") -> dict[str, set[str]]:
    """Return the fields of an object and of its inner objects, by path."""
    shapes = {name: set(shown)}
    for key, value in shown.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            shapes |= shape(value, path)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            shapes |= shape(value[0], f"{path}[]")
    return shapes


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_status_has_every_field_even_if_it_is_zero() -> None:
    shown = status_fields(SNAPSHOT, AdminTarget("host:1"))

    [server] = shown["servers"]
    assert (server["first"], server["sessions"], server["score"]) == (0, 0, 0.0)
    assert (server["server"], server["peer"]) == ("s", "s/1/x")
    assert server["steps"] == 2**63
    assert shown["sessions"][0]["session"] == SESSION.removeprefix("named:")
    told = documented("status")
    assert told.pop("starting[]") == set(process_fields(STARTING))
    assert shape(shown) == {name: fields for name, fields in told.items() if name != "gateways[]"}


def test_status_of_a_starting_swarm_has_the_same_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shown = start_fields(StartInfo("one", 1, {"s": "0:4"}, ("gateway",)))

    told = documented("status")
    assert shape(shown) == {name: told[name] for name in ("", "starting[]")}
    assert [process["phase"] for process in shown["starting"]] == ["importing", "importing"]
    assert shown["starting"][0]["done"] is None


def test_status_of_this_machine_has_pids_and_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = RunFolder.claim("one")
    try:
        member = {"peer": "s/1/x", "metrics": "127.0.0.1:7", "pid": 42}
        (folder.members / "s.json").write_text(json.dumps(member))
        folder.gateway_file("gateway").write_text(json.dumps({"pid": 43}))

        shown = status_fields(SNAPSHOT, AdminTarget(INFO.admin, INFO, "gateway"))
    finally:
        folder.release()

    assert shown["swarm"] == "one"
    assert (shown["servers"][0]["pid"], shown["servers"][0]["metrics"]) == (42, "127.0.0.1:7")
    assert shown["servers"][0]["ready_seconds"] >= 0
    assert shown["gateway"] == "gateway"
    first, second = shown["gateways"]
    assert (first["pid"], first["http"], first["metrics"]) == (43, INFO.http, INFO.metrics)
    assert (second["name"], second["pid"], second["http"]) == ("gateway2", None, "127.0.0.1:9010")
    assert shown["starting"] == []
    told = documented("status")
    assert shape(shown) == {name: fields for name, fields in told.items() if name != "starting[]"}


def test_status_of_another_machine_has_null_instead() -> None:
    shown = status_fields(SNAPSHOT, AdminTarget("host:1"))

    assert shown["swarm"] is None
    assert shown["servers"][0]["pid"] is None
    assert (shown["gateway"], shown["gateways"]) == (None, [])


def test_routes_has_every_field_and_null_if_unset() -> None:
    reason = api_pb2.RouteReason(id="x", hops=[api_pb2.HopReason(peer="s/1/x")], best=[HOP])
    reply = api_pb2.RoutesReply(servers=[api_pb2.ServerCost(peer="s/1/x")], sessions=[reason])

    shown = message_fields(reply)

    assert shown["servers"][0]["rtt_ms"] is None
    assert shown["servers"][0]["block_ms"] == 0.0
    assert shown["sessions"][0]["cost_ms"] is None
    assert shape(shown) == documented("routes")


def test_sessions_have_every_field() -> None:
    listed = list_fields([("gateway2", SNAPSHOT), (None, api_pb2.Snapshot())])
    state = SessionState("mine", "m", "idle", 3, None, 60, 9, 0, (Hop("s", 0, 4),))

    assert shape(listed) == documented("sessions list")
    assert [each["gateway"] for each in listed["sessions"]] == ["gateway2"]
    shown = json.loads(json.dumps(session_fields(state)))
    assert (shown["max_length"], shown["route"][0]["server"]) == (None, "s")
    assert shape(shown) == documented("sessions show")


def test_drain_state_has_every_field() -> None:
    shown = message_fields(api_pb2.DrainProgress(peer="s/1/x"))

    assert (shown["server"], shown["done"], shown["uncovered_blocks"]) == ("s", False, [])
    assert shape(shown) == documented("drain")


def test_plan_prints_every_number_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(EXAMPLE), "--json"]) == 0

    [shown] = printed(capsys)
    assert shown["servers"][1]["span"] == {"first": 4, "last": 8}
    assert shown["total_bytes"] == 2 * sum(server["memory"]["total"] for server in shown["servers"])
    assert shape(shown) == documented("plan")


def test_plan_names_memory_of_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"model": {"source": "demo://counting"}, "training": {"memory": "1Gi"}}
    document = {"apiVersion": "modelswarm.io/v1alpha1", "kind": "ModelSwarm"}
    file = tmp_path / "swarm.json"
    file.write_text(json.dumps(document | {"metadata": {"name": "x"}, "spec": spec}))
    assert run(["plan", str(file), "--json"]) == run(["plan", str(file)]) == 0

    shown, text = capsys.readouterr().out.split("\n", 1)
    assert json.loads(shown)["training_memory"] == 1 << 30
    assert json.loads(shown)["servers"][0]["memory"]["training"] == 1 << 30
    assert "training 1 GiB" in text


def test_plan_names_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = {"name": "tax", "source": "file:///adapters/tax"}
    spec = {"model": {"source": "demo://counting", "adapters": [adapter]}}
    document = {"apiVersion": "modelswarm.io/v1alpha1", "kind": "ModelSwarm"}
    file = tmp_path / "swarm.json"
    file.write_text(json.dumps(document | {"metadata": {"name": "x"}, "spec": spec}))
    assert run(["plan", str(file), "--json"]) == 0

    [shown] = printed(capsys)
    assert shown["adapters"] == [adapter] and shown["servers"][0]["memory"]["adapters"] > 0


def test_up_prints_each_change_as_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = JobStatus("one-s0-r0", JobState.WAITING, 2, 0, 0.5, "killed by SIGKILL")

    print_change(JobChange(1.0, job, ("last words",)))
    print_progress("one-s0-r0", StartProgress("reading weights", 3, 4))
    print_event("ready", logs="/tmp/logs", **asdict(INFO))

    change, progress, ready = printed(capsys)
    assert (change["state"], change["pid"], change["restart_in"]) == ("waiting", None, 0.5)
    assert (change["exit_reason"], change["log"]) == ("killed by SIGKILL", ["last words"])
    told = documented("up")
    assert {"event", "time"} | told["process"] == set(change)
    assert {"event", "time"} | told["progress"] == set(progress)
    assert (progress["done"], progress["total"], progress["reason"]) == (3, 4, None)
    assert {"event", "time"} | told["ready"] == set(ready)
    assert told["ready.other_gateways[]"] == set(ready["other_gateways"][0])


def test_number_unknown_to_json_becomes_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": math.nan, "b": [{"c": -math.inf}], "d": 1.5})

    assert printed(capsys) == [{"a": None, "b": [{"c": None}], "d": 1.5}]


def test_logs_fields_are_documented() -> None:
    assert documented("logs") == {"": {"swarm", "process", "incarnation", "path", "lines"}}


def test_convert_fields_are_documented() -> None:
    names = ("n_layer", "n_embd", "n_head", "vocab_size", "n_positions")
    config = dict.fromkeys(names, 1) | {"activation_function": "gelu", "dtype": "float32"}

    shown = conversion_fields(Path("made"), config, has_tokenizer=False)

    assert shape(shown) == documented("convert")


def test_every_command_takes_json() -> None:
    found = dict(leaves(commands, ""))

    without = {name for name, command in found.items() if "--json" not in options_of(command)}

    assert len(found) > 14
    assert without == {"completion"}


def leaves(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that do something, by their names with those of their groups."""
    for each, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name}{each} ")
        else:
            yield name + each, command


def options_of(command: click.Command) -> list[str]:
    return [option for parameter in command.params for option in parameter.opts]


def test_generate_fields_are_documented() -> None:
    token = TokenLogprob("hi", -1.0, {"hi": -1.0})
    answer = Completion("m", (Choice(0, "hi", "stop", logprobs=(token,)),), Usage(1, 2, 3))

    shown = completion_fields(1, answer)

    told = shape(shown)
    told.pop("choices[].logprobs[].top")  # its names are tokens
    assert documented("generate") == told
    assert (shown["prompt"], shown["choices"][0]["prompt_logprobs"]) == (1, None)


def test_chat_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(2)
    answer.take_piece(Chunk("hi"))
    answer.take_piece(Chunk(finish_reason="stop", usage=Usage(1, 2, 3)))

    JsonPrinter().print_end(answer, None, False)
    JsonPrinter().print_end(Answer(3), None, False)

    [shown] = printed(capsys)
    assert shape(shown) == documented("chat")
    assert (shown["turn"], shown["text"], shown["route"]) == (2, "hi", None)


def test_batch_fields_are_documented() -> None:
    assert documented("batch") == {
        "": {"output", "total", "ok", "failed", "done_before", "seconds"}
    }
