"""The settings of an operator process: one frozen object, made from the command line.

The only reader of flags; nothing else reads the environment but the in-cluster login. Used by `app`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from modelswarm.errors import UserError
from modelswarm.process.command_line import read_flags, split_target
from modelswarm_operator.reconcile.state.policy import Policy

OWN_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Settings:
    policy: Policy
    namespaces: tuple[str, ...]  # empty: all
    elect: bool
    lease_namespace: str
    lease_name: str
    metrics: tuple[str, int]
    resync_seconds: float
    kubeconfig: Path | None  # None: the pod's service account
    run_file: Path | None
    parent_fd: int | None
    json_logs: bool


_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

_OPTIONS: list[click.Parameter] = [
    click.Option(["--server-image"], required=True, help="Image of the block servers."),
    click.Option(["--image-pull-policy"], default="IfNotPresent", show_default=True,
                 type=click.Choice(["Always", "IfNotPresent", "Never"]), help="Pull policy of that image."),
    click.Option(["--namespace", "namespaces"], multiple=True, help="Namespace whose swarms "
                 "are managed; may be repeated. Default: all."),
    click.Option(["--gateway-url"], default="", help="URL of the gateway for clients; shown in "
                 "the status of every swarm."),
    click.Option(["--pod-template"], type=click.Path(path_type=Path), help="YAML file: a "
                 "strategic-merge patch over every server pod."),
    click.Option(["--leader-election/--no-leader-election", "elect"], default=True,
                 show_default=True, help="Elect a leader by a Lease. Without it, run one replica."),
    click.Option(["--lease-namespace"], default="", help="Namespace of the Lease. Default: the "
                 "operator's own."),
    click.Option(["--lease-name"], default="modelswarm-operator", show_default=True, help="Name of the "
                 "Lease."),
    click.Option(["--metrics"], default="0.0.0.0:8080", show_default=True, help="HOST:PORT of /live, "
                 "/ready and /metrics."),
    click.Option(["--resync", "resync_seconds"], type=click.FloatRange(min=1, max=3600),
                 default=60.0, show_default=True, help="Seconds between two full lists of "
                 "swarms and pods."),
    click.Option(["--kubeconfig"], type=click.Path(path_type=Path), help="Kubeconfig file for "
                 "the API server. Default: the pod's service account."),
    click.Option(["--run-file"], type=click.Path(path_type=Path), help="File to write the bound "
                 "address to."),
    click.Option(["--parent-fd"], type=click.IntRange(min=0), help="Read end of a pipe that the "
                 "parent process holds open; this process exits when the parent has exited."),
    click.Option(["--json-logs"], is_flag=True, help="One JSON object per log line."),
]  # fmt: skip


def parse_settings(arguments: Sequence[str]) -> Settings:
    command = click.Command(
        "modelswarm-operator",
        params=_OPTIONS,
        callback=_build_settings,
        help="Run ModelSwarm resources as block servers.",
    )
    return read_flags(command, Settings, arguments)


def _build_settings(
    server_image: str,
    image_pull_policy: str,
    gateway_url: str,
    pod_template: Path | None,
    **values: Any,
) -> Settings:
    for namespace in values["namespaces"]:
        _check_name("--namespace", namespace)
    _check_name("--lease-name", values["lease_name"])
    metrics = split_target("--metrics", values.pop("metrics"), example="0.0.0.0:8080")
    if gateway_url and not re.match(r"https?://[^\s]+$", gateway_url):
        raise UserError("--gateway-url", f"{gateway_url!r} is not a URL, like http://gateway:8000")
    policy = Policy(
        server_image=server_image,
        image_pull_policy=image_pull_policy,
        gateway_url=gateway_url,
        pod_template=_read_pod_template(pod_template) if pod_template is not None else {},
    )
    kubeconfig: Path | None = values["kubeconfig"]
    if kubeconfig is not None and not kubeconfig.is_file():
        raise UserError("--kubeconfig", f"{kubeconfig}: no such file")
    lease_namespace = values.pop("lease_namespace") or (_own_namespace() if values["elect"] else "")
    return Settings(policy=policy, metrics=metrics, lease_namespace=lease_namespace, **values)


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(field, f"{name!r} is not a name that Kubernetes allows")


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE_FILE.read_text().strip()
    except OSError:
        raise UserError("--lease-namespace", "is needed outside of a cluster") from None


def _read_pod_template(file: Path) -> dict[str, Any]:
    try:
        patch: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--pod-template", f"{file} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(
            "--pod-template", f"{file} is not YAML: {' '.join(str(error).split())}"
        ) from None
    if patch is None:
        return {}
    if not isinstance(patch, dict):
        raise UserError("--pod-template", f"{file} holds no mapping; allowed: a part of a pod")
    return patch
