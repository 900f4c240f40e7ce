"""`GatewaySession`: the synchronous client of a session over gRPC, also when servers and gateways are killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.eventually import eventually
from support.processes.swarm import BLOCKS, MODEL, VOCABULARY, Endpoints, HashSwarm, two_spans

from modelswarm.client.sessions.connection import Connection, parse_address
from modelswarm.client.sessions.errors import (
    ConnectionLostError,
    NoCapacityError,
    RefusedError,
    SessionBusyError,
    SessionClosedError,
    SessionLengthError,
)
from modelswarm.client.sessions.session import GatewaySession, StepOptions
from modelswarm.errors import UnreachableError, UserError
from modelswarm.placement.plan import PAGE_SIZE
from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2
from modelswarm_serving.model.hash_model import reference_tokens

PAGES = 400  # of each server
LENGTH = 220 * PAGE_SIZE  # positions of a session: more than half of what new sessions may have
LEASE = ("--lease", "2")
WARM = api_pb2.Sampling(temperature=1.0, seed=9)
INPUT = [11, 12, 13, 14]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    options = ("--pages", str(PAGES), *LEASE)
    context = PAGES * PAGE_SIZE
    with two_spans(tmp_path_factory.mktemp("sessions"), *options, context=context) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE)


@pytest.fixture
def connection(endpoints: Endpoints) -> Iterator[Connection]:
    made = Connection(endpoints.grpc)
    yield made
    made.close()


@pytest.fixture
def session(connection: Connection) -> Iterator[GatewaySession]:
    with GatewaySession(connection, MODEL, LENGTH) as made:
        yield made


def options(count: int, sampling: api_pb2.Sampling | None = None) -> StepOptions:
    return StepOptions(max_tokens=count, sampling=sampling, ignore_eos=True)


def expected(log: list[int], count: int, **sampling: Any) -> list[int]:
    """Return the tokens behind this log."""
    end = len(log) + count
    wanted = Sampling(**sampling)
    return reference_tokens(log, wanted, count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def has_room(connection: Connection) -> bool:
    try:
        GatewaySession(connection, MODEL, LENGTH).close()
    except NoCapacityError:
        return False
    return True


def test_steps_continue_one_log(session: GatewaySession) -> None:
    first = session.run_step(INPUT, options(10))
    assert list(first.tokens) == expected(INPUT, 10)
    assert first.finish_reason == "length"
    log = [*INPUT, *first.tokens]
    assert (session.position, list(session.tokens)) == (14, log)
    more = [token for part in session.step([7], options(9, WARM)) for token in part.tokens]
    assert more == expected([*log, 7], 9, temperature=1.0, seed=9)
    log += [7, *more]
    assert session.run_step([5, 6], options(0)).tokens == ()
    log += [5, 6]
    assert session.position == len(log) == session.state().position
    assert list(session.run_step([], options(5)).tokens) == expected(log, 5)
    assert session.run_step([], options(0)).tokens == (), "a step of nothing"


def test_one_call_equals_many_without_input(session: GatewaySession) -> None:
    whole = expected(INPUT, 12, temperature=1.0, seed=9)
    tokens = list(session.run_step(INPUT, options(1, WARM)).tokens)
    for count in (5, 1, 5):
        tokens += session.run_step([], options(count, WARM)).tokens
    assert tokens == whole


def test_rewound_session_generates_anew(session: GatewaySession) -> None:
    session.run_step(INPUT, options(20))
    session.position = 2
    assert session.tokens == (11, 12)
    assert list(session.run_step([9], options(6)).tokens) == expected([11, 12, 9], 6)
    for wrong in (10, -1, True + 8.5):
        with pytest.raises(UserError, match="0 to 9"):
            session.position = wrong  # type: ignore[assignment]


def test_step_that_is_left_early_keeps_what_was_seen(session: GatewaySession) -> None:
    parts = session.step(INPUT, options(300))
    seen = list(next(parts).tokens)
    parts.close()  # type: ignore[attr-defined]
    assert list(session.tokens) == INPUT + seen
    assert list(session.run_step([3], options(5)).tokens) == expected([*INPUT, *seen, 3], 5)


def test_room_is_reserved_until_the_session_ends(connection: Connection) -> None:
    session = GatewaySession(connection, MODEL, LENGTH)
    assert not has_room(connection)
    session.close()
    session.close()
    assert has_room(connection)
    with pytest.raises(SessionClosedError):
        session.run_step(INPUT)
    with pytest.raises(RuntimeError), GatewaySession(connection, MODEL, LENGTH):
        raise RuntimeError
    assert has_room(connection)
    session = GatewaySession(connection, MODEL, LENGTH)
    next(session.step(INPUT, options(1000)))
    del session

    def is_freed() -> bool:
        gc.collect()  # a thread of gRPC may hold the call until now
        return has_room(connection)

    eventually("garbage frees its room", is_freed)


def test_process_that_dies_frees_its_room(connection: Connection, endpoints: Endpoints) -> None:
    """A client of another process is killed with an open session."""
    import subprocess
    import sys

    script = f"""
import sys, time
from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.session import GatewaySession
session = GatewaySession(Connection("{endpoints.grpc}"), "{MODEL}", {LENGTH})
print("open", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert not has_room(connection)
        os.kill(other.pid, signal.SIGKILL)
    eventually("its room is free", lambda: has_room(connection))


@pytest.mark.parametrize(
    ("tokens", "count", "error", "sentence"),
    [
        ([-1], 5, UserError, "no token id"),
        ([1 << 40], 5, UserError, "no token id"),
        ([5], -1, UserError, "max_tokens"),
        ([], 5, UserError, "empty"),
        ([5] * LENGTH, 1, SessionLengthError, "maximum length exceeded"),
        ([5] * 9, LENGTH - 8, SessionLengthError, "maximum length exceeded"),
    ],
)
def test_wrong_step_is_refused_before_it_is_sent(
    session: GatewaySession, tokens: list[int], count: int, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        session.run_step(tokens, options(count))
    assert list(session.run_step(INPUT, options(3)).tokens) == expected(INPUT, 3)


def test_refusal_of_the_gateway_leaves_the_session_usable(session: GatewaySession) -> None:
    first = session.run_step(INPUT, options(5)).tokens
    for wrong, field in (
        (api_pb2.Sampling(top_p=2), "step.sampling.top_p"),
        (api_pb2.Sampling(stop_token_ids=[10**9]), "step.sampling.stop_token_ids"),
    ):
        with pytest.raises(RefusedError) as refused:
            session.run_step([8], options(5, wrong))
        assert refused.value.field == field
    assert session.position == 9
    more = session.run_step([8], options(5)).tokens
    assert list(more) == expected([*INPUT, *first, 8], 5)


def test_two_threads_or_steps_in_one_session_are_refused(session: GatewaySession) -> None:
    parts = session.step(INPUT, options(3000))
    next(parts)
    errors: list[Exception] = []

    def other() -> None:
        for call in (lambda: session.run_step([5]), lambda: session.rewind(0), session.close):
            try:
                call()
            except SessionBusyError as error:
                errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with pytest.raises(SessionBusyError):
        session.run_step([5])
    assert len(errors) == 3
    parts.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("max_length", [0, -5, "9", 2.5, None])
def test_impossible_max_length_is_refused_here(connection: Connection, max_length: Any) -> None:
    with pytest.raises(UserError, match="max_length"):
        GatewaySession(connection, MODEL, max_length)


def test_gateway_refuses_what_it_does_not_have(connection: Connection) -> None:
    with pytest.raises(RefusedError) as refused:
        GatewaySession(connection, MODEL, 10**9)
    assert refused.value.field == "open.max_length"
    with pytest.raises(RefusedError, match="model"):
        GatewaySession(connection, "gpt-9", 100)


def test_address_that_is_no_gateway_is_an_error(endpoints: Endpoints) -> None:
    for target in (endpoints.http, "127.0.0.1:1"):
        with pytest.raises(ConnectionLostError, match="no gateway answers"):
            Connection(target).list_models()
    with pytest.raises(UnreachableError, match="no Inference API"):
        Connection(endpoints.admin).list_models()


def test_addresses_are_hosts_with_ports() -> None:
    assert parse_address("gateway:8001") == ("gateway:8001", False)
    assert parse_address("http://[::1]:8001/") == ("[::1]:8001", False)
    assert parse_address("https://swarm.example:443") == ("swarm.example:443", True)
    for wrong in ("", "gateway", "ftp://a:1", "a:b", "a:1/path", "http://a", "a:99999", "u@a:1"):
        with pytest.raises(UserError, match="gateway"):
            parse_address(wrong)


def test_killed_server_changes_no_token(swarm: HashSwarm, session: GatewaySession) -> None:
    tokens: list[int] = []
    killed = 0
    for part in session.step(INPUT, options(3000, WARM)):  # it does not end before the kills
        tokens += part.tokens
        if len(tokens) // 200 > killed and killed < 2:
            swarm.kill("s1")
            (swarm.members / "s1.json").unlink(missing_ok=True)
            swarm.server("s1", "2:4", "--pages", str(PAGES), *LEASE)
            killed += 1
    assert killed == 2
    assert tokens == expected(INPUT, 3000, temperature=1.0, seed=9)
    assert session.state().reroutes > 0


def test_lost_gateway_changes_no_token(swarm: HashSwarm) -> None:
    """Another gateway listens at the same address, as behind a Kubernetes Service."""
    lost = swarm.gateway(*LEASE, name="lost")
    connection = Connection(lost.grpc)
    with GatewaySession(connection, MODEL, 2000) as session:
        first = session.run_step(INPUT, options(10))
        log = [*INPUT, *first.tokens, 4]
        tokens: list[int] = []
        for part in session.step([4], options(800, WARM)):
            if not tokens:
                swarm.kill("lost")
                swarm.gateway(*LEASE, "--grpc", lost.grpc, name="found")
            tokens += part.tokens
        assert tokens == expected(log, 800, temperature=1.0, seed=9)
        assert session.position == len(log) + 800
    connection.close()


def test_connection_that_breaks_is_built_again_from_the_log(session: GatewaySession) -> None:
    first = session.run_step(INPUT, options(10)).tokens
    session._stream.end()  # the gateway frees the session, as after a broken network
    more = session.run_step([3], options(10, WARM)).tokens
    assert list(more) == expected([*INPUT, *first, 3], 10, temperature=1.0, seed=9)


def test_more_sessions_than_one_channel_can_carry(connection: Connection) -> None:
    """A gateway allows 128 streams on a connection; gRPC would let the next one wait without an error."""
    for _ in range(2):  # the channels are used again
        with ExitStack() as opened:
            sessions = [
                opened.enter_context(GatewaySession(connection, MODEL, PAGE_SIZE))
                for _ in range(130)
            ]
            assert len({each.state().session_id for each in sessions}) == 130
    assert len(connection._channels._channels) == 2
