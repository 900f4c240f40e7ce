"""Which gateway a command talks to: the swarm that runs on this machine, unless flags say otherwise.

Used by `chat` and `generate` (HTTP), `status`, `routes` and `drain` (gRPC).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from modelswarm.errors import UserError
from modelswarm.local.run_folder import find_run

_NAME = click.option(
    "--name", metavar="NAME", help="Name of the swarm on this machine, if several run."
)


def http_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--name` and `--url`, the same for every command that talks to a swarm over HTTP."""
    url = click.option(
        "--url", metavar="URL", help="A gateway's HTTP address instead, e.g. http://127.0.0.1:8000."
    )
    return _NAME(url(command))


def grpc_target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--name` and `--url` (as `target`), the same for every command that talks to a swarm over gRPC."""
    target = click.option(
        "--url", "target", metavar="HOST:PORT", help="A gateway's gRPC address instead."
    )
    return _NAME(target(command))


def base_url(name: str | None, url: str | None) -> str:
    """`http://host:port` of the gateway, without a slash at the end."""
    if url is None:
        return f"http://{find_run(name).http}"
    if not url.startswith(("http://", "https://")):
        raise UserError("--url", f"{url!r} is not an address; allowed: e.g. http://127.0.0.1:8000")
    return url.rstrip("/")


def grpc_target(name: str | None, target: str | None) -> str:
    """`host:port` of the gateway's gRPC door."""
    return target or find_run(name).grpc
