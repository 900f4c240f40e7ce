"""Flags of a gateway process: values derived from them, and contradictions that are refused."""

from __future__ import annotations

from dataclasses import replace

import click
import pytest

from modelswarm.errors import UserError
from modelswarm.protocol.messages import PROTOCOL_VERSION, Hello, Lane, Role
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.runtime.peer_checks import heartbeat_fault, hold_fault
from modelswarm_gateway.settings import cap_keepalive, dead_seconds, parse_settings

MEMBERS = ("--discovery-dir", "/tmp/members")


@pytest.mark.parametrize(
    ("flags", "seconds"),
    (
        ((), 5.0),
        (("--hold-limit", "0"), 5.0),  # no session is held
        (("--hold-limit", "2"), 1.0),
        (("--hold-limit", "30", "--keepalive", "29"), 29.0),
        (("--hold-limit", "0", "--keepalive", "29"), 29.0),
    ),
)
def test_keepalive_is_shorter_than_the_hold_limit(flags: tuple[str, ...], seconds: float) -> None:
    assert parse_settings([*MEMBERS, *flags]).keepalive_seconds == seconds


@pytest.mark.parametrize(
    ("flags", "field", "other"),
    (
        (("--hold-limit", "20", "--keepalive", "20"), "--keepalive", "--hold-limit 20 s"),
        (("--hold-limit", "4", "--fence-timeout", "5"), "--fence-timeout", "--hold-limit 4 s"),
        (
            ("--suspect-after", "2", "--fence-timeout", "2"),
            "--suspect-after",
            "--fence-timeout 2 s",
        ),
        (("--suspect-after", "5"), "--suspect-after", "--fence-timeout 5 s"),  # the default
        (("--fence-timeout", "0.3"), "--fence-timeout", "--suspect-after 0.3 s"),  # the default
    ),
)
def test_contradicting_timeouts_are_refused_with_both_flags(
    flags: tuple[str, ...], field: str, other: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_settings([*MEMBERS, *flags])
    assert refused.value.field == field
    assert other in refused.value.message


@pytest.mark.parametrize(
    "flags",
    (
        (),
        ("--hold-limit", "0.5"),
        ("--hold-limit", "0", "--fence-timeout", "9"),
        ("--fence-timeout", "60"),
    ),
)
def test_unset_timeouts_never_contradict_given_ones(flags: tuple[str, ...]) -> None:
    settings = parse_settings([*MEMBERS, *flags])
    assert settings.suspect_after_seconds < settings.fence_timeout_seconds


@pytest.mark.parametrize(
    ("flags", "seconds"),
    (
        (("--hold-limit", "2"), 2.0),
        (("--hold-limit", "60"), 5.0),
        (("--hold-limit", "0"), 5.0),
        (("--hold-limit", "0.1"), 0.6),  # otherwise the fence would time out before a suspicion
        (("--hold-limit", "1", "--suspect-after", "2"), 4.0),
    ),
)
def test_default_fence_timeout_follows_the_hold_limit(
    flags: tuple[str, ...], seconds: float
) -> None:
    assert parse_settings([*MEMBERS, *flags]).fence_timeout_seconds == seconds


def test_slow_server_heartbeat_is_reported_with_both_flags() -> None:
    hello = Hello(PROTOCOL_VERSION, "s0/1/a", Role.SERVER, "", Lane.LIVE, heartbeat_ms=5000)
    fault = heartbeat_fault(0.3, hello)
    assert fault is not None
    assert "s0/1/a" in fault and "--heartbeat 5," in fault and "--suspect-after 0.3," in fault
    assert "after 15 s of silence" in fault
    for heartbeat_ms, silence in ((0, 0.3), (100, 0.2), (150, 0.3), (5000, 10.0)):
        assert heartbeat_fault(silence, replace(hello, heartbeat_ms=heartbeat_ms)) is None


def test_short_server_hold_is_reported_with_both_flags() -> None:
    hello = Hello(PROTOCOL_VERSION, "s0/1/a", Role.SERVER, "", Lane.LIVE, model="m", hold_ms=2000)
    fault = hold_fault(5.0, hello)
    assert fault is not None
    assert "s0/1/a" in fault and "--hold-limit 2," in fault and "--fence-timeout 5:" in fault
    for hold_ms, fence in ((0, 5.0), (2000, 2.0), (5000, 2.0)):
        assert hold_fault(fence, replace(hello, hold_ms=hold_ms)) is None


@pytest.mark.parametrize(
    ("keepalive", "hold", "seconds"),
    [(5.0, 60.0, 5.0), (5.0, 0.0, 5.0), (29.0, 30.0, 29.0), (5.0, 5.0, 2.5), (5.0, 0.01, 0.1)],
)
def test_keepalive_is_capped_by_the_servers_hold(
    keepalive: float, hold: float, seconds: float
) -> None:
    assert cap_keepalive(keepalive, hold) == seconds


def test_lease_too_short_for_heartbeats_is_refused() -> None:
    with pytest.raises(click.ClickException) as refused:
        parse_settings([*MEMBERS, "--lease", "0.1"])
    message = refused.value.format_message()
    assert "--lease" in message and "0.4" in message


def test_disconnect_timeout_exceeds_the_suspicion_timeout() -> None:
    assert dead_seconds(0.3) == GatewaySettings().disconnect_after_seconds
    assert dead_seconds(20.0) == 40.0


def test_default_settings_equal_the_core_defaults() -> None:
    settings, core = parse_settings(MEMBERS), GatewaySettings()
    assert (settings.suspect_after_seconds, settings.fence_timeout_seconds, settings.hold_limit_seconds) == (
        core.suspect_after_seconds, core.fence_timeout_seconds, core.hold_limit_seconds
    )  # fmt: skip


def test_cors_is_off_and_takes_several_origins() -> None:
    assert parse_settings(MEMBERS).cors_origins == ()
    origins = ("https://chat.example.com", "http://localhost:3000", "http://[::1]:8080", "app://x")
    flags = [f"--cors-origin={origin}" for origin in origins]
    assert parse_settings([*MEMBERS, *flags]).cors_origins == origins
    assert parse_settings([*MEMBERS, "--cors-origin", "*"]).cors_origins == ("*",)


@pytest.mark.parametrize(
    ("origins", "message"),
    (
        (("chat.example.com",), "is not an origin"),
        (("https://chat.example.com/",), "without a path"),
        (("https://Chat.example.com",), "in lower case"),
        (("https://a.example:port",), "is not an origin"),
        (("null",), "is not an origin"),
        (("",), "is not an origin"),
        (("*", "https://a.example"), "give it alone"),
        (("https://a.example:443",), "remove :443"),
        (("http://a.example:80",), "remove :80"),
    ),
)
def test_cors_origin_that_no_browser_sends_is_refused(
    origins: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        parse_settings([*MEMBERS, *(f"--cors-origin={origin}" for origin in origins)])
    assert refused.value.field == "--cors-origin"
    assert message in refused.value.message


def test_replaced_gateways_are_whole_identities() -> None:
    ended = ("gateway/1763914000000000000/0f3a", "gateway/7/ab")
    flags = [part for peer in ended for part in ("--replaces", peer)]
    assert parse_settings([*MEMBERS, *flags]).replaces == ended
    assert parse_settings(MEMBERS).replaces == ()
    for wrong in ("gateway", "gateway/7", "gateway/x/ab", "gateway/7/ab/c", ""):
        with pytest.raises(UserError, match="is not NAME/INCARNATION/BOOT"):
            parse_settings([*MEMBERS, "--replaces", wrong])
