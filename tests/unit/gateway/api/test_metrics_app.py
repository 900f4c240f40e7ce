"""The metrics port: `/metrics`, a page that links to it, and errors for everything else."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from modelswarm_gateway.api.metrics_app import build_metrics_app


@pytest.fixture
def client() -> httpx.AsyncClient:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry)
    transport = httpx.ASGITransport(app=build_metrics_app(registry))
    return httpx.AsyncClient(transport=transport, base_url="http://here")


async def test_metrics_are_at_their_path_only(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert (answer.status_code, "things_total 0.0" in answer.text) == (200, True)
    for path in ("/health", "/metrics/", "/v1/models", "/metricsx"):
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "the metrics are at /metrics" in answer.text


async def test_root_page_links_to_the_metrics(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert '<a href="/metrics">' in answer.text


@pytest.mark.parametrize("path", ["/", "/metrics"])
async def test_metrics_port_only_reads(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.head(path)).status_code == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
