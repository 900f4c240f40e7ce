"""The app of the metrics port: `/metrics` for Prometheus, and at `/` a page that links to it.

Served by `asgi_server.py`. Every other path is 404, so that a wrong scrape path is noticed.
"""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

METRICS_PATH = "/metrics"
METHODS = ("GET", "HEAD")
# As Prometheus' own exporters have it.
PAGE = """<!doctype html>
<html lang="en">
<head><title>ModelSwarm gateway</title></head>
<body><h1>ModelSwarm gateway</h1><p><a href="/metrics">Metrics</a></p></body>
</html>
"""


def build_metrics_app(registry: CollectorRegistry) -> ASGIApp:
    """Return the app that Prometheus scrapes."""
    metrics = cast("ASGIApp", make_asgi_app(registry))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await _choose_response(scope, metrics)(scope, receive, send)

    return app


def _choose_response(scope: Scope, metrics: ASGIApp) -> ASGIApp:
    if scope["path"] not in ("/", METRICS_PATH):
        return PlainTextResponse(
            f"there is nothing at this path; the metrics are at {METRICS_PATH}\n", 404
        )
    if scope["method"] not in METHODS:
        allowed = ", ".join(METHODS)
        text = f"this method is not allowed here; allowed: {allowed}\n"
        return PlainTextResponse(text, 405, {"allow": allowed})
    return metrics if scope["path"] == METRICS_PATH else HTMLResponse(PAGE)
