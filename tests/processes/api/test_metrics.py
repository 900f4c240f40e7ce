"""What real processes count while answers are completed, recovered, refused, left and lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.eventually import eventually
from support.kubernetes.prometheus import lint
from support.processes.swarm import BRIEF_HOLD, ENDLESS, MODEL, Doors, HashSwarm, two_spans

from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.identity import name_of

pytestmark = pytest.mark.full

BODY = {"model": MODEL, "prompt": "tell me all", "ignore_eos": True, "max_tokens": 20}
LONG = {**BODY, "max_tokens": 750}
CONTEXT = 1024
PAGES = 80  # room for one long answer


def stream(doors: Doors, outcome: str) -> float:
    return doors.metric("modelswarm_gateway_streams_total", model=MODEL, outcome=outcome)


def recoveries(doors: Doors, outcome: str, **labels: str) -> float:
    name = "modelswarm_gateway_recoveries_total"
    return doors.metric(name, model=MODEL, outcome=outcome, **labels)


def complete(doors: Doors, **fields: object) -> httpx.Response:
    return httpx.post(f"{doors.url}/v1/completions", json=BODY | fields, timeout=30)


@contextmanager
def streaming(doors: Doors, **fields: object) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    body = LONG | {"stream": True} | fields
    with httpx.stream("POST", f"{doors.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def tail(doors: Doors) -> str:
    """The server that ends the route of the only session."""
    with SwarmClient(doors.grpc) as door:
        [session] = [session for session in door.fetch_snapshot().sessions if session.route]
    return name_of(session.route[-1].peer)


def page(target: str) -> bytes:
    return httpx.get(f"http://{target}/metrics", timeout=10).content


def test_completed_reused_and_refused(tmp_path: Path) -> None:
    flags = ("--pages", f"{PAGES}", "--metrics", "127.0.0.1:0")
    with two_spans(tmp_path, *flags, context=CONTEXT) as swarm:
        doors = swarm.gateway()
        for _ in range(2):
            assert complete(doors, session_id="mine").status_code == 200
        assert (stream(doors, "completed"), stream(doors, "refused")) == (2, 0)
        assert doors.metric("modelswarm_gateway_responses_total", finish="length") == 2
        prompt = doors.metric("modelswarm_gateway_tokens_total", kind="prompt") / 2
        assert doors.metric("modelswarm_gateway_reused_tokens_total") == prompt - 1
        assert doors.metric("modelswarm_gateway_route_hops_sum") == 4
        assert doors.metric("modelswarm_gateway_request_seconds_count") == 2
        with streaming(doors):
            assert complete(doors, max_tokens=750).status_code == 429
            assert doors.metric("modelswarm_gateway_sessions", state="running") == 1
        assert stream(doors, "refused") == 1
        eventually("it was left", lambda: stream(doors, "cancelled") == 1)
        for target in (doors.metrics, swarm.member("s0")["metrics"]):
            assert not lint(page(target))


def test_recovered_abandoned_and_failed(tmp_path: Path) -> None:
    with two_spans(tmp_path, context=ENDLESS) as swarm:
        swarm.server("t1", "2:4")
        swarm.servers_ready("t1")
        doors = swarm.gateway(*BRIEF_HOLD, "--vllm-metrics")
        eventually("all are linked", lambda: doors.metric("modelswarm_gateway_servers") == 3)
        with streaming(doors, max_tokens=3000) as lines:
            swarm.kill(tail(doors))
            for _ in lines:
                pass
        assert (stream(doors, "recovered"), stream(doors, "completed")) == (1, 0)
        assert recoveries(doors, "resumed") == recoveries(doors, "resumed", cause="link_down") == 1
        assert doors.metric("modelswarm_gateway_recovery_seconds_count") == 1
        assert doors.metric("modelswarm_gateway_replayed_tokens_total") > 0
        assert doors.metric("modelswarm_gateway_reroutes_total", cause="link_down") >= 1
        lose_the_head(swarm, doors)
        assert b"vllm:num_requests_running" in page(doors.metrics)


def lose_the_head(swarm: HashSwarm, doors: Doors) -> None:
    """Nobody else holds its blocks: one client leaves, the other waits in vain."""
    with streaming(doors, max_tokens=50_000) as waits:
        with streaming(doors, max_tokens=50_000, prompt="another"):
            swarm.kill("s0")
            eventually(
                "held", lambda: doors.metric("modelswarm_gateway_sessions", state="held") == 2
            )
            assert doors.metric("modelswarm_gateway_coverage") == 0
        eventually("it was left", lambda: recoveries(doors, "abandoned") == 1)
        assert stream(doors, "cancelled") == 1
        for _ in waits:
            pass
    assert (stream(doors, "failed"), recoveries(doors, "failed")) == (1, 1)
    assert doors.metric("modelswarm_gateway_requests_total", code="500") == 1
