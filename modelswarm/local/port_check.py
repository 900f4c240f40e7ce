"""Explains a wrong address: finds out what answers there, and names the port that was meant.

Called by the command line and by the client after a call has failed. One short connection; nothing is changed at the
other end.
"""

from __future__ import annotations

import enum
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from modelswarm.errors import ModelSwarmError

if TYPE_CHECKING:
    from modelswarm.local.run_folder import GatewayAddresses

PROBE_SECONDS = 2.0  # for the connection, and for each part of the answer
ANSWER_BYTES = 4096
HTTP_PORT, ADMIN_PORT = 8000, 8003  # of a gateway, by default
_REQUEST = b"GET /health HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"
# A gateway's metrics port says where its metrics are; exporters of Prometheus answer every path with theirs.
_METRICS_MARKS = (b"the metrics are at /metrics", b"# HELP ", b"openmetrics")
_SETTINGS_FRAME = 4  # the first frame of an HTTP/2 server, by its type


class Answer(enum.Enum):
    """The kinds of listeners at an address; the value is the name in sentences."""

    GATEWAY = "the HTTP port of a gateway"
    GRPC = "a gRPC port"
    METRICS = "a metrics port"
    OTHER_HTTP = "an HTTP port, but not of a gateway"


def explain_answer(address: str, api: str, *, is_proxied: bool = False) -> str | None:
    """Return one sentence about what answers at `address` in place of `api`; None if nothing does, or the right one.

    `address`: `host:port` or a URL. `api`: `HTTP` or `gRPC`, the admin API. `is_proxied`: an HTTP answer that is not a
    gateway's says nothing, for a proxy may give it while its gateway is away.
    """
    try:
        host, port = _split(address)
    except (ModelSwarmError, ValueError):
        return None
    found = probe(host, port)
    if address.startswith("https://"):
        if found is Answer.GATEWAY:
            plain = f"http://{address.removeprefix('https://')}"
            return f"{address} is {found.value} without TLS; allowed: {plain}"
        if found is Answer.OTHER_HTTP:  # servers with TLS may answer plain HTTP, too
            return None
    if is_proxied and found is Answer.OTHER_HTTP:
        return None
    if found is None or found is (Answer.GATEWAY if api == "HTTP" else Answer.GRPC):
        return None
    local = _local_gateway(host, port)
    if api == "HTTP":
        where = f"http://{local.http}" if local else f"by default port {HTTP_PORT}"
        return f"{address} is {found.value}; allowed: the gateway's HTTP port, {where}"
    where = local.admin if local else f"by default port {ADMIN_PORT}"
    return f"{address} is {found.value}; allowed: the gateway's admin port, {where} (--admin)"


def probe(host: str, port: int) -> Answer | None:
    """Return what answers a small HTTP request there; None if nothing does."""
    received = b""
    try:
        with socket.create_connection((host, port), PROBE_SECONDS) as connection:
            connection.sendall(_REQUEST)
            while len(received) < ANSWER_BYTES and (part := connection.recv(ANSWER_BYTES)):
                received += part
    except (OSError, UnicodeError):
        return _classify(received)  # a refused or broken connection; a host name that cannot be one
    return _classify(received)


def _classify(received: bytes) -> Answer | None:
    if received.startswith(b"HTTP/"):
        if any(mark in received for mark in _METRICS_MARKS):
            return Answer.METRICS
        return Answer.GATEWAY if b"x-request-id" in received.lower() else Answer.OTHER_HTTP
    if len(received) >= 9 and received[3] == _SETTINGS_FRAME:
        return Answer.GRPC
    return None


def _split(address: str) -> tuple[str, int]:
    if "://" not in address:
        from modelswarm.process.command_line import split_target

        return split_target("address", address)
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _local_gateway(host: str, port: int) -> GatewayAddresses | None:
    """Return the gateway of this machine that listens on this port."""
    if host not in ("127.0.0.1", "localhost", "::1"):
        return None
    try:
        from modelswarm.local.run_folder import list_runs
    except ImportError:  # Windows has no fcntl, and no swarm of its own
        return None
    for gateway in (gateway for run in list_runs() for gateway in run.gateways):
        addresses = (gateway.http, gateway.grpc, gateway.metrics, gateway.admin)
        if port in (int(address.rpartition(":")[2]) for address in addresses):
            return gateway
    return None
