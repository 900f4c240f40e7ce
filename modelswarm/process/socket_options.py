"""TCP sockets that listen, and options by which the kernel breaks connections that are gone."""

from __future__ import annotations

import socket

# An option of gRPC channels. Proxies of the environment are for hubs of models, and reach no gateway.
WITHOUT_PROXY = ("grpc.enable_http_proxy", 0)
WILDCARDS = ("0.0.0.0", "::", "")


def listen_on(host: str, port: int, backlog: int) -> socket.socket:
    """Return a listening TCP socket. Raise OSError.

    A wildcard is all addresses of both families, as for gRPC: pods of an IPv6 cluster have no other. A name of
    both is its IPv4 address: Debian's localhost is also `::1`, even where IPv6 is off.
    """
    if host in WILDCARDS:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name") from error
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        bound.listen(backlog)  # also finds a second listener, which bind() alone may not
    except OSError:
        bound.close()
        raise
    return bound


def keepalive_options(idle_seconds: int) -> list[tuple[int, int, int]]:
    """Return options for silent connections: probes begin after `idle_seconds`, and break one some 30 s later."""
    probes = (("TCP_KEEPIDLE", idle_seconds), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *(
            (socket.IPPROTO_TCP, getattr(socket, name), value)
            for name, value in probes
            if hasattr(socket, name)  # macOS has no TCP_KEEPIDLE
        ),
    ]


def limit_unread(made: socket.socket, seconds: float) -> None:
    """End the connection when data are not acknowledged, or full buffers not read, for so long (Linux)."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
