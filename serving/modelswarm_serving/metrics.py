"""What a server tells Prometheus, on a port of its own.

Fed by `node.py` on the event loop; served by prometheus-client's thread. Has its own registry.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from modelswarm_serving.core.server import ServerStats

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._rows = Counter(
            "modelswarm_server_rows", "Rows run through the blocks.", registry=self._registry
        )
        self._steps = Histogram(
            "modelswarm_server_step_seconds",
            "Time of one step of the model.",
            buckets=_STEP_BUCKETS,
            registry=self._registry,
        )
        self._failed = Counter(
            "modelswarm_server_failed_steps", "Steps that raised.", registry=self._registry
        )
        self._pages = Gauge(
            "modelswarm_server_pages_total", "Pages of KV there are.", registry=self._registry
        )
        self._free = Gauge(
            "modelswarm_server_pages_free", "Pages of KV not in use.", registry=self._registry
        )
        self._sessions = Gauge(
            "modelswarm_server_sessions", "Sessions with state here.", registry=self._registry
        )
        self._queue = Gauge(
            "modelswarm_server_queue", "Sessions that wait for a step.", registry=self._registry
        )

    def serve(self, target: str) -> str:
        """Answer on "host:port" until the process ends; returns the bound target. OSError if not."""
        host, _, port = target.rpartition(":")
        server, _ = start_http_server(int(port), host.strip("[]"), self._registry)
        return f"{host}:{server.server_port}"

    def step(self, rows: int, seconds: float, failed: bool) -> None:
        self._rows.inc(rows)
        self._steps.observe(seconds)
        if failed:
            self._failed.inc()

    def show(self, stats: ServerStats) -> None:
        self._pages.set(stats.total_pages)
        self._free.set(stats.free_pages)
        self._sessions.set(stats.sessions)
        self._queue.set(stats.ready)
