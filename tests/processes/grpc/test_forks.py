"""`fork` of a session's stream and `ForkSession`: another session goes on from the log, which is computed once."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.session_call import SessionCall
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
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm_serving.model.hash_model import reference_tokens

PAGES = 60  # of 16 positions
LENGTH = 400  # positions of a session: two have room, three have not
TEXT = "once upon a time " * 12
WARM = {"temperature": 1.0, "seed": 9}
ROW = {"dtype": "float32", "shape": [1, 2], "data": struct.pack("<2f", 0.5, 1.0)}


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    options = ("--metrics", "127.0.0.1:0", "--pages", str(PAGES))
    with two_spans(tmp_path_factory.mktemp("forks"), *options, context=LENGTH) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway()


@pytest.fixture
def call(endpoints: Endpoints) -> Iterator[SessionCall]:
    with SessionCall(endpoints.grpc) as made:
        yield made
    eventually("nothing is kept", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)


@pytest.fixture
def branch(endpoints: Endpoints) -> Iterator[SessionCall]:
    with SessionCall(endpoints.grpc) as made:
        yield made


@pytest.fixture
def stub(endpoints: Endpoints) -> Iterator[Any]:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        yield api_pb2_grpc.InferenceStub(channel)


def expected(log: list[int], count: int, **sampling: Any) -> list[int]:
    """Return the tokens behind this log."""
    end = len(log) + count
    return reference_tokens(
        log, Sampling(**sampling), count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY
    )


def count_rows(swarm: HashSwarm) -> int:
    return round(total(metrics(swarm.member("s0")["metrics"]), "modelswarm_server_rows_total"))


def begin(call: SessionCall) -> list[int]:
    """Open a session, run its first step, and return its log."""
    call.open(MODEL, max_length=LENGTH, ttl=50)
    return encode_bytes(TEXT) + call.tokens(prompt=TEXT, max_tokens=9, ignore_eos=True)


def refusal(error: Any) -> tuple[str, str, str]:
    trailing = dict(error.trailing_metadata())
    return error.code().name, trailing["error-code"], trailing.get("error-param", "")


def refused(ask: Callable[[], Any]) -> tuple[str, str, str]:
    with pytest.raises(grpc.RpcError) as failed:
        ask()
    return refusal(failed.value)


def test_both_sessions_go_on_from_one_log(
    call: SessionCall, branch: SessionCall, swarm: HashSwarm
) -> None:
    log = begin(call)
    before = count_rows(swarm)
    made = call.ask(fork={})
    assert (made.position, made.forked.position) == (len(log), len(log))
    assert (made.forked.max_length, made.forked.ttl) == (LENGTH, 50)
    seen = branch.open(MODEL, session_id=made.forked.session_id, attach=True)
    assert seen.position == len(log)
    for each, text in ((branch, "and then"), (call, "but no"), (branch, "!")):
        more = each.tokens(prompt=text, max_tokens=7, ignore_eos=True, sampling=WARM)
        if each is call:
            assert more == expected([*log, *encode_bytes(text)], 7, **WARM)
    call.ask(close={})
    other = [*log, *encode_bytes("and then")]
    other += expected(other, 7, **WARM) + encode_bytes("!")
    assert branch.ask(state={}).position == len(other) + 7
    branch.ask(rewind={"position": len(other) - 1})
    assert branch.tokens(prompt="!", max_tokens=7, ignore_eos=True) == expected(other, 7)
    assert count_rows(swarm) - before < 100, "the log was not computed again"


@pytest.mark.full
def test_fork_behind_a_rewind_has_what_is_left(call: SessionCall, endpoints: Endpoints) -> None:
    log = begin(call)[:100]
    call.ask(rewind={"position": 100})
    part: dict[str, Any] = {"position": 60, "session_id": "part"}
    for position, fields in ((100, {}), (60, part)):
        made = call.ask(fork=fields)
        assert (made.position, made.forked.position) == (100, position)
        with SessionCall(endpoints.grpc) as branch:
            branch.open(MODEL, session_id=made.forked.session_id, attach=True)
            tokens = branch.tokens(prompt="new", max_tokens=5, ignore_eos=True)
            assert tokens == expected([*log[:position], *encode_bytes("new")], 5)
            branch.ask(close={})
    call.send(fork={"position": 101})
    assert refusal(call.failure()) == ("INVALID_ARGUMENT", "invalid_request", "fork.position")


@pytest.mark.full
def test_fork_has_the_rows_of_its_parent(call: SessionCall, branch: SessionCall) -> None:
    call.open(MODEL, max_length=LENGTH)
    call.step(prompt=TEXT, max_tokens=0)
    call.step(hidden_states=ROW, max_tokens=0)
    made = call.ask(fork={}).forked
    branch.open(MODEL, session_id=made.session_id, attach=True)
    wanted = {"prompt": "more", "max_tokens": 20, "ignore_eos": True, "sampling": WARM}
    assert branch.tokens(**wanted) == call.tokens(**wanted)


@pytest.mark.full
def test_refused_fork_names_its_field_and_leaves_its_parent(
    call: SessionCall, branch: SessionCall, stub: Any
) -> None:
    log = begin(call)
    parent = call.ask(state={}).state.session_id

    def fork(session: str = parent, **fields: Any) -> api_pb2.SessionState:
        request = api_pb2.ForkSessionRequest(session_id=session, fork=api_pb2.Fork(**fields))
        made: api_pb2.SessionState = stub.ForkSession(request, timeout=60)
        return made

    wrong = "INVALID_ARGUMENT", "invalid_request"
    assert refused(lambda: fork("unknown")) == ("NOT_FOUND", "not_found", "session_id")
    assert refused(lambda: fork("")) == (*wrong, "session_id")
    assert refused(lambda: fork(position=0)) == (*wrong, "fork.position")
    assert refused(lambda: fork(session_id="x" * 257)) == (*wrong, "fork.session_id")
    lost = "DATA_LOSS", "session_lost", "fork.position"
    assert refused(lambda: fork(position=len(log) + 1)) == lost
    exists = "ALREADY_EXISTS", "session_exists", "fork.session_id"
    assert refused(lambda: fork(session_id=parent)) == exists
    assert fork(session_id="second").position == len(log)
    assert refused(fork)[:2] == ("RESOURCE_EXHAUSTED", "no_capacity")
    branch.open(MODEL, session_id="second", attach=True)
    assert call.tokens(prompt="b", max_tokens=5, ignore_eos=True) == expected(
        [*log, *encode_bytes("b")], 5
    )


@pytest.mark.full
def test_session_of_blocks_is_not_forked(call: SessionCall, stub: Any) -> None:
    opened = call.open(MODEL, max_length=50, blocks={"first": 0, "last": 2})
    request = api_pb2.ForkSessionRequest(session_id=opened.session_id)
    failed = refused(lambda: stub.ForkSession(request, timeout=60))
    assert failed == ("INVALID_ARGUMENT", "invalid_request", "session_id")


@pytest.mark.full
def test_fork_without_room_ends_the_stream(call: SessionCall, branch: SessionCall) -> None:
    begin(call)
    branch.open(MODEL, max_length=LENGTH)
    call.send(fork={})
    assert refusal(call.failure())[:2] == ("RESOURCE_EXHAUSTED", "no_capacity")


@pytest.mark.full
def test_fork_is_made_by_the_gateway_that_holds_the_session(
    call: SessionCall, branch: SessionCall, swarm: HashSwarm
) -> None:
    log = begin(call)
    parent = call.ask(state={}).state.session_id
    other = swarm.gateway(name="other")
    with SessionCall(other.grpc) as attached:
        attached.open(MODEL, session_id=parent, attach=True, keep=True)
        made = attached.ask(fork={}).forked
    branch.open(MODEL, session_id=made.session_id, attach=True)
    tokens = branch.tokens(prompt="y", max_tokens=5, ignore_eos=True)
    assert tokens == expected([*log, *encode_bytes("y")], 5)
