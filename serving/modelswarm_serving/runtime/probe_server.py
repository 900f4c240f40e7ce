"""The HTTP server for the kubelet and Prometheus: /live, /ready, /metrics.

Started by `app.py` before the model is loaded, so that a server that loads for an hour counts as live. It answers from
threads of its own, so a busy event loop delays no probe, and a stalled one is reported. Knows no node.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from modelswarm.process.socket_options import listen_on
from modelswarm_serving.runtime.liveness import Liveness

IDLE_SECONDS = 5.0
"""Seconds after which a silent connection is closed."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, probe_server: ProbeServer) -> None:
        self.probe_server = probe_server
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()  # which has one family
        self.socket = listen_on(host, port, self.request_queue_size)
        self.server_port = self.socket.getsockname()[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of one connection: its client has closed it."""


class ProbeServer:
    def __init__(self, target: str, liveness: Liveness) -> None:
        """Answer on "host:port" (port 0: any) from now on; OSError if the port cannot be opened."""
        self.liveness = liveness
        self.registry = CollectorRegistry()  # replaced by the node's, once there is one
        host, _, port = target.rpartition(":")
        self._server = _Server(host.strip("[]"), int(port), self)
        self.target = f"{host}:{self._server.server_port}"
        serve = self._server.serve_forever
        threading.Thread(
            target=serve, name="probes", kwargs={"poll_interval": 60}, daemon=True
        ).start()

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        if path == "/metrics":
            encode, kind = choose_encoder(accept)
            return 200, kind, encode(self.registry)
        if path == "/live":
            return _probe_response("live", self.liveness.stall_reason)
        if path == "/ready":
            return self._answer_ready()
        return 404, "text/plain", b"not found; allowed: /live, /ready and /metrics\n"

    def _answer_ready(self) -> tuple[int, str, bytes]:
        start = self.liveness.start_progress
        if start is None:
            return _probe_response("ready", self.liveness.unready_reason)
        return _json_response(503, start.response_body())


def _probe_response(probe: str, reason: str | None) -> tuple[int, str, bytes]:
    return _json_response(200 if reason is None else 503, {probe: reason is None, "reason": reason})


def _json_response(status: int, fields: Mapping[str, object]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(fields).encode() + b"\n"


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        status, kind, body = self.server.probe_server.answer(path, self.headers.get("Accept", ""))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: probes come every second."""
