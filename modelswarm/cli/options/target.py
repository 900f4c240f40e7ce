"""Options for the gateway a command talks to: `--name` or `--url`, MODELSWARM_URL, the config file, a local swarm.

The first of these that is given counts. Every URL is the HTTP address of a gateway. The gateway is asked for its admin
port, unless `--admin` gives it. Of several gateways of one swarm the first that answers is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from modelswarm.cli.options.config_file import Config, read_config
from modelswarm.errors import UserError
from modelswarm.local.port_check import ADMIN_PORT
from modelswarm.local.run_folder import (
    GatewayAddresses,
    RunInfo,
    find_run,
    list_runs,
    server_names,
)

URL_EXAMPLE = "http://127.0.0.1:8000"
URL_VARIABLE = "MODELSWARM_URL"
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
    "--url",
    metavar="URL",
    help=f"HTTP address of a gateway elsewhere, e.g. {URL_EXAMPLE}. Default: {URL_VARIABLE}, or the config file's url.",
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
class HttpTarget:
    """The gateway of a command that talks HTTP."""

    base: str  # the URL before `/v1/...`, without a slash at the end
    model: str | None = None  # the config file's, for a command without `--model`


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """A gateway's admin address, and its swarm if that runs on this machine."""

    address: str  # `host:port`
    run: RunInfo | None = None
    gateway: str | None = None  # its name in `run`


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The gateways of one swarm that is given by URLs."""

    urls: tuple[str, ...]  # as `HttpTarget.base`
    config: Config | None = None  # if the URLs are its own


def find_elsewhere(name: str | None, url: str | None) -> Elsewhere | None:
    """Return the gateways that are given by `--url`, MODELSWARM_URL or the config file, in this order.

    None: a swarm of this machine is meant, of the name `name` or the only one.
    """
    _refuse_two(name, url)
    if name is not None:
        return None
    if url is not None:
        return Elsewhere(_parse_urls(url, "--url"))
    if variable := os.environ.get(URL_VARIABLE):
        return Elsewhere(_parse_urls(variable, URL_VARIABLE))
    config = read_config()
    if config.url is None:
        return None
    return Elsewhere(_parse_urls(config.url, f"{config.path}: url"), config)


def http_target(name: str | None, url: str | None) -> HttpTarget:
    """Return the gateway that the options mean."""
    found = find_elsewhere(name, url)
    if found is None:
        return HttpTarget(f"http://{_choose_gateway(find_run(name)).http}")
    return HttpTarget(_choose_url(found.urls), found.config.model if found.config else None)


def admin_target(name: str | None, url: str | None, admin: str | None) -> AdminTarget:
    """Return the gateway's admin API: of `--admin`, of the host in the URL, or of a swarm of this machine."""
    _refuse_two(name, url or admin, "--url" if url else "--admin")
    if admin is not None:
        if url is not None:
            _parse_urls(url, "--url")
        return AdminTarget(_check_admin(admin, "--admin"))
    found = find_elsewhere(name, url)
    if found is None:
        run = find_run(name)
        gateway = _choose_gateway(run)
        return AdminTarget(gateway.admin, run, gateway.name)
    if found.config is not None and found.config.admin is not None:
        return AdminTarget(_check_admin(found.config.admin, f"{found.config.path}: admin"))
    return AdminTarget(_announced_address(_choose_url(found.urls)))


def _announced_address(base: str) -> str:
    """Return the admin address that the gateway at `base` announces."""
    if base.startswith("https://"):
        raise UserError(
            "--admin", "needed with an https:// address; allowed: HOST:PORT, without TLS"
        )

    from urllib.parse import urlsplit

    from modelswarm.client.announcement import announced_admin_port
    from modelswarm.process.command_line import join_target

    host, port = urlsplit(base).hostname or "", announced_admin_port(base)
    return join_target(host, port)


def _choose_gateway(run: RunInfo) -> GatewayAddresses:
    """Return the first gateway of the swarm that answers; a single one is not asked."""
    if not run.other_gateways:
        return run.gateways[0]

    from modelswarm.client.announcement import first_that_answers

    answering = first_that_answers([f"http://{gateway.http}" for gateway in run.gateways])
    return run.gateways[answering]


def _choose_url(urls: Sequence[str]) -> str:
    """Return the first URL that answers; a single one is not asked."""
    if len(urls) == 1:
        return urls[0]

    from modelswarm.client.announcement import first_that_answers

    return urls[first_that_answers(urls)]


def _refuse_two(name: str | None, elsewhere: str | None, flag: str = "--url") -> None:
    if name is not None and elsewhere is not None:
        raise UserError(
            "--name", f"names a swarm of this machine; allowed: either --name or {flag}"
        )


def _parse_urls(text: str, field: str) -> tuple[str, ...]:
    """Return the URLs between commas, each without `/v1` and slashes at its end."""
    return tuple(_parse_url(url.strip(), field) for url in text.split(","))


def _parse_url(url: str, field: str) -> str:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(field, f"{url!r} is not a URL ({error}); {_ALLOWED_URL}") from None
    is_text = url.isprintable() and " " not in url
    is_base = is_text and not parts.query and not parts.fragment
    if parts.scheme not in ("http", "https") or not host or not is_base:
        raise UserError(field, f"{url!r} is not the URL of a gateway; {_ALLOWED_URL}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check_admin(address: str, field: str) -> str:
    from modelswarm.process.command_line import split_target

    if "://" in address:
        raise UserError(
            field, f"{address!r} is a URL; allowed: HOST:PORT of the gateway's admin port"
        )
    split_target(field, address, example=f"127.0.0.1:{ADMIN_PORT}")
    return address
