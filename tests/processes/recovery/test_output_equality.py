"""Swarms of real processes give the tokens of transformers with the whole model, for any split of the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.chain import Stream, load_chain
from support.models.tiny_models import EOS, TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import TAU, check_contiguous, check_tokens, check_twins, logits_of
from support.processes.streams import Answer, Request
from support.processes.swarm import Running, local_settings, running_swarm
from transformers import PreTrainedModel

from modelswarm.protocol.messages import Sampling

pytestmark = pytest.mark.full

LENGTHS = (33, 5, 210, 1, 90, 17, 400, 64)
NEW = 60
SAMPLINGS = (
    SAMPLED,
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=1.5, min_p=0.1, seed=3),
)


@pytest.fixture(scope="module")
def swarms(toy_folder: Path, four_spans: Running) -> Iterator[Mapping[int, Running]]:
    """Return swarms by their number of spans."""
    with (
        running_swarm(toy_folder, "one", spans=1, settings=local_settings("one")) as one,
        running_swarm(toy_folder, "two", spans=2, settings=local_settings("two")) as two,
    ):
        four_spans.wait_whole()
        yield {1: one, 2: two, 4: four_spans}


def greedy_requests() -> list[Request]:
    """Return requests that end at the model's own end of text."""
    ends = Sampling(eos=(EOS,))
    return [Request(prompt_of(n, 100 + i, VOCAB), NEW, ends) for i, n in enumerate(LENGTHS)]


def sampled_requests() -> list[Request]:
    return [
        replace(request, sampling=SAMPLINGS[i % len(SAMPLINGS)])
        for i, request in enumerate(greedy_requests())
    ]


def generated(model: PreTrainedModel, request: Request) -> tuple[int, ...]:
    """Return the tokens of transformers' own `generate`."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([request.prompt]),
        do_sample=False,
        max_new_tokens=request.new,
        pad_token_id=EOS,
    )
    tokens: list[int] = out[0].tolist()
    return tuple(tokens[len(request.prompt) :])


def test_greedy_answers_equal_generate_for_any_span_count(
    swarms: Mapping[int, Running], toy_model: PreTrainedModel
) -> None:
    requests = greedy_requests()
    right = [generated(toy_model, request) for request in requests]
    for spans, swarm in swarms.items():
        assert swarm.ask(requests[0]).tokens == right[0], f"{spans} spans, alone"
        together = swarm.ask_all(requests)
        assert [answer.tokens for answer in together] == right, f"{spans} spans, 8 at once"


def test_seeded_sampling_ignores_span_count_and_batch(
    swarms: Mapping[int, Running], toy_model: PreTrainedModel
) -> None:
    requests = sampled_requests()
    alone: Sequence[Answer] = [swarms[1].ask(request) for request in requests]
    for swarm in swarms.values():
        for calm, answer in zip(alone, swarm.ask_all(requests), strict=True):
            check_contiguous(answer)
            check_tokens(toy_model, answer)
            check_twins(toy_model, calm, answer)


def test_another_seed_gives_another_answer(swarms: Mapping[int, Running]) -> None:
    request = Request(prompt_of(20, 7, VOCAB), NEW, SAMPLED)
    other = replace(request, sampling=replace(SAMPLED, seed=SAMPLED.seed + 1))
    one, two = swarms[1].ask_all([request, other])
    assert one.tokens != two.tokens


def test_the_margin_is_far_above_rounding(toy_folder: Path, toy_model: PreTrainedModel) -> None:
    """KV written in parts of 7 rows by four spans, against one pass of the whole model."""
    chain = load_chain(toy_folder, range(0, TOY_BLOCKS + 1, 2))
    stream = Stream(list(prompt_of(300, 8, VOCAB)), Sampling(repetition_penalty=1.2))
    chain.generate([stream], 100, chunk=7)
    logprobs = torch.log_softmax(logits_of(toy_model, stream.log), dim=-1)[299:-1]
    tokens = torch.tensor([pick.token for pick in stream.picked])
    right = logprobs.gather(1, tokens[:, None])[:, 0]
    mine = torch.tensor([pick.logprob for pick in stream.picked])
    assert float((mine - right).abs().max()) < TAU / 10


def test_a_wrong_token_is_found(toy_model: PreTrainedModel) -> None:
    """The oracles must reject an answer with one wrong token."""
    request = Request(prompt_of(50, 9, VOCAB), NEW)
    tokens = generated(toy_model, request)
    positions = tuple(range(50, 50 + len(tokens)))
    good = Answer(request, tokens, positions, "", "length")
    bad = replace(good, tokens=(*tokens[:30], tokens[30] % (VOCAB - 1) + 1, *tokens[31:]))
    assert check_tokens(toy_model, good) == 0
    check_twins(toy_model, good, good)
    with pytest.raises(AssertionError, match="entry 80"):
        check_tokens(toy_model, bad)
    with pytest.raises(AssertionError, match="token 30"):
        check_twins(toy_model, good, bad)
