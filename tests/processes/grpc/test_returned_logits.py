"""Logits and hidden states over gRPC are those of transformers with the whole model, also after a kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.models.rows import joined
from support.models.tiny_models import VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.oracles import TAU, logits_of
from support.processes.session_call import SessionCall
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, local_settings, running_swarm
from transformers import PreTrainedModel

PROMPT = prompt_of(90, 7, VOCAB)
SPANS = [2, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]


@pytest.fixture(scope="module", params=SPANS)
def toys(request: pytest.FixtureRequest, toy_folder: Path) -> Iterator[Running]:
    name = f"rows{request.param}"
    settings = local_settings(name, token_budget=32)
    with running_swarm(toy_folder, name, spans=request.param, settings=settings) as running:
        yield running


@pytest.fixture
def call(toys: Running) -> Iterator[SessionCall]:
    toys.wait_whole()
    with SessionCall(toys.local.grpc) as made:
        made.open(TOY_MODEL, max_length=400)
        yield made
    eventually("its session is closed", lambda: not toys.sessions())


def step(call: SessionCall, tokens: Sequence[int], **fields: Any) -> list[Any]:
    """Run a step with these tokens as its input; return its parts."""
    fields = {"ignore_eos": True, "return_logits": True} | fields
    return [each.part for each in call.step(tokens={"ids": tokens}, **fields)]


def generated(parts: Sequence[Any]) -> list[int]:
    return [token for part in parts for token in part.token_ids]


def check(rows: torch.Tensor, right: torch.Tensor) -> None:
    assert rows.shape == right.shape
    assert float((rows - right).abs().max()) < TAU


def test_logits_of_a_prompt_and_its_answer(call: SessionCall, toy_model: PreTrainedModel) -> None:
    parts = step(call, PROMPT, max_tokens=12, all_positions=True)
    log = [*PROMPT, *generated(parts)]
    rows = joined(parts, 0)
    check(rows, logits_of(toy_model, log[:-1]))
    assert rows[len(PROMPT) - 1 :].argmax(-1).tolist() == generated(parts), "greedy"
    more = prompt_of(5, 8, VOCAB)
    parts = step(call, more, max_tokens=3)
    whole = [*log, *more, *generated(parts)]
    first = len(log) + len(more) - 1
    check(joined(parts, first), logits_of(toy_model, whole[:-1])[first:])


def test_step_without_tokens_is_a_forward_pass(
    call: SessionCall, toy_model: PreTrainedModel
) -> None:
    """The input joins the log, and nothing else does."""
    parts = step(call, PROMPT, max_tokens=0)
    check(joined(parts, len(PROMPT) - 1), logits_of(toy_model, PROMPT)[-1:])
    assert (generated(parts), parts[-1].finish_reason) == ([], "length")
    log = list(PROMPT)
    for count in (1, 4, 1):
        new = prompt_of(count, 20 + len(log), VOCAB)
        parts = step(call, new, max_tokens=0, all_positions=True)
        right = logits_of(toy_model, [*log, *new])[len(log) :]
        check(joined(parts, len(log)), right)
        log += new
    assert call.ask(state={}).state.position == len(log)
    assert parts[-1].usage.total_tokens == len(log)
    call.ask(rewind={"position": 50})
    parts = step(call, [3, 4], max_tokens=0, all_positions=True)
    check(joined(parts, 50), logits_of(toy_model, [*PROMPT[:50], 3, 4])[50:])


@torch.no_grad()
def test_hidden_states_are_those_of_transformers(
    call: SessionCall, toy_model: PreTrainedModel
) -> None:
    """They are `hidden_states[-1]` there: after the final norm. Logits may come with them."""
    model: Any = toy_model
    parts = step(call, PROMPT, max_tokens=0, all_positions=True, return_hidden_states=True)
    right = model(torch.tensor([list(PROMPT)]), output_hidden_states=True)
    check(joined(parts, 0, "hidden_states"), right.hidden_states[-1][0])
    check(joined(parts, 0), right.logits[0])
    parts = step(call, [5], max_tokens=0, return_logits=False, return_hidden_states=True)
    assert not any(part.HasField("logits") for part in parts)
    right = model(torch.tensor([[*PROMPT, 5]]), output_hidden_states=True)
    check(joined(parts, len(PROMPT), "hidden_states"), right.hidden_states[-1][0, -1:])


def test_logits_are_unchanged_by_sampling(call: SessionCall, toy_model: PreTrainedModel) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.5, "logit_bias": {7: 50.0}}
    parts = step(call, PROMPT, max_tokens=8, sampling=sampling, logprobs=0)
    log = [*PROMPT, *generated(parts)]
    rows = joined(parts, len(PROMPT) - 1)
    check(rows, logits_of(toy_model, log[:-1])[len(PROMPT) - 1 :])
    reported = [entry.logprob for part in parts for entry in part.logprobs]
    right = rows.log_softmax(-1).gather(1, torch.tensor(generated(parts))[:, None])[:, 0]
    assert reported == pytest.approx(right.tolist(), abs=1e-4)


def test_forward_pass_may_fill_the_session(call: SessionCall, toy_model: PreTrainedModel) -> None:
    """A generated token would have no position."""
    prompt = prompt_of(400, 1, VOCAB)
    parts = step(call, prompt, max_tokens=0, all_positions=True)
    check(joined(parts, 0), logits_of(toy_model, prompt))
    call.ask(rewind={"position": 399})
    parts = step(call, prompt[399:], max_tokens=0)
    check(joined(parts, 399), logits_of(toy_model, prompt)[399:])
    call.send(step={"tokens": {"ids": [5]}, "max_tokens": 0, "return_logits": True})
    assert "max_length, holds 400" in call.failure().details()


def as_tensor(rows: torch.Tensor) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(rows.shape), "data": rows.numpy().tobytes()}


@torch.no_grad()
def test_rows_stand_in_place_of_embeddings(call: SessionCall, toy_model: PreTrainedModel) -> None:
    """A soft prompt before tokens gives what `inputs_embeds` of transformers gives."""
    model: Any = toy_model
    embed = model.get_input_embeddings()
    soft = torch.randn(6, embed.weight.shape[1], generator=torch.manual_seed(1)) * 0.1
    fields = {"max_tokens": 0, "return_logits": True, "all_positions": True}
    first = [each.part for each in call.step(hidden_states=as_tensor(soft), **fields)]
    given = torch.cat([soft, embed(torch.tensor(PROMPT))])
    second = step(call, PROMPT, max_tokens=5, all_positions=True)
    tokens = generated(second)
    given = torch.cat([given, embed(torch.tensor(tokens[:-1]))])
    right = model(inputs_embeds=given[None]).logits[0]
    check(joined(first, 0), right[:6])
    check(joined(second, 6), right[6:])
    assert call.ask(state={}).state.position == 6 + len(PROMPT) + 5
    penalty = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    third = step(call, [9], max_tokens=3, sampling=penalty)
    assert len(generated(third)) == 3, "penalties leave rows out"


@torch.no_grad()
def test_killed_server_gets_the_rows_again(
    toys: Running, call: SessionCall, toy_model: PreTrainedModel
) -> None:
    model: Any = toy_model
    soft = model.get_input_embeddings()(torch.tensor(PROMPT)) + 0.01
    parts = [call.step(hidden_states=as_tensor(soft), max_tokens=0)[-1].part]
    toys.kill(toys.only_session().route[0].peer)
    parts = step(call, [5, 6], max_tokens=4)
    tokens = generated(parts)
    given = torch.cat([soft, model.get_input_embeddings()(torch.tensor([5, 6, *tokens[:-1]]))])
    right = model(inputs_embeds=given[None]).logits[0]
    check(joined(parts, len(PROMPT) + 1), right[len(PROMPT) + 1 :])


def test_killed_server_repeats_and_loses_no_row(
    toys: Running, call: SessionCall, toy_model: PreTrainedModel
) -> None:
    """A server is killed while rows of the prompt come, and another one in the answer."""
    prompt = prompt_of(300, 9, VOCAB)
    fields = {"all_positions": True, "return_logits": True, "ignore_eos": True}
    call.send(step={"tokens": {"ids": prompt}, "max_tokens": 60, **fields})
    parts, kills = [call.receive().part], 0
    tail = toys.only_session().route[-1]
    toys.kill(tail.peer)
    while not parts[-1].finish_reason:
        parts.append(call.receive().part)
        if len(generated(parts)) > 10 and kills == 0:
            kills += 1
            toys.kill(toys.only_session().route[0].peer)
    log = [*prompt, *generated(parts)]
    assert len(log) == 360
    check(joined(parts, 0), logits_of(toy_model, log[:-1]))
    assert toys.faults().resumed >= 1
