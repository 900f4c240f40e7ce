"""Options of TCP sockets by which the kernel breaks connections that are gone, where the platform has them."""

from __future__ import annotations

import socket


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
