"""`Inference.Session` when a server or a gateway is killed: the tokens are those of an undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.session_call import SessionCall
from support.processes.swarm import BLOCKS, ENDLESS, MODEL, VOCABULARY, HashSwarm, two_spans

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_serving.model.hash_model import reference_tokens

LEASE = ("--lease", "2")
WARM = {"temperature": 1.0, "seed": 9}
MANY = 1500  # tokens of a step that is disturbed


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("lost"), *LEASE, context=ENDLESS) as made:
        yield made


def expected(log: list[int], count: int) -> list[int]:
    end = len(log) + count
    sampling = Sampling(temperature=1.0, seed=9)
    return reference_tokens(log, sampling, count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def step(prompt: str, count: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "sampling": WARM}


def read_step(call: SessionCall, tokens: list[int], count: int) -> None:
    """Read a step's tokens until there are at least `count`."""
    while len(tokens) < count:
        tokens += call.receive().part.token_ids


def test_killed_server_in_a_step_changes_no_token(swarm: HashSwarm) -> None:
    with SessionCall(swarm.gateway(*LEASE, name="calm").grpc) as call:
        call.open(MODEL, max_length=4000)
        log = encode_bytes("once")
        log += call.tokens(**step("once", 10))
        call.send(step=step("more", MANY))
        tokens: list[int] = []
        read_step(call, tokens, 200)
        swarm.kill("s1")
        (swarm.members / "s1.json").unlink(missing_ok=True)
        swarm.server("s1", "2:4", *LEASE)
        read_step(call, tokens, MANY)
        log += encode_bytes("more")
        assert tokens == expected(log, MANY)
        log += tokens
        assert call.tokens(**step("last", 10)) == expected([*log, *encode_bytes("last")], 10)
        seen = call.ask(state={}).state
        assert seen.reroutes > 0
        assert [(hop.server, hop.first, hop.last) for hop in seen.route] == [
            ("s0", 0, 2),
            ("s1", 2, 4),
        ]
        call.ask(close={})


def test_lost_gateway_leaves_its_session_to_another_one(swarm: HashSwarm) -> None:
    owner = swarm.gateway(*LEASE, name="owner")
    other = swarm.gateway(*LEASE, name="other")
    log = encode_bytes("once")
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, session_id="mine", max_length=4000, ttl=50)
        log += call.tokens(**step("once", 10))
        done = len(log)
        call.send(step=step("more", MANY))
        tokens: list[int] = []
        read_step(call, tokens, 200)
        swarm.kill("owner")
        assert call.failure().code() is grpc.StatusCode.UNAVAILABLE
    with SessionCall(other.grpc) as call:
        seen = call.open(MODEL, session_id="mine", attach=True)
        assert (seen.max_length, seen.ttl) == (4000, 50)
        assert seen.position >= done
        call.ask(rewind={"position": done})
        assert call.tokens(**step("more", MANY)) == expected([*log, *encode_bytes("more")], MANY)
        call.ask(close={})


def test_attached_session_of_a_running_gateway_is_forwarded(swarm: HashSwarm) -> None:
    owner = swarm.gateway(*LEASE, name="first")
    other = swarm.gateway(*LEASE, name="second")
    log = encode_bytes("once")
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, session_id="far", max_length=4000, keep=True)
        log += call.tokens(**step("once", 10))
        with SessionCall(other.grpc) as guest:
            seen = guest.open(MODEL, session_id="far", attach=True)
            assert (seen.position, len(seen.route)) == (len(log), 2)
            log += encode_bytes("more")
            more = guest.tokens(**step("more", 10))
            assert more == expected(log, 10)
            assert guest.ask(state={}).state.position == len(log) + 10
            guest.ask(close={})
    gone = eventually(
        "its owner has closed it", lambda: owner.metric("modelswarm_gateway_sessions") == 0
    )
    assert gone


@pytest.mark.full
def test_session_moves_when_its_gateway_dies_in_a_forwarded_step(swarm: HashSwarm) -> None:
    owner = swarm.gateway(*LEASE, name="third")
    other = swarm.gateway(*LEASE, name="fourth")
    log = encode_bytes("once")
    with SessionCall(owner.grpc) as call, SessionCall(other.grpc) as guest:
        call.open(MODEL, session_id="moves", max_length=4000, keep=True)
        log += call.tokens(**step("once", 10))
        guest.open(MODEL, session_id="moves", attach=True)
        guest.send(step=step("more", MANY))
        tokens: list[int] = []
        read_step(guest, tokens, 200)
        swarm.kill("third")
        read_step(guest, tokens, MANY)
        log += encode_bytes("more")
        assert tokens == expected(log, MANY)
        guest.ask(close={})


def test_stopping_gateway_leaves_its_session_to_another_one(swarm: HashSwarm) -> None:
    owner = swarm.gateway(*LEASE, "--shutdown-delay", "0", "--drain-timeout", "1", name="stops")
    other = swarm.gateway(*LEASE, name="stays")
    with SessionCall(owner.grpc) as call:
        call.open(MODEL, session_id="left", max_length=4000)
        log = encode_bytes("once")
        log += call.tokens(**step("once", 10))
        swarm.kill("stops", signal.SIGTERM)
        assert call.failure().code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with SessionCall(other.grpc) as call:
        assert call.open(MODEL, session_id="left", attach=True).position == len(log)
        more = call.tokens(**step("more", 10))
        assert more == expected([*log, *encode_bytes("more")], 10)
        call.ask(close={})


@pytest.mark.full
def test_drained_server_changes_no_token_of_a_step(swarm: HashSwarm) -> None:
    gateway = swarm.gateway(*LEASE, name="drains")
    swarm.server("s2", "2:4", *LEASE)
    swarm.servers_ready("s2")
    with grpc.insecure_channel(gateway.admin) as channel, SessionCall(gateway.grpc) as call:
        admin = api_pb2_grpc.SwarmStub(channel)
        linked = api_pb2.ListRequest()
        eventually("s2 is linked", lambda: len(admin.List(linked, timeout=30).servers) == 3)
        opened = call.open(MODEL, max_length=4000)
        tail = opened.route[-1].server
        call.send(step=step("once", MANY))
        tokens: list[int] = []
        read_step(call, tokens, 200)
        list(admin.Drain(api_pb2.DrainRequest(server=tail), timeout=120))
        read_step(call, tokens, MANY)
        assert tokens == expected(encode_bytes("once"), MANY)
        assert call.ask(state={}).state.route[-1].server == {"s1": "s2", "s2": "s1"}[tail]
        call.ask(close={})
