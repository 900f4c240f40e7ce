"""Ports of this machine: its loopback addresses, a free port, and small HTTP servers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def loopback_hosts() -> list[str]:
    """Return the addresses at which this machine reaches itself: one of IPv4, and one of IPv6 if it has that."""
    hosts = ["127.0.0.1"]
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        hosts.append("::1")
    return hosts


@contextmanager
def http_port(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve HTTP on a free port; yields the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
