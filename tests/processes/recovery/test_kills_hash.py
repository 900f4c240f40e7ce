"""The kills of `test_kills.py` on the hash model: the answer equals the reference exactly after each kill."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest
from _pytest.mark.structures import ParameterSet
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes import kill_scenarios
from support.processes.kill_scenarios import PLACES, RULED, SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Request
from support.processes.swarm import ENDLESS, Running

from modelswarm.protocol.messages import Sampling

NEW, AT = 300, 30  # tokens of a whole answer, and before a kill
LONG = 50_000  # tokens of a cancelled answer
CLIENTS, REQUESTS = 8, 2


@pytest.fixture
def swarm(hash_spans: Running) -> Iterator[Running]:
    """Yield a swarm without sessions; check that no session is left."""
    hash_spans.wait_empty()
    yield hash_spans
    hash_spans.wait_empty()


def check_answer(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)


def only(fast: str) -> list[ParameterSet]:
    """Return all places of a route; only the named one is in the fast tier."""
    marks = {place: () if place == fast else (pytest.mark.full,) for place in PLACES}
    return [pytest.param(place, marks=marks[place]) for place in PLACES]


@pytest.mark.parametrize("place", only("tail"))
def test_kill_during_prefill_keeps_answer_exact(swarm: Running, place: str) -> None:
    request = Request(prompt_of(4000, 1, VOCAB), LONG)
    check_answer(kill_scenarios.kill_in_prefill(swarm, request, PLACES[place]))


@pytest.mark.parametrize("place", PLACES)
def test_kill_during_decode_keeps_answer_exact(swarm: Running, place: str) -> None:
    request = Request(prompt_of(200, 2, VOCAB), LONG, SAMPLED)
    check_answer(kill_scenarios.kill_in_decode(swarm, request, PLACES[place], AT))


def test_kill_with_all_sampling_rules_keeps_answer_exact(swarm: Running) -> None:
    """Penalties, bias and masks travel with the turn, and `begin` with them: a new tail starts from both."""
    request = Request(prompt_of(120, 8, VOCAB), LONG, RULED)
    check_answer(kill_scenarios.kill_in_decode(swarm, request, PLACES["tail"], AT))
    first = Request(prompt_of(60, 9, VOCAB), 40, RULED, session="ruled")
    for turn in kill_scenarios.kill_between_turns(
        swarm, first, prompt_of(20, 4, VOCAB), PLACES["tail"]
    ):
        check_answer(turn)


@pytest.mark.parametrize("place", only("middle"))
def test_kill_between_turns_keeps_next_turn_exact(swarm: Running, place: str) -> None:
    first = Request(prompt_of(60, 3, VOCAB), 40, SAMPLED, session="talk")
    for turn in kill_scenarios.kill_between_turns(
        swarm, first, prompt_of(20, 4, VOCAB), PLACES[place]
    ):
        check_answer(turn)


def test_three_kills_in_one_stream_keep_answer_exact(swarm: Running) -> None:
    request = Request(prompt_of(100, 5, VOCAB), LONG, SAMPLED)
    check_answer(kill_scenarios.kill_three_times(swarm, request, AT, later=60))


@pytest.mark.full
def test_stream_waits_until_its_blocks_are_served_again(swarm: Running) -> None:
    check_answer(
        kill_scenarios.kill_in_the_loop(swarm, Request(prompt_of(100, 6, VOCAB), LONG), AT)
    )


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_kills_under_eight_streams_keep_answers_exact(swarm: Running, place: str) -> None:
    lengths = (5, 333, 64, 1, 150, 31, 90, 17)
    requests = [
        Request(prompt_of(length, 20 + seed, VOCAB), LONG, SAMPLED if seed % 2 else Sampling())
        for seed, length in enumerate(lengths)
    ]
    requests[5:7] = [
        kill_scenarios.with_stop(swarm, replace(request, new=NEW)) for request in requests[5:7]
    ]
    for answer in kill_scenarios.kill_under_many(swarm, requests, PLACES[place], at=10):
        check_answer(answer)


@pytest.mark.full
def test_random_kills_keep_all_answers_exact(swarm: Running) -> None:
    """Eight clients, while random servers are killed, sometimes both of a span."""
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
    left = REQUESTS
    while left:
        prompt = prompt_of(rng.choice((1, 50, 300)), rng.randrange(1 << 30), VOCAB)
        try:
            check_answer(swarm.ask(Request(prompt, NEW, rng.choice((SAMPLED, Sampling())))))
        except grpc.RpcError as error:
            assert "UNAVAILABLE" in str(error), error  # refused before its first token
            time.sleep(0.05)
        else:
            left -= 1
