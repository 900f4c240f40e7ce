"""Options for the gateway a command talks to. Default: that of the swarm running on this machine.

`--url` means the HTTP address of a gateway in every command. The gateway is asked for its admin port, unless
`--admin` gives it. Of several gateways on this machine the first that answers is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from modelswarm.errors import UserError
from modelswarm.local.run_folder import (
    GatewayAddresses,
    RunInfo,
    find_run,
    list_runs,
    server_names,
)

ADMIN_PORT = 8003  # of a gateway, by default
URL_EXAMPLE = "http://127.0.0.1:8000"
_ALLOWED_URL = (
    f"allowed: the gateway's HTTP address, e.g. {URL_EXAMPLE}; its admin address is --admin"
)


def complete_swarm_name(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the swarms of this machine whose names begin so."""
    return [CompletionItem(run.name) for run in list_runs() if run.name.startswith(incomplete)]


def complete_server(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the servers that begin so, of the swarm `--name`, or of all on this machine."""
    wanted = context.params.get("name")
    runs = [run for run in list_runs() if wanted in (None, run.name)]
    names = sorted(name for run in runs for name in server_names(run.name))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


_NAME = click.option(
    "--name",
    metavar="NAME",
    shell_complete=complete_swarm_name,
    help="Name of the swarm. Needed only if several run on this machine.",
)
_URL = click.option(
    "--url", metavar="URL", help=f"HTTP address of a gateway elsewhere, e.g. {URL_EXAMPLE}."
)
_ADMIN = click.option(
    "--admin",
    metavar="HOST:PORT",
    help="Admin address of a gateway elsewhere. Default: the port that the gateway at --url announces.",
)


def model_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--model` to a command that asks a model."""
    return click.option(
        "--model", metavar="MODEL", help="Served name of the model. Default: the gateway's first."
    )(command)


def http_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--name` and `--url` to a command that talks to a gateway over HTTP."""
    return _NAME(_URL(command))


def admin_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--name`, `--url` and `--admin` to a command about a gateway's servers and sessions."""
    return _NAME(_URL(_ADMIN(command)))


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """A gateway's admin address, and its swarm if that runs on this machine."""

    address: str  # `host:port`
    run: RunInfo | None = None
    gateway: str | None = None  # its name in `run`


def base_url(name: str | None, url: str | None) -> str:
    """Return the URL before `/v1/...` of the gateway, without a slash at the end."""
    _refuse_two(name, url)
    return f"http://{_choose_gateway(find_run(name)).http}" if url is None else _parse_url(url)[0]


def admin_target(name: str | None, url: str | None, admin: str | None) -> AdminTarget:
    """Return the gateway's admin API: of `--admin`, of the host in `--url`, or of a swarm of this machine."""
    _refuse_two(name, url or admin, "--url" if url else "--admin")
    parsed = None if url is None else _parse_url(url)
    if admin is not None:
        return AdminTarget(_check_admin(admin))
    if parsed is None:
        run = find_run(name)
        gateway = _choose_gateway(run)
        return AdminTarget(gateway.admin, run, gateway.name)
    base, host = parsed
    if base.startswith("https://"):
        raise UserError(
            "--admin", "needed with an https:// address; allowed: HOST:PORT, without TLS"
        )

    from modelswarm.client.announcement import announced_admin_port

    port = announced_admin_port(base)
    return AdminTarget(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _choose_gateway(run: RunInfo) -> GatewayAddresses:
    """Return the first gateway of the swarm that answers; a single one is not asked."""
    if not run.other_gateways:
        return run.gateways[0]

    from modelswarm.client.announcement import first_that_answers

    return first_that_answers(run.gateways)


def _refuse_two(name: str | None, elsewhere: str | None, flag: str = "--url") -> None:
    if name is not None and elsewhere is not None:
        raise UserError(
            "--name", f"names a swarm of this machine; allowed: either --name or {flag}"
        )


def _parse_url(url: str) -> tuple[str, str]:
    """Return the URL without `/v1` and slashes at its end, and its host."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError("--url", f"{url!r} is not a URL ({error}); {_ALLOWED_URL}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UserError("--url", f"{url!r} is not the URL of a gateway; {_ALLOWED_URL}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/"), host


def _check_admin(address: str) -> str:
    from modelswarm.process.command_line import split_target

    if "://" in address:
        raise UserError(
            "--admin", f"{address!r} is a URL; allowed: HOST:PORT of the gateway's admin port"
        )
    split_target("--admin", address, example=f"127.0.0.1:{ADMIN_PORT}")
    return address
