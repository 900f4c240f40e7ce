"""Ports of this machine: its loopback addresses, a free port, and small servers of HTTP and gRPC."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import grpc

from modelswarm.protocol.wire import api_pb2_grpc


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


@contextmanager
def grpc_port(add: Callable[[grpc.Server], object] = lambda _: None) -> Iterator[int]:
    """Serve what `add` adds to the server over gRPC on a free port."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


@contextmanager
def inference_port(servicer: api_pb2_grpc.InferenceServicer) -> Iterator[str]:
    """Serve the calls of a gateway over gRPC on a free port; yields the target."""
    with grpc_port(
        lambda server: api_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    ) as port:
        yield f"127.0.0.1:{port}"
