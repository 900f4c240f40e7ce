"""Planned moves with real processes: servers are drained, or told to end, under streams that never notice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm.kills import SAMPLED, prompt_of
from swarm.models import VOCAB
from swarm.oracles import check_contiguous, check_hash
from swarm.running import (
    READY_SECONDS,
    Answer,
    Ask,
    Running,
    local_settings,
    metrics,
    running_swarm,
    total,
    wait_until,
)
from swarm.toy import TOY_BLOCKS, TOY_LENGTH

from modelswarm.protocol.identity import name_of

NEW, AT, STREAMS = 400, 20, 4
DRAIN_SECONDS = 100.0


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("drains", hash_model=True)
    with running_swarm(toy_folder, "drains", spans=2, replicas=2, settings=settings) as running:
        yield running


def judge(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)


def asks() -> list[Ask]:
    return [Ask(prompt_of(100 + 20 * n, n, VOCAB), NEW, SAMPLED) for n in range(STREAMS)]


def moves(running: Running, cause: str) -> int:
    """Moves that came to their end, with a copy or, on a machine that is too busy for one, without."""
    values = metrics(running.local.metrics)
    labels = [(f'cause="{cause}"', f'outcome="{outcome}"') for outcome in ("moved", "rebuilt")]
    return sum(int(total(values, "modelswarm_gateway_moves_total", *both)) for both in labels)


def faults(running: Running) -> int:
    """But for those of a machine that is too busy, where a server may seem to be silent."""
    values = metrics(running.local.metrics)
    causes = ("link_down", "gap", "unknown_handle", "failed", "draining")
    found = [total(values, "modelswarm_gateway_reroutes_total", f'cause="{c}"') for c in causes]
    return int(sum(found))


def drain(running: Running, name: str) -> None:
    states = list(running.view.drain(name, timeout=DRAIN_SECONDS))
    assert states[-1].done and states[-1].own_sessions == 0


def test_every_server_is_drained_in_turn_and_no_stream_notices(swarm: Running) -> None:
    swarm.wait_whole()
    before = faults(swarm)
    streams = [swarm.start(ask) for ask in asks()]
    for stream in streams:
        stream.wait_tokens(AT)
    for slot in swarm.local.slots:
        drain(swarm, slot.name)
        routes = [hop.peer for session in swarm.sessions() for hop in session.route]
        assert slot.name not in map(name_of, routes)
        list(swarm.view.drain(slot.name, undo=True))
    for stream in streams:
        judge(stream.answer())
    assert faults(swarm) == before, "a planned move is no fault"
    assert moves(swarm, "drain") > 0
    swarm.wait_empty()


@pytest.mark.parametrize("span", [0, 1])
def test_a_server_that_is_told_to_end_does_so_when_its_sessions_have_left(
    swarm: Running, span: int
) -> None:
    swarm.wait_whole()
    before, moved = faults(swarm), moves(swarm, "stopping")
    streams = [swarm.start(ask) for ask in asks()]
    for stream in streams:
        stream.wait_tokens(AT)
    running = [s.route for s in swarm.sessions() if s.state == "running"]
    peer = running[0][span].peer
    job = swarm.local.kill(name_of(peer), signal.SIGTERM)
    for stream in streams:
        judge(stream.answer())
    assert swarm.local.wait_replaced(job.name, job.incarnation, READY_SECONDS)
    assert faults(swarm) == before, "its end is no fault"
    assert moves(swarm, "stopping") > moved
    swarm.wait_empty()


def test_a_session_that_rests_leaves_with_its_next_turn(swarm: Running) -> None:
    swarm.wait_whole()
    first = Ask(prompt_of(80, 9, VOCAB), 40, SAMPLED, session="rests")
    one = swarm.ask(first)
    rests = swarm.wait_session(lambda session: session.state == "parked")
    old = name_of(rests.route[1].peer)
    drain(swarm, old)
    left = swarm.wait_session(lambda session: len(session.route) == 1)
    assert left.id == rests.id
    more = Ask((*one.log, *prompt_of(10, 5, VOCAB)), 40, SAMPLED, session="rests")
    two = swarm.ask(more)
    after = swarm.wait_session(lambda session: session.state == "parked")
    assert after.id == rests.id
    assert old not in [name_of(hop.peer) for hop in after.route]
    list(swarm.view.drain(old, undo=True))
    for answer in (one, two):
        judge(answer)


def test_a_drain_waits_for_a_server_that_takes_over(swarm: Running) -> None:
    """The only other server of the span has just died: with patience, its replacement makes the drain possible."""
    swarm.wait_whole()
    names = [slot.name for slot in swarm.local.slots if "-s1-" in slot.name]
    [other] = [s.peer for s in swarm.view.snapshot().servers if name_of(s.peer) == names[0]]
    swarm.kill(other)
    wait_until(
        lambda: other not in {s.peer for s in swarm.view.snapshot().servers},
        READY_SECONDS,
        "the dead server is still shown",
    )
    states = list(swarm.view.drain(names[1], wait=READY_SECONDS, timeout=2 * READY_SECONDS))
    assert states[-1].done
    list(swarm.view.drain(names[1], undo=True))
