"""The settings of a gateway process: one frozen object, parsed from the command line and checked for conflicts.

The only reader of flags in this process; nothing reads the environment. Used by `app.py`. Timeouts that contradict each
other are refused at start, in one sentence that names both flags. A flag that is not given adapts to those that are, so
only two given flags can conflict. Timeouts of servers are compared in `runtime/peer_checks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelswarm.errors import UserError
from modelswarm.process.command_line import Seconds, join_target, read_flags, split_target
from modelswarm.process.cors_origins import check_cors_origins
from modelswarm.protocol.heartbeat import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS
from modelswarm.protocol.identity import MAX_NUMBER
from modelswarm_gateway.generation.tool_calls.families import FAMILIES, NO_PARSER

# Default of --keepalive, in seconds.
DEFAULT_KEEPALIVE = 5.0
# Default of --fence-timeout, in seconds.
DEFAULT_FENCE_TIMEOUT = 5.0
# Default of --suspect-after, in seconds.
DEFAULT_SUSPECT_AFTER = 0.3
# Silence after which a server is taken for dead, in seconds; twice a longer --suspect-after.
MIN_DEAD_SECONDS = 15.0
# Smallest --keepalive, in seconds.
MIN_KEEPALIVE = 0.1
# Smallest --suspect-after, in seconds: two heartbeats, because a running server is silent for one.
MIN_SUSPECT_AFTER = 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    discovery_dir: Path | None  # or else `kubernetes`
    kubernetes: bool
    namespaces: tuple[str, ...]  # none: all
    kubeconfig: Path | None
    http: str  # host:port, as the three that follow
    grpc: str
    admin: str
    metrics: str
    ui: str | None  # host:port of a page for browsers
    name: str
    incarnation: int
    replaces: tuple[str, ...]  # identities of gateways whose processes have ended
    advertise: str  # host, where other gateways reach this one; empty: the one of --http
    run_file: Path | None
    parent_fd: int | None
    shutdown_delay_seconds: float
    drain_timeout_seconds: float
    hold_limit_seconds: float
    keepalive_seconds: float
    suspect_after_seconds: float
    fence_timeout_seconds: float
    lease_seconds: float
    rebalance_after_seconds: float
    idle_seconds: float
    max_named_sessions: int
    vllm_metrics: bool
    tool_call_parser: str  # empty: found by each model's chat template
    cors_origins: tuple[str, ...]  # none: browsers may not send cross-origin requests
    session_headers: tuple[str, ...]  # that may have a request's session id; the first one counts


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_PEER = re.compile(rf"{_NAME.pattern}/[0-9]+/[0-9A-Za-z]+")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SESSION_HEADER = "x-session-id"  # may have a request's session id, by default
_HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
# The longest time that a flag may give: a month, as in the chart.
_SECONDS = Seconds(min=0, max=2_592_000)

_OPTIONS: list[click.Parameter] = [
    click.Option(["--discovery-dir"], type=click.Path(path_type=Path), help="Folder in which servers "
                 "write their NAME.json."),
    click.Option(["--kubernetes"], is_flag=True, help="Discover servers by their pods, instead of "
                 "--discovery-dir."),
    click.Option(["--namespace", "namespaces"], multiple=True, help="Namespace whose pods are watched; "
                 "may be given several times. Default: all namespaces."),
    click.Option(["--kubeconfig"], type=click.Path(path_type=Path), help="Kubeconfig file for the API "
                 "server. Default: the pod's service account, else ~/.kube/config."),
    click.Option(["--http"], default="127.0.0.1:8000", show_default=True, help="HOST:PORT of the "
                 "OpenAI routes; port 0: any free one."),
    click.Option(["--grpc"], default="127.0.0.1:8001", show_default=True, help="HOST:PORT of the gRPC "
                 "API for clients."),
    click.Option(["--admin"], default="127.0.0.1:8003", show_default=True, help="HOST:PORT of the gRPC API "
                 "that shows all sessions and servers and drains servers. Clients need no access to it."),
    click.Option(["--metrics"], default="127.0.0.1:8002", show_default=True, help="HOST:PORT for "
                 "Prometheus."),
    click.Option(["--ui"], metavar="HOST:PORT", help="Also serve the page of `modelswarm ui` here: servers, live "
                 "sessions and a chat. Only on this machine or pod, as 127.0.0.1:8004. The log has its address and "
                 "token."),
    click.Option(["--name"], default="gateway", show_default=True, help="Name of this gateway."),
    click.Option(["--incarnation"], type=click.IntRange(min=0, max=MAX_NUMBER), help="Number that grows with each "
                 "start of this gateway; default: the time of its start."),
    click.Option(["--replaces"], multiple=True, metavar="NAME/INCARNATION/BOOT", help="Identity of a gateway "
                 "whose process has ended and was reaped: servers end its lease at once, and drop what still comes "
                 "from it. Never name one that may still run. May be given several times."),
    click.Option(["--advertise"], default="", metavar="HOST", help="Host at which other gateways reach "
                 "this one, to forward requests for its sessions; default: the host of --http, "
                 "unless that is a wildcard address."),
    click.Option(["--run-file"], type=click.Path(path_type=Path), help="File to write the bound "
                 "addresses to, once all ports are open."),
    click.Option(["--parent-fd"], type=click.IntRange(min=0), help="Read end of a pipe that the "
                 "parent process holds open; this process exits when the parent has exited."),
    click.Option(["--shutdown-delay", "shutdown_delay_seconds"], type=_SECONDS, default=0.0,
                 show_default=True, help="Seconds without a new request after which a stopping gateway "
                 "refuses requests. It waits for them at most half of --drain-timeout longer."),
    click.Option(["--drain-timeout", "drain_timeout_seconds"], type=_SECONDS, default=30.0, show_default=True,
                 help="Seconds that running answers then get, less what --shutdown-delay took longer."),
    click.Option(["--hold-limit", "hold_limit_seconds"], type=_SECONDS, default=60.0, show_default=True,
                 help="Seconds that a session waits for a lost server to be replaced."),
    click.Option(["--keepalive", "keepalive_seconds"], type=Seconds(min=MIN_KEEPALIVE, max=3600),
                 help="Seconds after which a waiting client is sent a keepalive: a comment in its "
                 "stream, or a ping over gRPC; default: 5, or half of a shorter --hold-limit. Where a swarm's "
                 "sessions.holdLimit is no longer than this, comments are sent at half of that limit."),
    click.Option(["--suspect-after", "suspect_after_seconds"],
                 type=Seconds(min=MIN_SUSPECT_AFTER, max=60), help="Seconds of silence after which "
                 "a server on a route is suspected and its sessions are re-routed; default: "
                 "0.3. Use more on machines whose processes are paused at times."),
    click.Option(["--fence-timeout", "fence_timeout_seconds"], type=Seconds(min=0, min_open=True),
                 help="Seconds that a session waits for a server that does not respond, if there "
                 "is no other; default: 5, or a shorter --hold-limit. Must not exceed a swarm's sessions.holdLimit."),
    click.Option(["--lease", "lease_seconds"],
                 type=Seconds(min=MIN_LEASE_SECONDS, max=MAX_LEASE_SECONDS),
                 default=30.0, show_default=True, help="Seconds after which other gateways may take "
                 "over the sessions of a lost gateway. Use the value of the servers' --lease; if two "
                 "differ, the longer one counts, up to 4 x the servers'."),
    click.Option(["--rebalance-after", "rebalance_after_seconds"], type=Seconds(min=0, max=86400),
                 default=60.0, show_default=True, help="Seconds for which a server has clearly more "
                 "sessions of this gateway than a replica before some are migrated; 0: never."),
    click.Option(["--session-idle", "idle_seconds"], type=_SECONDS, default=600.0,
                 show_default=True, help="Seconds that an unused named session is kept."),
    click.Option(["--max-named-sessions"], type=click.IntRange(min=1), default=1000, show_default=True,
                 help="Maximum number of named sessions kept."),
    click.Option(["--tool-call-parser"], default="", metavar="NAME", help="Parser of tool calls for all models: "
                 f"{', '.join(FAMILIES)}; {NO_PARSER}: requests with tools are refused. Default: found by each "
                 "model's chat template."),
    click.Option(["--vllm-metrics"], is_flag=True, help="Export the metrics under vLLM's names too, "
                 "for dashboards and autoscalers that expect those."),
    click.Option(["--cors-origin", "cors_origins"], multiple=True, metavar="ORIGIN", help="Origin whose web "
                 "pages may send requests, like https://chat.example.com; may be given several times. '*': any "
                 "origin. Default: none."),
    click.Option(["--session-header", "session_headers"], multiple=True, default=(SESSION_HEADER,),
                 show_default=True, metavar="NAME", help="Header of a request that may have its session id; may be "
                 "given several times, and the first one that a request has counts."),
]  # fmt: skip


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Parse and check the flags. Raise UserError, or click's exceptions for a malformed value."""
    command = click.Command(
        "modelswarm-gateway",
        params=_OPTIONS,
        callback=_build_settings,
        help="Answer OpenAI and gRPC clients from the servers of a swarm.",
    )
    return read_flags(command, Settings, arguments)


def _build_settings(
    incarnation: int | None,
    keepalive_seconds: float | None,
    suspect_after_seconds: float | None,
    fence_timeout_seconds: float | None,
    **values: Any,
) -> Settings:
    if not _NAME.fullmatch(values["name"]):
        raise UserError("--name", "allowed are letters, digits, '.', '_' and '-'")
    if (values["discovery_dir"] is None) is not values["kubernetes"]:
        raise UserError("--discovery-dir", "give either --discovery-dir FOLDER or --kubernetes")
    for ended in values["replaces"]:
        if not _PEER.fullmatch(ended):
            raise UserError("--replaces", f"{ended!r} is not NAME/INCARNATION/BOOT")
    for name in values["namespaces"]:
        if not _NAMESPACE.fullmatch(name):
            raise UserError("--namespace", f"{name!r} is not a valid namespace name")
    _check_targets(values)
    if not re.fullmatch(r"[A-Za-z0-9.:_-]*", values["advertise"]):
        raise UserError("--advertise", f"{values['advertise']!r} is not a host, like 10.0.0.3")
    check_cors_origins(values["cors_origins"])
    for name in values["session_headers"]:
        if not _HEADER.fullmatch(name):
            raise UserError("--session-header", f"{name!r} is not the name of a header")
    values["session_headers"] = tuple(name.lower() for name in values["session_headers"])
    if values["tool_call_parser"] not in ("", NO_PARSER, *FAMILIES):
        known = ", ".join((*FAMILIES, NO_PARSER))
        raise UserError(
            "--tool-call-parser", f"{values['tool_call_parser']!r} is not one of {known}"
        )
    hold = values["hold_limit_seconds"]
    suspect_after = suspect_after_seconds
    return Settings(
        incarnation=incarnation or 0,
        keepalive_seconds=_choose_keepalive(keepalive_seconds, hold),
        fence_timeout_seconds=_choose_fence_timeout(fence_timeout_seconds, suspect_after, hold),
        suspect_after_seconds=DEFAULT_SUSPECT_AFTER if suspect_after is None else suspect_after,
        **values,
    )


def _check_targets(values: Mapping[str, Any]) -> None:
    for name in ("http", "grpc", "admin", "metrics", "ui"):
        if values[name] is not None:
            split_target(f"--{name}", values[name])


def advertised_targets(settings: Settings, http: str, grpc: str) -> str:
    """Return the addresses at which other gateways reach this one, `HTTP,GRPC`; empty if no flag tells the host."""
    host = settings.advertise or split_target("--http", http)[0]
    if host in ("0.0.0.0", "::"):
        return ""
    return ",".join(join_target(host, int(each.rpartition(":")[2])) for each in (http, grpc))


def cap_keepalive(keepalive: float, hold: float) -> float:
    """Return a keepalive that is due before a hold of `hold` seconds ends, as the servers declared it; 0: no hold."""
    if not hold or keepalive < hold:
        return keepalive
    return max(hold / 2, MIN_KEEPALIVE)


def dead_seconds(suspect_after: float) -> float:
    """Return the silence after which a link is closed; never before its server could be suspected."""
    return max(MIN_DEAD_SECONDS, 2 * suspect_after)


def _choose_keepalive(given: float | None, hold: float) -> float:
    """Return the keepalive. With a `--hold-limit` of 0 no session waits, so any value is allowed."""
    if given is None:
        return min(DEFAULT_KEEPALIVE, hold / 2) if hold else DEFAULT_KEEPALIVE
    if 0 < hold <= given:
        raise UserError(
            "--keepalive",
            f"{given:g} s is not below --hold-limit {hold:g} s: a waiting client would get no keepalive before the end",
        )
    return given


def _choose_fence_timeout(given: float | None, suspect_after: float | None, hold: float) -> float:
    """Return the fence timeout: at most the hold limit, and above the time that it takes to suspect a server."""
    fence = _fitting_fence_timeout(suspect_after, hold) if given is None else given
    if given is not None and 0 < hold < given:
        raise UserError(
            "--fence-timeout",
            f"{given:g} s is more than --hold-limit {hold:g} s: a session would end while it is fenced",
        )
    too_early = "a server would be given up before it is suspected"
    if suspect_after is None and fence <= DEFAULT_SUSPECT_AFTER:
        raise UserError(
            "--fence-timeout",
            f"{fence:g} s is not above --suspect-after {DEFAULT_SUSPECT_AFTER:g} s: {too_early}",
        )
    if suspect_after is not None and suspect_after >= fence:
        raise UserError(
            "--suspect-after",
            f"{suspect_after:g} s is not below --fence-timeout {fence:g} s: {too_early}",
        )
    return fence


def _fitting_fence_timeout(suspect_after: float | None, hold: float) -> float:
    """Return the default, shortened to the hold limit; never below twice the time to suspect a server."""
    least = 2 * (DEFAULT_SUSPECT_AFTER if suspect_after is None else suspect_after)
    return min(DEFAULT_FENCE_TIMEOUT, max(hold, least)) if hold else DEFAULT_FENCE_TIMEOUT
