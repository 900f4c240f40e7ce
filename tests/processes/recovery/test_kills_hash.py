"""The kills of `test_kills.py` on the hash model: whatever dies, the answer equals the reference exactly."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes import kill_scenarios
from support.processes.kill_scenarios import PLACES, SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Ask
from support.processes.swarm import Running

from modelswarm.protocol.messages import Sampling

NEW, AT = 300, 30
CLIENTS, ASKS = 8, 2


@pytest.fixture
def swarm(hash_spans: Running) -> Iterator[Running]:
    """Whole and empty before the test, and empty again after it."""
    hash_spans.wait_empty()
    yield hash_spans
    hash_spans.wait_empty()


def judge(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)


@pytest.mark.parametrize("place", PLACES)
def test_a_server_dies_while_the_prompt_is_read(swarm: Running, place: str) -> None:
    for answer in kill_scenarios.kill_in_prefill(
        swarm, Ask(prompt_of(900, 1, VOCAB), 40), PLACES[place]
    ):
        judge(answer)


@pytest.mark.parametrize("place", PLACES)
def test_a_server_dies_while_tokens_come(swarm: Running, place: str) -> None:
    ask = Ask(prompt_of(200, 2, VOCAB), NEW, SAMPLED)
    for answer in kill_scenarios.kill_in_decode(swarm, ask, PLACES[place], AT):
        judge(answer)


@pytest.mark.parametrize("place", PLACES)
def test_a_server_dies_between_two_turns_of_a_session(swarm: Running, place: str) -> None:
    first = Ask(prompt_of(60, 3, VOCAB), 40, SAMPLED, session="talk")
    for turn in kill_scenarios.kill_between_turns(
        swarm, first, prompt_of(20, 4, VOCAB), PLACES[place]
    ):
        judge(turn)


def test_three_servers_die_in_one_stream(swarm: Running) -> None:
    ask = Ask(prompt_of(100, 5, VOCAB), NEW + 100, SAMPLED)
    judge(kill_scenarios.kill_three_times(swarm, ask, AT, later=60))


def test_a_stream_waits_when_nobody_is_left_for_its_blocks(swarm: Running) -> None:
    judge(kill_scenarios.kill_in_the_loop(swarm, Ask(prompt_of(100, 6, VOCAB), NEW), AT))


@pytest.mark.parametrize("place", PLACES)
def test_servers_die_under_eight_streams(swarm: Running, place: str) -> None:
    lengths = (5, 333, 64, 1, 150, 31, 90, 17)
    asks = [
        Ask(prompt_of(length, 20 + seed, VOCAB), NEW, SAMPLED if seed % 2 else Sampling())
        for seed, length in enumerate(lengths)
    ]
    asks[5:7] = [kill_scenarios.with_stop(swarm, ask) for ask in asks[5:7]]
    for answer in kill_scenarios.kill_under_many(swarm, asks, PLACES[place], at=10):
        judge(answer)


def test_answers_stay_exact_while_servers_die_at_random(swarm: Running) -> None:
    """Eight clients; every moment one of those servers dies that live, now and then both of a span."""
    swarm.wait_whole()
    before = swarm.faults()
    with ThreadPoolExecutor(CLIENTS) as clients:
        all_done = [clients.submit(ask_often, swarm, seed) for seed in range(CLIENTS)]
        rng = random.Random(42)
        while not all(done.done() for done in all_done):
            time.sleep(rng.choice((0.05, 0.2, 0.6)))
            alive = swarm.members()
            if len(alive) >= len(swarm.local.slots) - 2:
                swarm.local.kill(rng.choice(alive).name)
        for done in all_done:
            done.result()
    assert swarm.faults().resumed > before.resumed + CLIENTS
    swarm.wait_whole()


def ask_often(swarm: Running, seed: int) -> None:
    rng = random.Random(seed)
    left = ASKS
    while left:
        prompt = prompt_of(rng.choice((1, 50, 300)), rng.randrange(1 << 30), VOCAB)
        try:
            judge(swarm.ask(Ask(prompt, NEW, rng.choice((SAMPLED, Sampling())))))
        except grpc.RpcError as error:
            assert "UNAVAILABLE" in str(error), error  # refused before its first token
            time.sleep(0.05)
        else:
            left -= 1
