"""Options for the gateway a command talks to. Default: that of the swarm running on this machine.

Used by `chat` and `generate` (HTTP), `status`, `routes` and `drain` (gRPC). Opens no connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from modelswarm.errors import UserError
from modelswarm.local.run_folder import find_run

_NAME = click.option(
    "--name", metavar="NAME", help="Name of the swarm, if several run on this machine."
)


def model_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--model` to a command that asks a model."""
    return click.option(
        "--model", metavar="MODEL", help="Served name of the model. Default: the gateway's first."
    )(command)


def http_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--name` and `--url` to a command that talks to a gateway over HTTP."""
    url = click.option(
        "--url",
        metavar="URL",
        help="HTTP address of a gateway elsewhere, e.g. http://127.0.0.1:8000.",
    )
    return _NAME(url(command))


def grpc_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--name` and `--url` (as `target`) to a command that talks to a gateway over gRPC."""
    target = click.option(
        "--url", "target", metavar="HOST:PORT", help="gRPC address of a gateway elsewhere."
    )
    return _NAME(target(command))


def base_url(name: str | None, url: str | None) -> str:
    """Return `http://host:port` of the gateway, without a slash at the end."""
    if url is None:
        return f"http://{find_run(name).http}"
    if not url.startswith(("http://", "https://")):
        raise UserError("--url", f"{url!r} is not an address; allowed: e.g. http://127.0.0.1:8000")
    return url.rstrip("/")


def grpc_target(name: str | None, target: str | None) -> str:
    """Return `host:port` of the gateway's gRPC API."""
    return target or find_run(name).grpc
