"""Servers of a named session are silent or cut off: no gateway concludes that it does not exist (R20, takeover)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.processes.http_requests import IDS, whole
from support.processes.swarm import MODEL, Endpoints, HashSwarm, two_spans

from modelswarm_gateway.generation.session_locator import UNREACHED_SECONDS

pytestmark = pytest.mark.full

NAMED: dict[str, Any] = IDS | {"temperature": 1.0, "top_k": 50, "seed": 7, "max_tokens": 20}
GENERATED = "modelswarm_gateway_tokens_total"


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("cut_off"), "--adapters", "law=one") as running:
        yield running


@pytest.fixture(scope="module")
def gateways(swarm: HashSwarm) -> tuple[Endpoints, Endpoints]:
    return (
        swarm.gateway(name="one", detects_silence=True),
        swarm.gateway(name="two", detects_silence=True),
    )


def freeze(swarm: HashSwarm) -> None:
    for name in ("s0", "s1"):
        swarm.kill(name, signal.SIGSTOP)


def thaw(swarm: HashSwarm) -> None:
    for name in ("s0", "s1"):
        swarm.kill(name, signal.SIGCONT)


def linked(endpoints: Endpoints) -> float:
    return endpoints.metric("modelswarm_gateway_servers")


def resume(endpoints: Endpoints, body: dict[str, Any], after: str) -> httpx.Response:
    headers = {"Last-Event-ID": after}
    body = body | {"stream": True}
    return httpx.post(f"{endpoints.url}/v1/completions", json=body, headers=headers, timeout=60)


def last_id(endpoints: Endpoints, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{endpoints.url}/v1/completions", json=body | {"stream": True}, timeout=60)
    return [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")][-1]


def test_session_of_silent_servers_is_not_opened_again(
    swarm: HashSwarm, gateways: tuple[Endpoints, Endpoints]
) -> None:
    one, two = gateways
    body = NAMED | {"session_id": "known"}
    made = whole(one, body)
    before = two.metric(GENERATED, kind="generated")
    freeze(swarm)
    with ThreadPoolExecutor() as pool:
        asked: Future[list[int]] = pool.submit(whole, two, body)
        time.sleep(1.0)
        thaw(swarm)
        assert asked.result(60) == made
    assert two.metric(GENERATED, kind="generated") == before, "passed on to who has it"


def test_resumed_stream_waits_while_a_server_may_know_it(
    swarm: HashSwarm, gateways: tuple[Endpoints, Endpoints]
) -> None:
    one, two = gateways
    body = NAMED | {"session_id": "streamed"}
    last = last_id(one, body)
    freeze(swarm)
    refused = resume(two, body, last)
    thaw(swarm)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
    assert "retry-after" in refused.headers
    answer = resume(two, body, last)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("model", [MODEL, "law"])
def test_append_waits_while_a_cut_off_server_may_know_it(
    swarm: HashSwarm, gateways: tuple[Endpoints, Endpoints], model: str
) -> None:
    """A server without a link may hold the session of its model, and of each of its adapters."""
    one, two = gateways
    body = NAMED | {"session_id": "cut off", "model": model}
    whole(one, body)
    more = body | {"append": True}
    freeze(swarm)
    try:
        eventually("the links are down", lambda: linked(two) == 0)
        refused = httpx.post(f"{two.url}/v1/completions", json=more, timeout=60)
    finally:
        thaw(swarm)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "session_elsewhere")
    eventually("the links are up", lambda: linked(one) == linked(two) == 2)
    assert len(whole(two, more)) == 20


def test_new_name_does_not_wait_for_a_killed_server(
    swarm: HashSwarm, gateways: tuple[Endpoints, Endpoints]
) -> None:
    one, _ = gateways
    swarm.server("spare", "0:4")
    swarm.servers_ready("spare")
    eventually("it is linked", lambda: linked(one) == 3)
    swarm.kill("spare")
    eventually("its link is down", lambda: linked(one) == 2)
    assert (swarm.members / "spare.json").exists()
    began = time.monotonic()
    whole(one, NAMED | {"session_id": "fresh"})
    assert time.monotonic() - began < UNREACHED_SECONDS
