"""Whatever clients and gateways do, no server keeps a page for a session that nobody has any more.

On the hash model: pages are the core's business, and the model makes no difference to it.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from support.models.tiny_models import VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Ask
from support.processes.swarm import (
    MODEL,
    READY_SECONDS,
    Running,
    local_settings,
    metrics,
    running_swarm,
    wait_until,
)

SESSIONS, EARLY = 200, 40
EARLY_SECONDS = 0.01
CLIENTS = 8
LEASE = 1.0


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("leaks", hash_model=True, lease=LEASE, token_budget=32)
    with running_swarm(
        toy_folder, "leaks", spans=2, replicas=2, sessions=2 * CLIENTS, settings=settings
    ) as running:
        yield running


def test_two_hundred_sessions_whose_clients_leave_give_all_their_pages_back(swarm: Running) -> None:
    swarm.wait_empty()
    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in [clients.submit(leave_often, swarm, seed) for seed in range(CLIENTS)]:
            done.result()
    swarm.wait_empty()
    assert not swarm.sessions()
    gone = f'modelswarm_gateway_requests_total{{code="499",model="{MODEL}"}}'
    assert metrics(swarm.local.metrics)[gone] >= SESSIONS


def leave_often(swarm: Running, seed: int) -> None:
    """Sessions whose client leaves midway, and some whose client leaves before anything came."""
    rng = random.Random(seed)
    for _ in range(SESSIONS // CLIENTS):
        leave(swarm, rng, rng.choice((1, 7, 20)))
    for _ in range(EARLY // CLIENTS):
        leave(swarm, rng, 0)


def leave(swarm: Running, rng: random.Random, pieces: int) -> None:
    """One request, over either door, whose client leaves after so many pieces of the answer."""
    ask = Ask(prompt_of(rng.choice((3, 40, 300)), rng.randrange(1 << 30), VOCAB), 500)
    if rng.random() < 0.5:
        leave_http(swarm.local.http, ask, pieces)
    else:
        leave_grpc(swarm, ask, pieces)


def leave_grpc(swarm: Running, ask: Ask, pieces: int) -> None:
    stream = swarm.start(ask)
    stream.wait_tokens(pieces)
    if not pieces:
        time.sleep(EARLY_SECONDS)
    stream.cancel()
    with pytest.raises(grpc.RpcError, match="CANCELLED"):
        stream.answer()


def leave_http(target: str, ask: Ask, pieces: int) -> None:
    body = {
        "model": MODEL,
        "prompt": ask.prompt,
        "max_tokens": ask.new,
        "stream": True,
        "ignore_eos": True,
    }
    with closing(http.client.HTTPConnection(target, timeout=60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        if not pieces:
            time.sleep(EARLY_SECONDS)
            return
        with connection.getresponse() as answer:
            assert answer.status == 200
            while pieces:
                line = answer.readline()
                assert line and b"error" not in line, line
                pieces -= line.startswith(b"data: {")


def test_the_sessions_of_a_killed_gateway_give_all_their_pages_back(swarm: Running) -> None:
    swarm.wait_empty()
    asks = [Ask(prompt_of(100, seed, VOCAB), 900) for seed in range(CLIENTS)]
    kept = [Ask(prompt_of(50, 50 + seed, VOCAB), 5, session=f"kept-{seed}") for seed in range(3)]
    swarm.ask_all(kept)
    streams = [swarm.start(ask) for ask in asks]
    for stream in streams:
        stream.wait_tokens(3)
    wait_until(lambda: len(swarm.pages_in_use()) >= 2, 5.0, "no sessions on any route")
    killed = swarm.local.kill("gateway")
    for stream in streams:
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            stream.answer()
    swarm.wait_empty(2 * LEASE + 5.0)
    assert swarm.local.wait_replaced("gateway", killed.incarnation, READY_SECONDS)
    wait_until(lambda: answers(swarm), READY_SECONDS, "the new gateway does not answer")
    swarm.wait_empty()


def answers(swarm: Running) -> bool:
    try:
        return len(swarm.ask(Ask(prompt_of(10, 1, VOCAB), 10)).tokens) == 10
    except grpc.RpcError as error:
        assert "UNAVAILABLE" in str(error) or "NOT_FOUND" in str(error), error
        return False
