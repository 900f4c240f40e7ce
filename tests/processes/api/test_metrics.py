"""Metrics of real processes while answers are completed, recovered, refused, cancelled and lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.kubernetes.prometheus import lint
from support.processes.swarm import BRIEF_HOLD, ENDLESS, MODEL, Endpoints, HashSwarm, two_spans

from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.identity import name_of

pytestmark = pytest.mark.full

BODY = {"model": MODEL, "prompt": "tell me all", "ignore_eos": True, "max_tokens": 20}
LONG = {**BODY, "max_tokens": 750}
CONTEXT = 1024
PAGES = 80  # enough for one long answer


def stream(endpoints: Endpoints, outcome: str) -> float:
    return endpoints.metric("modelswarm_gateway_streams_total", model=MODEL, outcome=outcome)


def recoveries(endpoints: Endpoints, outcome: str, **labels: str) -> float:
    name = "modelswarm_gateway_recoveries_total"
    return endpoints.metric(name, model=MODEL, outcome=outcome, **labels)


def complete(endpoints: Endpoints, **fields: object) -> httpx.Response:
    return httpx.post(f"{endpoints.url}/v1/completions", json=BODY | fields, timeout=30)


@contextmanager
def streaming(endpoints: Endpoints, **fields: object) -> Iterator[Iterator[str]]:
    """Yield the lines of an answer after its first line."""
    body = LONG | {"stream": True} | fields
    with httpx.stream("POST", f"{endpoints.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def tail(endpoints: Endpoints) -> str:
    """Return the tail of the only session."""
    with SwarmClient(endpoints.admin) as client:
        [session] = [session for session in client.fetch_snapshot().sessions if session.route]
    return name_of(session.route[-1].peer)


def page(target: str) -> bytes:
    return httpx.get(f"http://{target}/metrics", timeout=10).content


def test_completed_reused_and_refused(tmp_path: Path) -> None:
    flags = ("--pages", f"{PAGES}", "--metrics", "127.0.0.1:0")
    with two_spans(tmp_path, *flags, context=CONTEXT) as swarm:
        endpoints = swarm.gateway()
        for _ in range(2):
            assert complete(endpoints, session_id="mine").status_code == 200
        eventually("both are counted", lambda: stream(endpoints, "completed") == 2)
        assert stream(endpoints, "refused") == 0
        assert endpoints.metric("modelswarm_gateway_responses_total", finish="length") == 2
        prompt = endpoints.metric("modelswarm_gateway_tokens_total", kind="prompt") / 2
        assert endpoints.metric("modelswarm_gateway_reused_tokens_total") == prompt - 1
        assert endpoints.metric("modelswarm_gateway_route_hops_sum") == 4
        assert endpoints.metric("modelswarm_gateway_request_seconds_count") == 2
        with streaming(endpoints):
            assert complete(endpoints, max_tokens=750).status_code == 429
            assert endpoints.metric("modelswarm_gateway_sessions", state="running") == 1
        assert stream(endpoints, "refused") == 1
        eventually("it was left", lambda: stream(endpoints, "cancelled") == 1)
        for target in (endpoints.metrics, swarm.member("s0")["metrics"]):
            assert not lint(page(target))


def test_recovered_abandoned_and_failed(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        swarm.server("t1", "2:4")
        swarm.servers_ready("t1")
        endpoints = swarm.gateway(*BRIEF_HOLD, "--vllm-metrics")
        eventually("all are linked", lambda: endpoints.metric("modelswarm_gateway_servers") == 3)
        with streaming(endpoints, max_tokens=3000) as lines:
            swarm.kill(tail(endpoints))
            for _ in lines:
                pass
        eventually("it is counted", lambda: stream(endpoints, "recovered") == 1)
        assert stream(endpoints, "completed") == 0
        assert (
            recoveries(endpoints, "resumed")
            == recoveries(endpoints, "resumed", cause="link_down")
            == 1
        )
        assert endpoints.metric("modelswarm_gateway_recovery_seconds_count") == 1
        assert endpoints.metric("modelswarm_gateway_replayed_tokens_total") > 0
        assert endpoints.metric("modelswarm_gateway_reroutes_total", cause="link_down") >= 1
        lose_the_head(swarm, endpoints)
        assert b"vllm:num_requests_running" in page(endpoints.metrics)


def lose_the_head(swarm: HashSwarm, endpoints: Endpoints) -> None:
    """Kill the only head: one client cancels, the other waits until the hold limit."""
    with streaming(endpoints, max_tokens=50_000) as waits:
        with streaming(endpoints, max_tokens=50_000, prompt="another"):
            swarm.kill("s0")
            eventually(
                "held", lambda: endpoints.metric("modelswarm_gateway_sessions", state="held") == 2
            )
            assert endpoints.metric("modelswarm_gateway_coverage") == 0
        eventually("it was left", lambda: recoveries(endpoints, "abandoned") == 1)
        assert stream(endpoints, "cancelled") == 1
        for _ in waits:
            pass
    assert (stream(endpoints, "failed"), recoveries(endpoints, "failed")) == (1, 1)
    assert endpoints.metric("modelswarm_gateway_requests_total", code="500") == 1
