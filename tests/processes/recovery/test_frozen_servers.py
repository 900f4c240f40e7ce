"""SIGSTOP of real servers: streams stay exact, and a continued server is used again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import SAMPLED, check_four_answers, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Request, Stream
from support.processes.swarm import ENDLESS, Running, local_settings, metrics, running_swarm, total

from modelswarm.protocol.identity import name_of
from modelswarm_gateway.core.servers.health import SLOW_EJECTION_TIME

LONG = 50_000  # tokens of a cancelled answer
READ_ON = 50  # tokens after a recovery
FIND_SECONDS = 120.0  # seconds until a slow server is found, on a busy machine
HEAD, TAIL = 0, 1


@pytest.fixture(scope="module")
def swarm(endless_folder: Path) -> Iterator[Running]:
    """Yield a swarm whose gateway suspects a server after 0.3 s of silence."""
    settings = local_settings("frozen", hash_model=True, detects_silence=True)
    with running_swarm(
        endless_folder, "frozen", spans=2, replicas=2, length=ENDLESS, settings=settings
    ) as running:
        yield running


def check_answer(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)


@pytest.mark.parametrize("place", [pytest.param(HEAD, marks=pytest.mark.full), TAIL])
def test_frozen_server_is_left_and_used_again_when_it_thaws(swarm: Running, place: int) -> None:
    swarm.wait_empty()
    swarm.wait_whole()
    before = swarm.faults()
    stream = swarm.start(Request(prompt_of(200, 7, VOCAB), LONG, SAMPLED))
    stream.wait_tokens(30)
    frozen = swarm.only_session().route[place].peer
    swarm.local.kill(name_of(frozen), signal.SIGSTOP)
    try:
        eventually("it is suspected", lambda: health(swarm, frozen) in ("suspected", "gone"))
        eventually("the session goes on", lambda: swarm.faults().resumed > before.resumed)
        check_answer(stream.read_and_cancel(stream.count + READ_ON))
    finally:
        swarm.local.kill(name_of(frozen), signal.SIGCONT)
    takes_part_again(swarm, frozen)
    swarm.wait_empty()


@pytest.mark.full
def test_four_answers_with_rules_outlast_a_frozen_tail(swarm: Running) -> None:
    swarm.wait_empty()
    swarm.wait_whole()
    before, frozen = swarm.faults(), list[str]()

    def freeze() -> None:
        frozen.append(swarm.sessions()[0].route[TAIL].peer)
        swarm.local.kill(name_of(frozen[0]), signal.SIGSTOP)

    try:
        check_four_answers(swarm, freeze)
    finally:
        for peer in frozen:
            swarm.local.kill(name_of(peer), signal.SIGCONT)
    assert swarm.faults().resumed > before.resumed
    swarm.wait_empty()


def health(swarm: Running, peer: str) -> str:
    """Return the health of a server; `gone`: its link was closed after a long silence."""
    servers = swarm.view.fetch_snapshot().servers
    return next((server.health for server in servers if server.peer == peer), "gone")


def takes_part_again(swarm: Running, peer: str) -> None:
    """Check that the stopped process itself carries sessions again."""
    eventually("it is linked again", lambda: health(swarm, peer) == "linked")
    rows = swarm.rows(name_of(peer))

    def worked() -> bool:
        swarm.ask_all([Request(prompt_of(5, seed, VOCAB), 5) for seed in range(4)])
        return swarm.rows(name_of(peer)) != rows

    eventually("it gets a session", worked)


@pytest.mark.full
def test_throttled_server_is_ejected_and_its_streams_go_on(swarm: Running) -> None:
    """The server sends every heartbeat, and is about twenty times slower than its replica."""
    swarm.wait_empty()
    swarm.wait_whole()
    streams = [ask_more(swarm, seed) for seed in range(6)]
    slow = swarm.sessions()[0].route[HEAD].peer
    name, until = name_of(slow), time.monotonic() + FIND_SECONDS
    before, found = slow_ejections(swarm), False
    while not found and time.monotonic() < until:
        swarm.local.kill(name, signal.SIGSTOP)
        time.sleep(0.095)
        found = slow_ejections(swarm) > before
        swarm.local.kill(
            name, signal.SIGCONT
        )  # if late, the server was suspected and the comparison restarts
        time.sleep(0.005)
    assert found, f"not found to be slow; it is {health(swarm, slow)}"
    eventually(
        "it is ejected",
        lambda: health(swarm, slow) == "ejected",
        SLOW_EJECTION_TIME,
        explain=lambda: [
            (server.peer, server.health) for server in swarm.view.fetch_snapshot().servers
        ],
    )
    counts = [stream.count for stream in streams]
    for stream, count in zip(streams, counts, strict=True):
        check_answer(stream.read_and_cancel(count + READ_ON))
    swarm.wait_empty()


def slow_ejections(swarm: Running) -> float:
    values = metrics(swarm.local.metrics)
    return total(values, "modelswarm_gateway_ejections_total", 'cause="slow"')


def ask_more(swarm: Running, seed: int) -> Stream:
    stream = swarm.start(Request(prompt_of(50, 100 + seed, VOCAB), LONG, SAMPLED))
    stream.wait_tokens(1)
    return stream
