"""The app of the metrics port: `/metrics` for Prometheus, and at `/` a page that links to it.

Served by `asgi_server.py`. Every other path is 404, so that a wrong scrape path is noticed. The samples of 50 models
take longer than a stream may wait, so that other tasks run between two metrics.
"""

from __future__ import annotations

import asyncio
import gzip
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
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

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = _page(scope) or await _metrics(registry, Request(scope))
        await response(scope, receive, send)

    return app


def _page(scope: Scope) -> Response | None:
    """Return the response to a request that asks for no metrics."""
    if scope["path"] not in ("/", METRICS_PATH):
        return PlainTextResponse(
            f"there is nothing at this path; the metrics are at {METRICS_PATH}\n", 404
        )
    if scope["method"] not in METHODS:
        allowed = ", ".join(METHODS)
        text = f"this method is not allowed here; allowed: {allowed}\n"
        return PlainTextResponse(text, 405, {"allow": allowed})
    return None if scope["path"] == METRICS_PATH else HTMLResponse(PAGE)


async def _metrics(registry: CollectorRegistry, request: Request) -> Response:
    """Return all metrics, or those of the parameters `name[]`, in the format that the client accepts."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    names = request.query_params.getlist("name[]")
    wanted = registry.restricted_registry(names) if names else registry
    end = encode(_collected())  # a last line, if the format has one
    parts = []
    for metric in wanted.collect():
        parts.append(encode(_collected(metric)).removesuffix(end))
        await asyncio.sleep(0)
    body, headers = b"".join((*parts, end)), {"content-type": content_type}
    if gzip_accepted(request.headers.get("accept-encoding", "")):
        body = await asyncio.to_thread(gzip.compress, body)
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers)


def _collected(*metrics: Metric) -> Collector:
    """Return metrics that were collected as an encoder takes them."""
    return cast("Collector", SimpleNamespace(collect=lambda: metrics))
