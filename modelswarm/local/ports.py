"""Checks that addresses can be listened on, before any process is started. Used by `LocalSwarm`."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from modelswarm.errors import UserError
from modelswarm.process.command_line import split_target


def check_addresses_free(addresses: Mapping[str, str]) -> None:
    """Raise UserError for the first field whose address cannot be listened on, or is another field's too."""
    taken: dict[tuple[str, int], str] = {}
    for field, address in addresses.items():
        host, port = split_target(field, address, example="127.0.0.1:8000, port 0 for any")
        if port and (host, port) in taken:
            raise UserError(field, f"{address} is also {taken[host, port]}; allowed: another port")
        taken[host, port] = field
        _try_listen(host, port, field, address)


def any_port(address: str) -> str:
    """Return the address of any free port on the same host."""
    return f"{address.rpartition(':')[0]}:0"


def _try_listen(host: str, port: int, field: str, address: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            field, f"cannot listen on {address}: {reason}; allowed: a free port, or 0 for any"
        ) from None
