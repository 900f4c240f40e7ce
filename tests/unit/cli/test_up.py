"""The flags of `up`: each changes the command lines of the processes, or is refused by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from modelswarm.cli import run
from modelswarm.cli.demo.example import load_example
from modelswarm.cli.terminal.signals import exit_on_signals, run_until_signal
from modelswarm.errors import UserError
from modelswarm.local.commands import (
    LocalSettings,
    gateway_command,
    gateway_names,
    server_command,
)
from modelswarm.local.planning import plan_document, unused_fields
from modelswarm.local.run_folder import RunFolder
from modelswarm.local.swarm import LocalSwarm
from modelswarm.placement.memory import CONTEXT_BYTES
from modelswarm.resources.spec import Pool, Sessions
from modelswarm_gateway.settings import Settings, parse_settings

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "counting.yaml"


def parsed(tmp_path: Path, **settings: Any) -> Settings:
    """Return the settings that the second gateway parses from its command line."""
    plan = plan_document(load_example())
    command = gateway_command(
        plan, LocalSettings(**settings), RunFolder(tmp_path, -1), 0, "gateway2", ("g/1/x",)
    )
    assert command[2:4] == ["-m", "modelswarm_gateway"]
    return parse_settings(command[4:])


def test_flags_of_up_reach_the_gateways(tmp_path: Path) -> None:
    usual = parsed(tmp_path)
    assert (usual.name, usual.run_file) == ("gateway2", tmp_path / "gateway2.json")
    assert (usual.hold_limit_seconds, usual.lease_seconds) == (300.0, 30.0)
    assert (usual.vllm_metrics, usual.cors_origins, usual.replaces) == (False, (), ("g/1/x",))
    assert usual.tool_call_parser == ""

    origins = ("https://one.example", "https://two.example")
    changed = parsed(
        tmp_path,
        hold_limit=7.0,
        lease=9.0,
        tool_call_parser="hermes",
        vllm_metrics=True,
        cors_origins=origins,
    )

    assert (changed.hold_limit_seconds, changed.lease_seconds) == (7.0, 9.0)
    assert (changed.vllm_metrics, changed.cors_origins) == (True, origins)
    assert changed.tool_call_parser == "hermes"


def test_lease_of_up_reaches_the_servers(tmp_path: Path) -> None:
    plan = plan_document(load_example())
    slot = LocalSwarm(plan).slots[0]
    command = server_command(plan, slot, LocalSettings(lease=9.0), RunFolder(tmp_path, -1), 1, 0)

    assert command[command.index("--lease") + 1] == "9.0"
    assert command[command.index("--device") + 1] == "cpu"


def room_flags(tmp_path: Path, device: str, sessions: dict[str, int]) -> dict[str, str]:
    """Return the flags of the memory of a server of the example, which has four servers."""
    example = load_example()
    spec = example.spec.model_copy(update={"sessions": Sessions.model_validate(sessions)})
    plan = plan_document(example.model_copy(update={"spec": spec}), device=device)
    settings = LocalSettings(device=device)
    command = server_command(
        plan, LocalSwarm(plan).slots[0], settings, RunFolder(tmp_path, -1), 1, 0
    )
    return {
        flag: command[command.index(flag) + 1]
        for flag in ("--pages", "--memory-fraction", "--device")
        if flag in command
    }


def test_servers_of_up_share_the_device_that_they_fill(tmp_path: Path) -> None:
    filling = room_flags(tmp_path, "cuda", {})
    assert filling == {"--memory-fraction": "0.225", "--device": "cuda"}
    given = room_flags(tmp_path, "cuda", {"concurrent": 2})
    assert set(given) == {"--pages", "--device"}
    for device in ("cpu", "auto"):
        assert set(room_flags(tmp_path, device, {})) == {"--pages", "--device"}


def test_weights_on_a_device_are_planned_there() -> None:
    on_cpu, on_device = (plan_document(load_example(), device=each) for each in ("cpu", "cuda"))
    server = on_device.servers[0]
    assert on_cpu.servers[0].host is None and server.host is not None
    assert server.memory.process == CONTEXT_BYTES and server.host.process > 0
    assert server.memory.kv > 0 and server.host.kv == 0


def test_memory_of_up_is_refused_on_a_device() -> None:
    with pytest.raises(UserError, match="--memory: sizes servers on the CPU, but --device is cuda"):
        plan_document(load_example(), "2Gi", "cuda:0")


@pytest.mark.parametrize(
    ("wanted", "cpus", "threads"), [(None, 32, 8), (None, 7, 1), (None, 1, 1), (3, 32, 3)]
)
def test_cpus_are_divided_among_servers(
    wanted: int | None, cpus: int, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The example has four servers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr("modelswarm.process.cpu_limit.read_cpu_limit", lambda root: None)
    plan = plan_document(load_example())
    settings = LocalSettings(threads=wanted)
    slot = LocalSwarm(plan, settings).slots[0]
    command = server_command(plan, slot, settings, RunFolder(tmp_path, -1), 1, 0)

    assert command[command.index("--threads") + 1] == str(threads)


def test_gateways_after_the_first_are_numbered() -> None:
    assert gateway_names(1) == ("gateway",)
    assert gateway_names(3) == ("gateway", "gateway2", "gateway3")


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--gateways", "0", "1<=x<=16"),
        ("--gateways", "two", "not a valid integer"),
        ("--lease", "0", "0<x<=86400"),
        ("--lease", "nan", "0<x<=86400"),
        ("--device", "gpu", "allowed: auto, cpu, accelerator"),
        ("--threads", "0", "a number from 1 to 1024"),
        ("--threads", "all", "neither auto nor a number"),
        ("--hold-limit", "-1", "0<=x<=86400"),
        ("--hold-limit", "nan", "0<=x<=86400"),
        ("--hold-limit", "inf", "0<=x<=86400"),
    ],
)
def test_impossible_flag_of_up_is_refused(
    flag: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", str(EXAMPLE), flag, value]) == 2

    told = capsys.readouterr().err
    assert f"Invalid value for '{flag}'" in told
    assert allowed in told


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        ("--http", "8000", "--http: '8000' is not HOST:PORT, like 127.0.0.1:8000"),
        ("--admin", "a:99999", "--admin: 'a:99999' is not HOST:PORT"),
        ("--cors-origin", "chat.example.com", "is not an origin, like https://chat.example.com"),
    ],
)
def test_address_of_up_is_checked_before_a_process_starts(
    flag: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "absent.yaml", flag, value]) == 2, "the file is read after it"

    assert sentence in capsys.readouterr().err


def test_fields_without_effect_on_one_machine_are_named() -> None:
    example = load_example()
    for fields, named in (
        ({}, []),
        ({"failureDomainKey": "topology.kubernetes.io/zone"}, ["spec.pools[].failureDomainKey"]),
    ):
        pools = [Pool.model_validate({"name": "only"} | fields)]
        spec = example.spec.model_copy(update={"pools": pools})
        assert unused_fields(example.model_copy(update={"spec": spec})) == named


def test_ignored_hangup_stays_ignored() -> None:
    """`nohup modelswarm up FILE` goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run_until_signal(lambda: None):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with exit_on_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
