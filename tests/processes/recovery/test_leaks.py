"""No server keeps pages for a session of a lost gateway. `test_http_faults.py` has clients that leave.

On the hash model, as the core manages the pages independently of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.eventually import eventually
from support.models.tiny_models import VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Request
from support.processes.swarm import (
    READY_SECONDS,
    Running,
    local_settings,
    running_swarm,
)

pytestmark = pytest.mark.full

CLIENTS = 8
LEASE = 1.0  # seconds


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("leaks", hash_model=True, lease=LEASE, token_budget=32)
    with running_swarm(
        toy_folder, "leaks", spans=2, replicas=2, sessions=2 * CLIENTS, settings=settings
    ) as running:
        yield running


def test_sessions_of_killed_gateway_free_all_pages(swarm: Running) -> None:
    swarm.wait_empty()
    requests = [Request(prompt_of(100, seed, VOCAB), 900) for seed in range(CLIENTS)]
    kept = [
        Request(prompt_of(50, 50 + seed, VOCAB), 5, session=f"kept-{seed}") for seed in range(3)
    ]
    swarm.ask_all(kept)
    streams = [swarm.start(request) for request in requests]
    for stream in streams:
        stream.wait_tokens(3)
    eventually("sessions have pages", lambda: len(swarm.pages_in_use()) >= 2)
    killed = swarm.local.kill("gateway")
    for stream in streams:
        with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
            stream.answer()
    swarm.wait_empty()
    assert swarm.local.wait_replaced("gateway", killed.incarnation, READY_SECONDS)
    eventually("the new gateway answers", lambda: answers(swarm), READY_SECONDS)
    swarm.wait_empty()


def answers(swarm: Running) -> bool:
    try:
        return len(swarm.ask(Request(prompt_of(10, 1, VOCAB), 10)).tokens) == 10
    except grpc.RpcError as error:
        assert "UNAVAILABLE" in str(error) or "NOT_FOUND" in str(error), error
        return False
