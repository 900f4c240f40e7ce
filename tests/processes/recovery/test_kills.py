"""SIGKILL of real servers while a transformer answers: no token is lost, repeated or changed (docs/protocol.md).

`test_kills_hash.py` has all other kills: recovery does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes import kill_scenarios
from support.processes.kill_scenarios import MIDDLE, PLACES, SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_tokens, check_twins
from support.processes.streams import Answer, Request
from support.processes.swarm import Running
from transformers import PreTrainedModel

from modelswarm.protocol.messages import Sampling

pytestmark = pytest.mark.full

NEW, AT = 150, 30  # tokens of an answer without a kill, and before a kill


@pytest.fixture
def swarm(four_spans: Running) -> Iterator[Running]:
    """Yield a swarm with all servers and no session before the test; check that no session is left."""
    four_spans.wait_empty()
    yield four_spans
    four_spans.wait_empty()


def check_answer(model: PreTrainedModel, calm: Answer, killed: Answer) -> None:
    check_contiguous(killed)
    check_tokens(model, killed)
    check_twins(model, calm, killed)


@pytest.mark.parametrize("place", ["head", "tail"])
def test_kill_during_decode_changes_no_token(
    swarm: Running, toy_model: PreTrainedModel, place: str
) -> None:
    request = Request(prompt_of(200, 2, VOCAB), NEW, SAMPLED)
    calm = swarm.calm(request)
    long = replace(request, new=TOY_LENGTH - len(request.prompt))
    check_answer(toy_model, calm, kill_scenarios.kill_in_decode(swarm, long, PLACES[place], AT))


def test_kills_under_eight_streams_change_no_token(
    swarm: Running, toy_model: PreTrainedModel
) -> None:
    requests = mixed_requests(swarm)
    calm = [swarm.calm(request) for request in requests]
    long = [
        request if request.stop else replace(request, new=TOY_LENGTH - len(request.prompt))
        for request in requests
    ]
    killed = kill_scenarios.kill_under_many(swarm, long, MIDDLE, at=10)
    for one, other in zip(calm, killed, strict=True):
        check_answer(toy_model, one, other)


def mixed_requests(swarm: Running) -> Sequence[Request]:
    """Return requests with prompts of different lengths: greedy, sampled in several ways, and with stop strings."""
    plain = [
        Request(prompt_of(5, 11, VOCAB), NEW),
        Request(prompt_of(333, 12, VOCAB), NEW),
        Request(prompt_of(64, 13, VOCAB), NEW, SAMPLED),
        Request(prompt_of(1, 14, VOCAB), NEW, Sampling(temperature=0.7, seed=5)),
        Request(prompt_of(150, 15, VOCAB), NEW, Sampling(temperature=1.3, min_p=0.05, seed=6)),
        Request(prompt_of(31, 16, VOCAB), NEW, Sampling(repetition_penalty=1.3)),
    ]
    stopped = [
        Request(prompt_of(90, 17, VOCAB), NEW, Sampling(repetition_penalty=1.3)),
        Request(prompt_of(17, 18, VOCAB), NEW, SAMPLED),
    ]
    return [*plain, *(kill_scenarios.with_stop(swarm, request) for request in stopped)]
