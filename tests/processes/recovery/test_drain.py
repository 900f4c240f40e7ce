"""Planned migrations with real processes: servers are drained, or get SIGTERM, without any effect on streams."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import SAMPLED, check_four_answers, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Request
from support.processes.swarm import (
    ENDLESS,
    READY_SECONDS,
    Running,
    local_settings,
    metrics,
    running_swarm,
    total,
)

from modelswarm.protocol.identity import name_of
from modelswarm_gateway.core.migration.migration import MigrationOutcome
from modelswarm_gateway.core.routing.server_registry import SLOW_CAUSE

LONG, AT, STREAMS = 20_000, 20, 4  # tokens of a cancelled answer, tokens before a drain
READ_ON = 50  # tokens after the drains
DRAIN_SECONDS = 100.0  # limit of one drain
FAULTS = ("modelswarm_gateway_reroutes_total", "modelswarm_gateway_ejections_total")


@pytest.fixture(scope="module")
def swarm(endless_folder: Path) -> Iterator[Running]:
    settings = local_settings("drains", hash_model=True)
    with running_swarm(
        endless_folder, "drains", spans=2, replicas=2, length=ENDLESS, settings=settings
    ) as running:
        yield running


def check_answer(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)


def drained_requests() -> list[Request]:
    return [Request(prompt_of(100 + 20 * n, n, VOCAB), LONG, SAMPLED) for n in range(STREAMS)]


def moves(running: Running, cause: str) -> Counter[str]:
    """Return the number of ended migrations by outcome."""
    values = metrics(running.local.metrics)
    found = Counter[str]()
    for how in MigrationOutcome:
        labels = f'cause="{cause}"', f'outcome="{how.value}"'
        found[how.value] = int(total(values, "modelswarm_gateway_migrations_total", *labels))
    return found


def faults(running: Running) -> Counter[str]:
    """Return the number of re-routes and ejections by cause."""
    found = Counter[str]()
    for sample, count in metrics(running.local.metrics).items():
        if sample.partition("{")[0] in FAULTS:
            found[sample.partition('cause="')[2].partition('"')[0]] += int(count)
    del found[SLOW_CAUSE]  # on a busy machine one server may get less processor time
    return found


@contextmanager
def unnoticed(swarm: Running, cause: str) -> Iterator[None]:
    """Run streams while the body drains servers. Answers must be right, and migrations copies without faults."""
    swarm.wait_whole()
    before, moved = faults(swarm), moves(swarm, cause)
    streams = [swarm.start(request) for request in drained_requests()]
    for stream in streams:
        stream.wait_tokens(AT)
    yield
    counts = [stream.count for stream in streams]
    for stream, count in zip(streams, counts, strict=True):
        check_answer(stream.read_and_cancel(count + READ_ON))
    new = faults(swarm) - before
    assert not new, f"a migration is no fault: {new}"
    found = moves(swarm, cause) - moved
    assert found[MigrationOutcome.MIGRATED.value] > 0, found
    assert not found[MigrationOutcome.RECOMPUTED.value], f"rows were computed again: {found}"
    swarm.wait_empty()


def drain(running: Running, name: str) -> None:
    states = list(running.view.drain_server(name, timeout=DRAIN_SECONDS))
    assert states[-1].done and states[-1].own_sessions == 0


def runs_on(running: Running, name: str) -> set[str]:
    """Return the running sessions with a hop on the server."""
    return {
        session.id
        for session in running.sessions()
        if session.state == "running" and name in [name_of(hop.peer) for hop in session.route]
    }


def test_draining_every_server_in_turn_disturbs_no_stream(swarm: Running) -> None:
    with unnoticed(swarm, "drain"):
        for slot in swarm.local.slots:
            there, before = runs_on(swarm, slot.name), moves(swarm, "drain")
            drain(swarm, slot.name)
            routes = [hop.peer for session in swarm.sessions() for hop in session.route]
            assert slot.name not in map(name_of, routes)
            left = {s.id for s in swarm.sessions() if s.state == "running"} & there
            found = moves(swarm, "drain") - before
            assert found[MigrationOutcome.MIGRATED.value] >= len(left), (found, left)
            list(swarm.view.drain_server(slot.name, undo=True))


@pytest.mark.full
def test_four_answers_with_rules_do_not_notice_a_drain(swarm: Running) -> None:
    swarm.wait_whole()
    drained = list[str]()

    def drain_tail() -> None:
        drained.append(name_of(swarm.sessions()[0].route[1].peer))
        drain(swarm, drained[0])

    check_four_answers(swarm, drain_tail)
    list(swarm.view.drain_server(drained[0], undo=True))
    swarm.wait_empty()


@pytest.mark.full
@pytest.mark.parametrize("span", [0, 1])
def test_stopped_server_exits_when_its_sessions_have_left(swarm: Running, span: int) -> None:
    with unnoticed(swarm, "shutdown"):
        running = [s.route for s in swarm.sessions() if s.state == "running"]
        peer = running[0][span].peer
        job = swarm.local.kill(name_of(peer), signal.SIGTERM)
        assert swarm.local.wait_replaced(job.name, job.incarnation, READY_SECONDS)


@pytest.mark.full
def test_idle_session_migrates_with_its_next_turn(swarm: Running) -> None:
    swarm.wait_whole()
    first = Request(prompt_of(80, 9, VOCAB), 40, SAMPLED, session="rests")
    one = swarm.ask(first)
    rests = swarm.wait_session(lambda session: session.state == "parked")
    old = name_of(rests.route[1].peer)
    drain(swarm, old)
    left = swarm.wait_session(lambda session: len(session.route) == 1)
    assert left.id == rests.id
    more = Request((*one.log, *prompt_of(10, 5, VOCAB)), 40, SAMPLED, session="rests")
    two = swarm.ask(more)
    after = swarm.wait_session(lambda session: session.state == "parked")
    assert after.id == rests.id
    assert old not in [name_of(hop.peer) for hop in after.route]
    list(swarm.view.drain_server(old, undo=True))
    for answer in (one, two):
        check_answer(answer)


@pytest.mark.full
def test_drain_waits_for_a_replacement_server(swarm: Running) -> None:
    """The span's only other server was just killed; its replacement makes the drain possible."""
    swarm.wait_whole()
    names = [slot.name for slot in swarm.local.slots if "-s1-" in slot.name]
    [other] = [s.peer for s in swarm.view.fetch_snapshot().servers if name_of(s.peer) == names[0]]
    swarm.kill(other)
    eventually(
        "the dead server is no longer shown",
        lambda: other not in {s.peer for s in swarm.view.fetch_snapshot().servers},
    )
    states = list(swarm.view.drain_server(names[1], wait=READY_SECONDS, timeout=2 * READY_SECONDS))
    assert states[-1].done
    list(swarm.view.drain_server(names[1], undo=True))
