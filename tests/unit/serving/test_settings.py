"""Flags of the server process: their values, and the error for each invalid one."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from modelswarm.errors import UserError
from modelswarm_serving.settings import parse_settings

GOOD = [
    "--discovery-dir",
    "/tmp/m",
    "--name",
    "s0",
    "--model",
    "demo://counting",
    "--blocks",
    "0:4",
]


def test_defaults_are_those_of_the_contract() -> None:
    settings = parse_settings(GOOD)
    assert (settings.first, settings.last) == (0, 4)
    assert (settings.listen, settings.discovery_dir) == ("127.0.0.1:0", Path("/tmp/m"))
    assert (settings.incarnation, settings.dtype, settings.threads) == (1, "float32", None)
    assert (settings.pages, settings.memory, settings.page_size) == (None, None, 16)
    assert (settings.max_length, settings.lease_seconds) == (None, 30.0)
    assert (settings.metrics, settings.parent_fd, settings.hash_model) == (None, None, False)
    assert settings.served_name == "counting"
    assert (settings.tokenizer, settings.chat_template, settings.hold_limit_seconds) == (
        None,
        None,
        None,
    )
    assert settings.zone == ""
    assert parse_settings([*GOOD, "--zone", "eu-1a"]).zone == "eu-1a"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("file:///models/tiny/", "tiny"),
        ("hf://Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("models/x", "x"),
    ],
)
def test_served_name_defaults_to_the_last_part_of_the_source(source: str, name: str) -> None:
    assert parse_settings([*GOOD, "--model", source]).served_name == name
    assert parse_settings([*GOOD, "--model", source, "--served-name", "m"]).served_name == "m"


@pytest.mark.parametrize(("text", "threads"), [("auto", None), ("1", 1), ("12", 12)])
def test_threads_flag_is_a_number_or_auto(text: str, threads: int | None) -> None:
    assert parse_settings([*GOOD, "--threads", text]).threads == threads


def test_memory_flag_is_a_quantity() -> None:
    assert parse_settings([*GOOD, "--memory", "512Mi"]).memory == 512 << 20


def test_hash_model_needs_no_source() -> None:
    flags = ["--discovery-dir", "m", "--name", "s0", "--blocks", "0:4", "--hash-model"]
    settings = parse_settings(flags)
    assert settings.model is None
    assert settings.served_name == "hash"


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--blocks", "4"], "--blocks"),
        (["--blocks", "4:4"], "--blocks"),
        (["--blocks", "5:4"], "--blocks"),
        (["--blocks", "-1:4"], "--blocks"),
        (["--blocks", "a:b"], "--blocks"),
        (["--blocks", "0:4:8"], "--blocks"),
        (["--name", "a/b"], "--name"),
        (["--name", ""], "--name"),
        (["--served-name", "a model"], "--served-name"),
        (["--served-name", "m" * 129], "--served-name"),
        (["--zone", "z" * 64], "--zone"),
        (["--zone", "a zone"], "--zone"),
        (["--listen", "8000"], "--listen"),
        (["--listen", "127.0.0.1:x"], "--listen"),
        (["--listen", "127.0.0.1:65536"], "--listen"),
        (["--metrics", ":"], "--metrics"),
        (["--memory", "lots"], "--memory"),
        (["--memory", "0"], "--memory"),
        (["--pages", "4", "--memory", "1Gi"], "--pages"),
    ],
)
def test_invalid_flag_is_named(flags: list[str], field: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_settings([*GOOD, *flags])
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--threads", "0"], "--threads"),
        (["--threads", "all"], "--threads"),
        (["--dtype", "int3"], "--dtype"),
        (["--pages", "-1"], "--pages"),
        (["--page-size", "x"], "--page-size"),
        (["--max-length", "0"], "--max-length"),
        (["--lease", "0"], "--lease"),
        (["--lease", "0.3"], "--lease"),  # too short for the heartbeats of a gateway
        (["--incarnation", "-1"], "--incarnation"),
        (["--parent-fd", "x"], "--parent-fd"),
        (["--typo"], "--typo"),
    ],
)
def test_flag_refused_by_click_is_one_line(flags: list[str], named: str) -> None:
    with pytest.raises(click.ClickException) as refused:
        parse_settings([*GOOD, *flags])
    assert named in refused.value.format_message()
    assert "\n" not in refused.value.format_message()


@pytest.mark.parametrize("missing", ["--name", "--blocks", "--model"])
def test_missing_flag_is_named(missing: str) -> None:
    at = GOOD.index(missing)
    with pytest.raises((click.ClickException, UserError)) as refused:
        parse_settings(GOOD[:at] + GOOD[at + 2 :])
    assert (
        missing in str(refused.value.args or refused.value)
        or missing in getattr(refused.value, "format_message", str)()
    )


def test_discovery_dir_is_optional() -> None:
    at = GOOD.index("--discovery-dir")
    assert parse_settings([*GOOD[:at], *GOOD[at + 2 :]]).discovery_dir is None


@pytest.mark.parametrize(
    ("flag", "address"),
    [
        ("10.0.0.7:7000", "10.0.0.7:7000"),
        ("s0.servers.ns.svc:7000", "s0.servers.ns.svc:7000"),
        ("[fd00::7]:7000", "[fd00::7]:7000"),
        ("fd00::7:7000", "[fd00::7]:7000"),  # $(POD_IP):7000 of an IPv6 pod
    ],
)
def test_advertised_address_is_normalized(flag: str, address: str) -> None:
    assert (
        parse_settings([*GOOD, "--listen", "0.0.0.0:7000", "--advertise", flag]).advertise
        == address
    )


@pytest.mark.parametrize("flag", ["$(POD_IP):7000", "0.0.0.0:7000", "10.0.0.7:0", ":7000", "x"])
def test_undialable_advertised_address_is_refused(flag: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_settings([*GOOD, "--advertise", flag])
    assert refused.value.field == "--advertise"


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "[::]:7000"])
def test_server_on_all_interfaces_must_advertise(listen: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_settings([*GOOD, "--listen", listen])
    assert refused.value.field == "--advertise"
