"""SIGKILL of real servers while a transformer answers: nothing is lost, doubled or changed (PROTOCOL section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from support.models.tiny_models import VOCAB
from support.processes import kill_scenarios
from support.processes.kill_scenarios import MIDDLE, PLACES, SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_tokens, check_twins
from support.processes.streams import Answer, Ask
from support.processes.swarm import Running
from transformers import PreTrainedModel

from modelswarm.protocol.messages import Sampling

NEW, AT = 150, 30


@pytest.fixture
def swarm(four_spans: Running) -> Iterator[Running]:
    """Whole and empty before the test, and empty again after it."""
    four_spans.wait_empty()
    yield four_spans
    four_spans.wait_empty()


def judge(model: PreTrainedModel, calm: Answer, killed: Answer) -> None:
    check_contiguous(killed)
    check_tokens(model, killed)
    check_twins(model, calm, killed)


@pytest.mark.parametrize("place", PLACES)
def test_a_server_dies_while_the_prompt_is_read(
    swarm: Running, toy_model: PreTrainedModel, place: str
) -> None:
    ask = Ask(prompt_of(900, 1, VOCAB), 40)
    calm = swarm.calm(ask)
    for killed in kill_scenarios.kill_in_prefill(swarm, ask, PLACES[place]):
        judge(toy_model, calm, killed)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_server_dies_while_tokens_come(
    swarm: Running, toy_model: PreTrainedModel, sampling: Sampling, place: str
) -> None:
    ask = Ask(prompt_of(200, 2, VOCAB), NEW, sampling)
    calm = swarm.calm(ask)
    for killed in kill_scenarios.kill_in_decode(swarm, ask, PLACES[place], AT):
        judge(toy_model, calm, killed)


@pytest.mark.parametrize("place", PLACES)
def test_a_server_dies_between_two_turns_of_a_session(
    swarm: Running, toy_model: PreTrainedModel, place: str
) -> None:
    first, more = Ask(prompt_of(60, 3, VOCAB), 40, SAMPLED, session="talk"), prompt_of(20, 4, VOCAB)
    calm = kill_scenarios.kill_between_turns(swarm, first, more, None)
    killed = kill_scenarios.kill_between_turns(swarm, first, more, PLACES[place])
    for one, other in zip(calm, killed, strict=True):
        judge(toy_model, one, other)


def test_three_servers_die_in_one_stream(swarm: Running, toy_model: PreTrainedModel) -> None:
    ask = Ask(prompt_of(100, 5, VOCAB), NEW + 100, SAMPLED)
    calm = swarm.calm(ask)
    judge(toy_model, calm, kill_scenarios.kill_three_times(swarm, ask, AT, later=40))


def test_a_stream_waits_when_nobody_is_left_for_its_blocks(
    swarm: Running, toy_model: PreTrainedModel
) -> None:
    ask = Ask(prompt_of(100, 6, VOCAB), NEW)
    calm = swarm.calm(ask)
    judge(toy_model, calm, kill_scenarios.kill_in_the_loop(swarm, ask, AT))


def test_servers_die_under_eight_streams(swarm: Running, toy_model: PreTrainedModel) -> None:
    asks = mixed_asks(swarm)
    calm = [swarm.calm(ask) for ask in asks]
    killed = kill_scenarios.kill_under_many(swarm, asks, MIDDLE, at=10)
    for one, other in zip(calm, killed, strict=True):
        judge(toy_model, one, other)


def mixed_asks(swarm: Running) -> Sequence[Ask]:
    """Greedy, sampled in several ways, and with stop strings; prompts of different lengths."""
    plain = [
        Ask(prompt_of(5, 11, VOCAB), NEW),
        Ask(prompt_of(333, 12, VOCAB), NEW),
        Ask(prompt_of(64, 13, VOCAB), NEW, SAMPLED),
        Ask(prompt_of(1, 14, VOCAB), NEW, Sampling(temperature=0.7, seed=5)),
        Ask(prompt_of(150, 15, VOCAB), NEW, Sampling(temperature=1.3, min_p=0.05, seed=6)),
        Ask(prompt_of(31, 16, VOCAB), NEW, Sampling(repetition_penalty=1.3)),
    ]
    stopped = [
        Ask(prompt_of(90, 17, VOCAB), NEW, Sampling(repetition_penalty=1.3)),
        Ask(prompt_of(17, 18, VOCAB), NEW, SAMPLED),
    ]
    return [*plain, *(kill_scenarios.with_stop(swarm, ask) for ask in stopped)]
