"""SIGSTOP of real servers: streams stay exact, and a continued server is used again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import SAMPLED, ask_until, check_four_answers, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Request
from support.processes.swarm import ENDLESS, Running, local_settings, running_swarm

from modelswarm.protocol.identity import name_of

LONG = 50_000  # tokens of a cancelled answer
READ_ON = 50  # tokens after a recovery
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
    ask_until(swarm, "it gets a session", lambda: swarm.rows(name_of(peer)) != rows)
