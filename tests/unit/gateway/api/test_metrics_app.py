"""The metrics port: `/metrics`, a page that links to it, and errors for everything else."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from support.gateway_service import turns_of_another_task

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


COUNT = 40
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def many_metrics() -> tuple[CollectorRegistry, httpx.AsyncClient]:
    registry = CollectorRegistry()
    for number in range(COUNT):
        Counter(f"things_{number}", "Things.", ["kind"], registry=registry).labels("a").inc(number)
    transport = httpx.ASGITransport(app=build_metrics_app(registry))
    return registry, httpx.AsyncClient(transport=transport, base_url="http://here")


async def test_streams_go_on_between_two_metrics_of_a_scrape() -> None:
    """The samples of 50 models take 0.1 s, in which no stream would get a token."""
    _, client = many_metrics()

    async def scrape() -> None:
        assert (await client.get("/metrics")).status_code == 200

    assert await turns_of_another_task(scrape()) >= COUNT


async def test_scrape_is_that_of_the_library_in_each_format() -> None:
    registry, client = many_metrics()
    plain = await client.get("/metrics", headers={"accept-encoding": "identity"})
    assert plain.content == generate_latest(registry)
    packed = await client.get("/metrics", headers={"accept-encoding": "gzip"})
    assert (packed.headers["content-encoding"], packed.content) == ("gzip", plain.content)
    openmetrics = await client.get("/metrics", headers={"accept": OPENMETRICS})
    assert openmetrics.content == generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    one = await client.get("/metrics", params={"name[]": "things_7_total"})
    assert one.text.splitlines()[-1] == 'things_7_total{kind="a"} 7.0'
    assert "things_8" not in one.text
