"""`POST /v1/sessions/{id}/fork`: two sessions go on from one log, which is computed once, and recover alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.swarm import (
    BLOCKS,
    MODEL,
    VOCABULARY,
    Endpoints,
    HashSwarm,
    metrics,
    total,
    two_spans,
)

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

TEXT = "once upon a time " * 20
NEW = 5  # tokens of a turn


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    counted = ("--metrics", "127.0.0.1:0")
    with two_spans(tmp_path_factory.mktemp("forks"), *counted, context=2048) as made:
        yield made


def fork(at: Endpoints, session: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{at.url}/v1/sessions/{session}/fork", json=fields, timeout=60)


def turn(at: Endpoints, session: str, text: str, **fields: Any) -> list[int]:
    """Run a turn and return the tokens of its answer."""
    body = {"model": MODEL, "prompt": text, "session_id": session, "max_tokens": NEW}
    body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0} | fields
    answer = httpx.post(f"{at.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def expected(log: list[int]) -> list[int]:
    return reference_tokens(
        log, Sampling(), NEW, len(log) + NEW, n_blocks=BLOCKS, vocabulary=VOCABULARY
    )


def count_rows(swarm: HashSwarm) -> int:
    return round(total(metrics(swarm.member("s0")["metrics"]), "modelswarm_server_rows_total"))


def refusal(made: httpx.Response) -> tuple[int, str, str]:
    error = made.json()["error"]
    return made.status_code, error["code"], error["param"]


def test_both_sessions_go_on_from_one_log(swarm: HashSwarm, gateway: Endpoints) -> None:
    first = turn(gateway, "trunk", TEXT)
    log = [*encode_bytes(TEXT), *first]
    before = count_rows(swarm)
    made = fork(gateway, "trunk", session_id="branch")
    assert made.status_code == 200, made.text
    assert (made.json()["id"], made.json()["position"]) == ("branch", len(log))
    for session, text in (("branch", "and then"), ("trunk", "but no")):
        assert turn(gateway, session, text, append=True) == expected([*log, *encode_bytes(text)])
    assert count_rows(swarm) - before < 100, "the log was not computed again"


def test_fork_of_a_part_goes_on_behind_it(gateway: Endpoints) -> None:
    turn(gateway, "whole", TEXT)
    made = fork(gateway, "whole", position=100)
    assert made.json()["position"] == 100
    log = [*encode_bytes(TEXT)[:100], *encode_bytes("new")]
    assert turn(gateway, made.json()["id"], "new", append=True) == expected(log)


def test_fork_keeps_the_reservation(gateway: Endpoints) -> None:
    wanted = {"model": MODEL, "max_length": 500, "ttl": 50, "session_id": "reserved"}
    assert httpx.post(f"{gateway.url}/v1/sessions", json=wanted, timeout=60).status_code == 200
    nothing = fork(gateway, "reserved")
    assert refusal(nothing) == (410, "session_lost", "position")
    turn(gateway, "reserved", "hello", append=True)
    made = fork(gateway, "reserved").json()
    assert (made["max_length"], made["ttl"]) == (500, 50)


def test_fork_recovers_after_a_kill_without_its_parent(tmp_path: Any) -> None:
    with two_spans(tmp_path / "kill", context=2048) as swarm:
        gateway = swarm.gateway()
        log = [*encode_bytes(TEXT), *turn(gateway, "trunk", TEXT)]
        assert fork(gateway, "trunk", session_id="branch").status_code == 200
        httpx.delete(f"{gateway.url}/v1/sessions/trunk", timeout=60)
        swarm.server("s2", "2:4")
        eventually("s2 is linked", lambda: gateway.metric("modelswarm_gateway_servers") == 3)
        swarm.kill("s1")
        assert turn(gateway, "branch", "x", append=True) == expected([*log, *encode_bytes("x")])


def test_fork_is_made_by_the_gateway_that_holds_the_session(
    swarm: HashSwarm, gateway: Endpoints
) -> None:
    log = [*encode_bytes(TEXT), *turn(gateway, "held", TEXT)]
    other = swarm.gateway(name="other")
    assert fork(other, "held", session_id="held-2").status_code == 200
    assert turn(other, "held-2", "y", append=True) == expected([*log, *encode_bytes("y")])


def test_wrong_fork_is_refused_by_name(gateway: Endpoints) -> None:
    turn(gateway, "mine", "hello")
    length = len("hello") + NEW
    assert refusal(fork(gateway, "unknown")) == (404, "not_found", "session_id")
    assert refusal(fork(gateway, "mine", session_id="mine")) == (
        409,
        "session_exists",
        "session_id",
    )
    assert refusal(fork(gateway, "mine", position=length + 1)) == (410, "session_lost", "position")
    assert refusal(fork(gateway, "mine", position=0))[2] == "position"
    path = f"{gateway.url}/v1/sessions/mine/fork"
    named = httpx.post(path, json={}, headers={"x-session-id": "other"}, timeout=60)
    assert refusal(named) == (400, "invalid_request", "x-session-id")
    assert refusal(fork(gateway, "mine", batch=2))[2] == "batch"
