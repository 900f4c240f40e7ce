"""`GatewaySession.fork`: another session goes on from the log, also when servers and gateways are killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.eventually import eventually
from support.processes.swarm import BLOCKS, MODEL, VOCABULARY, Endpoints, HashSwarm, two_spans

from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.errors import (
    NoCapacityError,
    SessionBusyError,
    SessionClosedError,
)
from modelswarm.client.sessions.session import GatewaySession, StepOptions
from modelswarm.errors import UserError
from modelswarm.placement.plan import PAGE_SIZE
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

pytestmark = pytest.mark.full
PAGES = 200  # of each server
LENGTH = 80 * PAGE_SIZE  # positions of a session: two have room, three have not
LEASE = ("--lease", "2")
INPUT = list(range(11, 151))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    options = ("--pages", str(PAGES), *LEASE)
    context = PAGES * PAGE_SIZE
    with two_spans(tmp_path_factory.mktemp("forks"), *options, context=context) as made:
        yield made


@pytest.fixture(scope="module")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway(*LEASE)


@pytest.fixture
def connection(endpoints: Endpoints) -> Iterator[Connection]:
    made = Connection(endpoints.grpc)
    yield made
    made.close()
    eventually("all is freed", lambda: endpoints.metric("modelswarm_gateway_sessions") == 0)


@pytest.fixture
def session(connection: Connection) -> Iterator[GatewaySession]:
    with GatewaySession(connection, MODEL, LENGTH, ttl=50) as made:
        yield made


def options(count: int) -> StepOptions:
    return StepOptions(max_tokens=count, ignore_eos=True)


def expected(log: list[int], count: int) -> list[int]:
    """Return the tokens behind this log."""
    end = len(log) + count
    return reference_tokens(log, Sampling(), count, end, n_blocks=BLOCKS, vocabulary=VOCABULARY)


def check_step(session: GatewaySession, *tokens: int) -> None:
    log = [*session.tokens, *tokens]
    assert list(session.run_step(list(tokens), options(6)).tokens) == expected(log, 6)


def test_fork_goes_on_beside_its_parent(session: GatewaySession) -> None:
    session.run_step(INPUT, options(20))
    with session.fork() as branch:
        state = branch.state()
        assert state.position == branch.position == session.position == len(INPUT) + 20
        assert (state.max_length, state.ttl) == (LENGTH, 50)
        assert branch.tokens == session.tokens
        check_step(branch, 5)
        check_step(session, 6)
        check_step(branch, 7)
        assert branch.position == session.position + 7
    check_step(session, 8)
    other = session.fork()
    session.close()
    check_step(other, 9)
    other.close()


def test_fork_of_a_part_or_of_nothing(session: GatewaySession) -> None:
    with session.fork() as branch:
        check_step(branch, 5)
    session.run_step(INPUT, options(20))
    with session.fork(30) as branch:
        assert branch.state().position == 30
        check_step(branch, 5)
    session.rewind(40)
    with session.fork() as branch:
        assert branch.state().position == 40
        check_step(branch)
    check_step(session, 3)
    for wrong in (-1, len(INPUT), "1"):
        with pytest.raises(UserError, match="0 to 47"):
            session.fork(wrong)  # type: ignore[arg-type]


def test_fork_while_an_answer_is_left_early(session: GatewaySession) -> None:
    parts = session.step(INPUT, options(300))
    next(parts)
    with pytest.raises(SessionBusyError):
        session.fork()
    parts.close()  # type: ignore[attr-defined]
    with session.fork() as branch:
        assert branch.tokens == session.tokens
        check_step(branch, 4)
        check_step(session, 4)


def test_refused_fork_leaves_its_parent(session: GatewaySession) -> None:
    session.run_step(INPUT, options(5))
    with session.fork() as branch, pytest.raises(NoCapacityError):
        branch.fork()
    check_step(session, 5)
    session.close()
    with pytest.raises(SessionClosedError):
        session.fork()


def test_broken_connection_changes_no_token(session: GatewaySession) -> None:
    session.run_step(INPUT, options(5))
    session._stream.end()  # the gateway frees the session, as after a broken network
    with session.fork() as branch:
        check_step(branch, 4)
        check_step(session, 5)


def test_killed_server_changes_no_token(swarm: HashSwarm, session: GatewaySession) -> None:
    session.run_step(INPUT, options(5))
    swarm.kill("s1")
    (swarm.members / "s1.json").unlink(missing_ok=True)
    swarm.server("s1", "2:4", "--pages", str(PAGES), *LEASE)
    with session.fork() as branch:
        check_step(branch, 4)
        check_step(session, 5)


def test_lost_gateway_changes_no_token(swarm: HashSwarm) -> None:
    """Another gateway listens at the same address, as behind a Kubernetes Service."""
    lost = swarm.gateway(*LEASE, name="lost")
    connection = Connection(lost.grpc)
    with GatewaySession(connection, MODEL, 500) as session:
        session.run_step(INPUT, options(5))
        swarm.kill("lost")
        swarm.gateway(*LEASE, "--grpc", lost.grpc, name="found")
        with session.fork() as branch:
            check_step(branch, 4)
            check_step(session, 5)
    connection.close()
