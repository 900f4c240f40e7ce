"""Everything a gateway process is told at its start: one frozen object, made from the command line.

The only reader of flags in this process; nothing reads the environment. Used by `main.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from modelswarm.errors import UserError
from modelswarm.process.command_line import read_flags, split_target
from modelswarm.protocol.heartbeat import LEAST_LEASE
from modelswarm_gateway import timeouts


@dataclass(frozen=True, slots=True)
class Settings:
    discovery_dir: Path | None  # or else `kubernetes`
    kubernetes: bool
    namespaces: tuple[str, ...]  # none: all
    kubeconfig: Path | None
    http: str  # host:port, as the two that follow
    grpc: str
    metrics: str
    name: str
    incarnation: int
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


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SECONDS = click.FloatRange(min=0)

_OPTIONS: list[click.Parameter] = [
    click.Option(["--discovery-dir"], type=click.Path(path_type=Path), help="Folder in which servers "
                 "write their NAME.json."),
    click.Option(["--kubernetes"], is_flag=True, help="Instead of --discovery-dir: find servers by "
                 "their pods."),
    click.Option(["--namespace", "namespaces"], multiple=True, help="Where pods are looked for; "
                 "may be given several times. None: in all namespaces."),
    click.Option(["--kubeconfig"], type=click.Path(path_type=Path), help="How to reach the API "
                 "server; default: as the pod's service account, else ~/.kube/config."),
    click.Option(["--http"], default="127.0.0.1:8000", show_default=True, help="HOST:PORT of the "
                 "OpenAI routes; port 0: any free one."),
    click.Option(["--grpc"], default="127.0.0.1:8001", show_default=True, help="HOST:PORT."),
    click.Option(["--metrics"], default="127.0.0.1:8002", show_default=True, help="HOST:PORT for "
                 "Prometheus."),
    click.Option(["--name"], default="gateway", show_default=True),
    click.Option(["--incarnation"], type=click.IntRange(min=0), help="Orders the lives of this "
                 "gateway; default: the time of its start."),
    click.Option(["--advertise"], default="", metavar="HOST", help="Where other gateways reach "
                 "this one, to pass on requests for its sessions; default: the host of --http, "
                 "unless that is all of them."),
    click.Option(["--run-file"], type=click.Path(path_type=Path), help="File to write the bound "
                 "addresses to, once all doors are open."),
    click.Option(["--parent-fd"], type=click.IntRange(min=0), help="Read end of a pipe that the "
                 "parent holds open: when the parent is gone, so is this process."),
    click.Option(["--shutdown-delay", "shutdown_delay_seconds"], type=_SECONDS, default=0.0,
                 show_default=True, help="When the process is asked to stop, new requests are "
                 "taken until none has come for so many seconds; half of --drain-timeout longer at most."),
    click.Option(["--drain-timeout", "drain_timeout_seconds"], type=_SECONDS, default=30.0, show_default=True,
                 help="Seconds that running answers get then, less what --shutdown-delay took longer."),
    click.Option(["--hold-limit", "hold_limit_seconds"], type=_SECONDS, default=60.0, show_default=True,
                 help="Seconds that a session waits for a lost server to be replaced."),
    click.Option(["--keepalive", "keepalive_seconds"], type=click.FloatRange(min=timeouts.LEAST_KEEPALIVE, max=3600),
                 help="Seconds after which a client that waits gets a sign of life: a comment in its "
                 "stream, or a ping over gRPC; default: 5, or half of a shorter --hold-limit. Comments come in "
                 "half of a swarm's sessions.holdLimit where that is no longer than this."),
    click.Option(["--suspect-after", "suspect_after_seconds"],
                 type=click.FloatRange(min=timeouts.TWO_BEATS, max=60), help="Seconds that a "
                 "server on a route may say nothing before sessions look for another; default: "
                 "0.3. More on machines that stand still at times."),
    click.Option(["--fence-timeout", "fence_timeout_seconds"], type=click.FloatRange(min=0, min_open=True),
                 help="Seconds that a session waits for a server that does not answer, if there "
                 "is no other; default: 5, or a shorter --hold-limit. No longer than a swarm's sessions.holdLimit."),
    click.Option(["--lease", "lease_seconds"],
                 type=click.FloatRange(min=LEAST_LEASE, max=86400),
                 default=30.0, show_default=True, help="Seconds after which other gateways may take "
                 "over the sessions of one that is gone; the same as the servers' --lease: of two "
                 "that differ the longer one counts."),
    click.Option(["--rebalance-after", "rebalance_after_seconds"], type=click.FloatRange(min=0, max=86400),
                 default=60.0, show_default=True, help="Seconds for which a server has clearly more "
                 "sessions of this gateway than an equal one before some are moved; 0: never."),
    click.Option(["--session-idle", "idle_seconds"], type=_SECONDS, default=600.0,
                 show_default=True, help="Seconds that an unused named session is kept."),
    click.Option(["--max-named-sessions"], type=click.IntRange(min=1), default=1000, show_default=True,
                 help="Named sessions to keep at most."),
    click.Option(["--vllm-metrics"], is_flag=True, help="Show the metrics under vLLM's names too, "
                 "for dashboards and autoscalers that ask for those."),
]  # fmt: skip


def parse(arguments: Sequence[str]) -> Settings:
    command = click.Command(
        "modelswarm-gateway",
        params=_OPTIONS,
        callback=_settings,
        help="Answer OpenAI and gRPC clients from the servers of a swarm.",
    )
    return read_flags(command, Settings, arguments)


def _settings(
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
    for name in values["namespaces"]:
        if not _NAMESPACE.fullmatch(name):
            raise UserError("--namespace", f"{name!r} is no name of a namespace")
    for name in ("http", "grpc", "metrics"):
        split_target(f"--{name}", values[name])
    if not re.fullmatch(r"[A-Za-z0-9.:_-]*", values["advertise"]):
        raise UserError("--advertise", f"{values['advertise']!r} is no host, like 10.0.0.3")
    hold = values["hold_limit_seconds"]
    return Settings(
        incarnation=incarnation or 0,
        keepalive_seconds=timeouts.keepalive_seconds(keepalive_seconds, hold),
        fence_timeout_seconds=timeouts.fence_seconds(fence_timeout_seconds, suspect_after_seconds, hold),
        suspect_after_seconds=timeouts.SILENCE if suspect_after_seconds is None else suspect_after_seconds,
        **values,
    )


def reachable_at(settings: Settings, http: str, grpc: str) -> str:
    """The doors as other gateways reach them, `HTTP,GRPC`; empty when nobody has said how."""
    host = settings.advertise or split_target("--http", http)[0]
    if host in ("0.0.0.0", "::"):
        return ""
    host = f"[{host}]" if ":" in host else host
    return ",".join(f"{host}:{target.rpartition(':')[2]}" for target in (http, grpc))
