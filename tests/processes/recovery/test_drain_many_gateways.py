"""`modelswarm drain` with several gateways: at any gateway it drains the sessions of all, and reports correctly."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.eventually import eventually
from support.processes.http_requests import lines, tokens_of, whole
from support.processes.swarm import MODEL, Endpoints, HashSwarm, two_spans

from modelswarm.cli.commands.drain import drain
from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2

CONTEXT = 4096
STREAM: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go",
    "max_tokens": CONTEXT - 2,
    "ignore_eos": True,
    "return_token_ids": True,
}
RESTS = STREAM | {"max_tokens": 20, "session_id": "rests"}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("drains"), context=CONTEXT) as running:
        yield running


def server(endpoints: Endpoints, name: str) -> api_pb2.Server:
    """Return a server as one gateway sees it."""
    with SwarmClient(endpoints.admin) as client:
        [found] = [each for each in client.fetch_snapshot().servers if name_of(each.peer) == name]
        return found


def drained(endpoints: Endpoints, *flags: str) -> Result:
    return CliRunner().invoke(drain, ["s1", "--admin", endpoints.admin, "--timeout", "60", *flags])


def wait_linked(endpoints: Endpoints) -> None:
    eventually("all are linked", lambda: endpoints.metric("modelswarm_gateway_servers") == 3)


def wait_used(endpoints: Endpoints) -> None:
    eventually("it is used again", lambda: server(endpoints, "s1").health == "linked")


@pytest.mark.full
def test_drain_covers_the_sessions_of_all_gateways(swarm: HashSwarm) -> None:
    one, two = swarm.gateway(name="one"), swarm.gateway(name="two")
    whole(two, RESTS)
    answer = lines(two, STREAM)
    got = tokens_of(next(answer))
    assert server(two, "s1").own_sessions == 2
    refused = drained(one)
    assert refused.exit_code == 1 and "the only server" in str(refused.exception)
    swarm.server("s2", "2:4")
    swarm.servers_ready("s2")
    for endpoints in (one, two):
        wait_linked(endpoints)
    done = drained(one)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "s1: empty"
    assert (server(one, "s1").sessions, server(two, "s1").own_sessions) == (0, 0)
    assert server(two, "s2").own_sessions == 1, "it ended before it was moved"
    for line in answer:
        got += tokens_of(line)
    three = swarm.gateway(name="three")
    assert whole(three, STREAM) == got
    for endpoints in (one, two, three):
        assert server(endpoints, "s1").health == "draining"
    assert drained(two, "--undo").exit_code == 0
    for endpoints in (one, two, three):
        wait_used(endpoints)


@pytest.mark.full
def test_drain_reports_sessions_that_other_gateways_keep(
    tmp_path: Path,
) -> None:
    with two_spans(tmp_path) as swarm:
        one, two = swarm.gateway(name="one"), swarm.gateway(name="two")
        whole(two, RESTS)
        swarm.server("s2", "2:4")
        wait_linked(one)
        swarm.kill("two", signal.SIGSTOP)
        left = drained(one, "--timeout", "2")
        assert left.exit_code == 1
        assert "s1: 1 session of other gateways still there after 2 s" in str(left.exception)
