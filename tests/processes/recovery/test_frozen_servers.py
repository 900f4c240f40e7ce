"""SIGSTOP of real servers: the stream goes on exactly, and what thaws is capacity again and nothing else."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Ask, Stream
from support.processes.swarm import Running, metrics, total, wait_until

from modelswarm.protocol.identity import name_of
from modelswarm_gateway.core.servers.health import SLOW_EJECTION_TIME

SIGHT = 60.0
HEAD, TAIL = 0, 3


@pytest.mark.parametrize("place", [HEAD, TAIL])
def test_a_server_freezes_while_tokens_come(hash_spans: Running, place: int) -> None:
    swarm = hash_spans
    swarm.wait_empty()
    swarm.wait_whole()
    before = swarm.faults()
    stream = swarm.start(Ask(prompt_of(200, 7, VOCAB), 500, SAMPLED))
    stream.wait_tokens(30)
    frozen = swarm.only_session().route[place].peer
    swarm.local.kill(name_of(frozen), signal.SIGSTOP)
    try:
        wait_until(
            lambda: health(swarm, frozen) in ("suspected", "gone"), SIGHT, "nobody suspects it"
        )
        answer = stream.answer()
    finally:
        swarm.local.kill(name_of(frozen), signal.SIGCONT)
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    assert swarm.faults().resumed > before.resumed
    takes_part_again(swarm, frozen)
    swarm.wait_empty()


def health(swarm: Running, peer: str) -> str:
    """`gone`: it was silent for so long that its link was closed."""
    servers = swarm.view.fetch_snapshot().servers
    return next((server.health for server in servers if server.peer == peer), "gone")


def takes_part_again(swarm: Running, peer: str) -> None:
    """The very process that was frozen carries sessions, with others on the way at the same time."""
    wait_until(lambda: health(swarm, peer) == "linked", SIGHT, "it is not taken back")
    rows = swarm.rows(name_of(peer))

    def worked() -> bool:
        swarm.ask_all([Ask(prompt_of(5, seed, VOCAB), 5) for seed in range(4)])
        return swarm.rows(name_of(peer)) != rows

    wait_until(worked, SIGHT, "it gets no session")


def test_a_server_that_gets_little_done_is_ejected_and_its_streams_go_on(
    hash_spans: Running,
) -> None:
    """Alive, in every beat, and some twenty times slower than its twin."""
    swarm = hash_spans
    swarm.wait_empty()
    swarm.wait_whole()
    seeds = itertools.count()
    streams = [ask_more(swarm, next(seeds)) for _ in range(6)]
    slow = swarm.sessions()[0].route[HEAD].peer
    name, until = name_of(slow), time.monotonic() + SIGHT
    before, found = slow_ejections(swarm), False
    while not found and time.monotonic() < until:
        swarm.local.kill(name, signal.SIGSTOP)
        time.sleep(0.095)
        found = slow_ejections(swarm) > before
        swarm.local.kill(
            name, signal.SIGCONT
        )  # if late, it was suspected: the comparison begins anew
        time.sleep(0.005)
        if sum(not stream.done for stream in streams) < 6:
            streams.append(ask_more(swarm, next(seeds)))
    assert found, f"not found to be slow; it is {health(swarm, slow)}"
    wait_until(lambda: health(swarm, slow) == "ejected", SLOW_EJECTION_TIME, "another was ejected")
    for stream in streams:
        answer = stream.answer()
        check_contiguous(answer)
        check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    swarm.wait_empty()


def slow_ejections(swarm: Running) -> float:
    values = metrics(swarm.local.metrics)
    return total(values, "modelswarm_gateway_ejections_total", 'cause="slow"')


def ask_more(swarm: Running, seed: int) -> Stream:
    stream = swarm.start(Ask(prompt_of(50, 100 + seed, VOCAB), 900, SAMPLED))
    stream.wait_tokens(1)
    return stream
