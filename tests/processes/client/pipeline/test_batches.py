"""Batches of a pipeline on a real swarm: order, configs, text, and equality with the whole model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.processes.oracles import TAU, check_tokens
from support.processes.streams import TOY_MODEL, Answer, Request
from support.processes.swarm import Running, metrics, running_swarm, total

from modelswarm.client.api.errors import BadRequestError, ContextLengthError
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline
from modelswarm.client.pipeline.response import Response
from modelswarm.client.pipeline.synchronous import Pipeline
from modelswarm.errors import UserError
from modelswarm.protocol.messages import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT = GenerationConfig(max_new_tokens=8, ignore_eos=True)
EOS = 0


@pytest.fixture(scope="module")
def running(toy_folder: Path) -> Iterator[Running]:
    with running_swarm(toy_folder, "pipeline", spans=2, replicas=1, sessions=4) as made:
        yield made


@pytest.fixture(scope="module")
def pipe(running: Running) -> Iterator[Pipeline]:
    with pipeline(f"http://{running.local.http}", model=TOY_MODEL) as made:
        yield made


def prompts_of(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 257) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


def answer_of(prompt: list[int], response: Response, sampling: Sampling) -> Answer:
    request = Request(tuple(prompt), len(response.token_ids), sampling)
    finish = response.finish_reason or ""
    return Answer(request, tuple(response.token_ids), (), response.text, finish)


def test_greedy_batch_equals_the_whole_model(pipe: Pipeline, toy_model: PreTrainedModel) -> None:
    prompts = prompts_of(24)
    configs: list[GenerationConfig | None] = [
        GenerationConfig(max_new_tokens=4 + place % 20, ignore_eos=True) for place in range(24)
    ]

    responses = pipe(prompts, configs)

    assert [response.index for response in responses] == list(range(24))
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert len(response.token_ids) == response.generate_token_len == 4 + place % 20
        assert response.input_token_len == len(prompt)
        assert response.finish_reason == "length"
        check_tokens(toy_model, answer_of(prompt, response, Sampling()))


def test_sampled_answer_equals_the_whole_model(pipe: Pipeline, toy_model: PreTrainedModel) -> None:
    prompt = prompts_of(1)[0]
    config = GenerationConfig(
        max_new_tokens=40, do_sample=True, top_k=40, top_p=0.9, min_p=0.01, temperature=0.9,
        repetition_penalty=1.2, random_seed=7, ignore_eos=True,
    )  # fmt: skip

    response = pipe(prompt, config)

    sampling = Sampling(
        temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=7
    )
    check_tokens(toy_model, answer_of(prompt, response, sampling))


def test_rows_of_answers_equal_the_whole_model(pipe: Pipeline, toy_model: PreTrainedModel) -> None:
    """Rows of all tokens but the last one, or those that lead to tokens of the answer."""
    config = GenerationConfig(
        max_new_tokens=6,
        ignore_eos=True,
        output_logits="generation",
        output_last_hidden_state="all",
    )
    prompts = [[7], *prompts_of(2)]
    stream = pipe.stream_infer(prompts, config)
    parts = list(stream)
    assert all((part.logits is None) == (part.finish_reason is None) for part in parts)
    for responses in (pipe(prompts, config), stream.responses):
        for prompt, response in zip(prompts, responses, strict=True):
            assert response is not None
            log = [*prompt, *response.token_ids[:-1]]
            whole = whole_rows(toy_model, log)
            assert close(response.logits, whole.logits[0, -6:])
            assert close(response.last_hidden_state, whole.hidden_states[-1][0])
    other = replace(config, output_logits="all", output_last_hidden_state=None)
    found = pipe(prompts[1], other)
    log = [*prompts[1], *found.token_ids[:-1]]
    assert found.last_hidden_state is None
    assert close(found.logits, whole_rows(toy_model, log).logits[0])


def test_turn_of_a_chat_has_its_rows(pipe: Pipeline, toy_model: PreTrainedModel) -> None:
    config = GenerationConfig(max_new_tokens=5, ignore_eos=True, output_logits="generation")
    with pipe.session(config) as session:
        for text in ("Hi", "Ho"):
            pipe.chat(text, session)
            found = session.response
            assert found is not None and found.logits.shape[0] == 5
            assert found.logits.argmax(-1).tolist() == found.token_ids


@torch.no_grad()
def whole_rows(whole: PreTrainedModel, log: list[int]) -> Any:
    model: Any = whole
    return model(torch.tensor([log]), output_hidden_states=True)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() < TAU)


def test_prompts_without_seed_draw_different_answers(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=20, do_sample=True, top_k=0, ignore_eos=True)

    first, second = pipe(["the same", "the same"], config, do_preprocess=False)

    assert first.token_ids != second.token_ids


def test_string_is_a_message_of_a_chat_unless_raw(pipe: Pipeline) -> None:
    chat = pipe("Hi", SHORT)
    message = pipe([{"role": "user", "content": "Hi"}], SHORT)
    template = pipe("<|user|>Hi\n<|assistant|>", SHORT, do_preprocess=False)
    raw = pipe("Hi", SHORT, do_preprocess=False)

    assert chat == message
    assert chat.token_ids == template.token_ids
    assert (chat.input_token_len, raw.input_token_len) == (len("<|user|>Hi\n<|assistant|>"), 2)


def test_single_prompt_and_lists_give_their_shapes(pipe: Pipeline) -> None:
    one = pipe("Hi", SHORT)
    many = pipe(["Hi", "Ho"], SHORT)
    chats = pipe([[{"role": "user", "content": "Hi"}]], SHORT)

    assert isinstance(one, Response)
    assert [response.index for response in many] == [0, 1]
    assert many[0] == one
    assert chats == [one]
    nothing: list[str] = []
    assert pipe(nothing, SHORT) == []


def test_logprobs_name_tokens_by_their_ids(pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=5, logprobs=3, ignore_eos=True)

    response = pipe("Hi", config)

    assert response.logprobs is not None
    assert len(response.logprobs) == 5
    for token, entry in zip(response.token_ids, response.logprobs, strict=True):
        assert max(entry, key=lambda each: entry[each]) == token
        assert len(entry) == 3
        assert all(value <= 0 for value in entry.values())


@pytest.mark.parametrize("streams", [False, True])
def test_streamed_parts_form_the_whole_answers(pipe: Pipeline, streams: bool) -> None:
    prompts = prompts_of(6, seed=2)
    config = GenerationConfig(max_new_tokens=12, logprobs=2, ignore_eos=True)
    whole = pipe(prompts, config)

    parts = list(pipe.stream_infer(prompts, config, stream_response=streams))

    for place, response in enumerate(whole):
        mine = [part for part in parts if part.index == place]
        assert "".join(part.text for part in mine) == response.text
        assert [token for part in mine for token in part.token_ids] == response.token_ids
        logprobs = [entry for part in mine for entry in part.logprobs or ()]
        assert [set(entry) for entry in logprobs] == [set(e) for e in response.logprobs or ()]
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].generate_token_len == response.generate_token_len
        assert mine[-1].input_token_len == response.input_token_len
        assert (len(mine) > 1) == streams


@pytest.mark.full
def test_stop_and_bad_tokens_change_the_answer(pipe: Pipeline) -> None:
    free = pipe("Hi", GenerationConfig(max_new_tokens=12, ignore_eos=True))
    first, third = free.token_ids[0], free.token_ids[2]

    stopped = pipe("Hi", GenerationConfig(stop_token_ids=[third], ignore_eos=True))
    without = pipe("Hi", GenerationConfig(bad_token_ids=[first], max_new_tokens=12))
    longer = pipe("Hi", GenerationConfig(stop_token_ids=[third], min_new_tokens=6))

    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[:2] == free.token_ids[:2]
    assert len(stopped.token_ids) <= 3
    assert first not in without.token_ids
    assert longer.generate_token_len >= 6


def test_structured_answers_follow_their_format(pipe: Pipeline) -> None:
    regex = {"type": "regex_schema", "regex_schema": "[0-9]{3}"}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}

    number, five = pipe(
        ["a", "b"],
        [GenerationConfig(response_format=regex), GenerationConfig(response_format=schema)],
    )

    assert len(number.text) == 3
    assert number.text.isdigit()
    assert five.text == "5"


def test_long_prompt_is_refused_or_truncated(pipe: Pipeline, toy_model: PreTrainedModel) -> None:
    long = [1 + place % 250 for place in range(1500)]
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)

    with pytest.raises(ContextLengthError):
        pipe(long, config)
    response = pipe(long, config, truncate_prompt=True)
    whole = pipe(long, GenerationConfig(max_new_tokens=None), truncate_prompt=True)

    assert response.input_token_len == 1000
    check_tokens(toy_model, answer_of(long[-1000:], response, Sampling()))
    assert whole.input_token_len == 1023


def test_failed_prompt_is_a_response_if_wanted(pipe: Pipeline) -> None:
    prompts = [[5, 6], [999_999], [7]]

    responses = pipe(prompts, SHORT, raise_errors=False)

    assert [response.finish_reason for response in responses] == ["length", "error", "length"]
    assert isinstance(responses[1].error, BadRequestError)
    assert "999999" in (responses[1].error_message or "")
    assert responses[1].error_code == "invalid_request"
    assert (responses[0].error_message, responses[0].error_code) == (None, None)
    again = pipe([[5, 6], [8], [7]], SHORT, done=responses)
    assert (again[0], again[2]) == (responses[0], responses[2])
    assert again[1].finish_reason == "length"


def test_first_error_is_raised_with_its_prompt(pipe: Pipeline) -> None:
    with pytest.raises(BadRequestError, match="999999") as caught:
        pipe([[5, 6], [999_999], [7]], SHORT)

    assert any(note.startswith("prompt 1 of 3 failed") for note in caught.value.__notes__)


def test_done_responses_are_not_asked_again(pipe: Pipeline) -> None:
    kept = Response("kept", 1, 1, "stop")

    first, second = pipe(["a", "b"], SHORT, done=[kept, None])

    assert first is kept
    assert second == pipe(["a", "b"], SHORT)[1]
    with pytest.raises(UserError, match="1 responses for 2 prompts"):
        pipe(["a", "b"], SHORT, done=[kept])


def test_likelihoods_equal_those_of_the_whole_model(
    pipe: Pipeline, toy_model: PreTrainedModel
) -> None:
    texts = [*prompts_of(3, seed=5), [1 + place % 250 for place in range(1024)], [7, 8]]

    found = pipe.get_ppl(texts)

    for ids, value in zip(texts, found, strict=True):
        rows = torch.tensor([ids])
        assert value == pytest.approx(toy_model(rows, labels=rows).loss.item(), abs=1e-4)
    assert pipe.get_ppl([7, 8]) == pytest.approx(found[-1:])
    assert pipe.get_ppl([]) == []


def test_texts_without_a_second_token_have_no_likelihood(pipe: Pipeline) -> None:
    for texts, field in (([[5, 6], [5]], r"input_ids\[1\]"), (["text"], r"input_ids\[0\]")):
        with pytest.raises(UserError, match=field):
            pipe.get_ppl(texts)  # type: ignore[arg-type]
    with pytest.raises(BadRequestError) as caught:
        pipe.get_ppl([[5, 6], [5, 999_999]])
    assert any(note.startswith("prompt 1 of 2 failed") for note in caught.value.__notes__)


def test_verbs_without_a_meaning_here_are_refused_by_name(pipe: Pipeline) -> None:
    with pytest.raises(UserError, match=r"get_reward_score: .*get_ppl"):
        pipe.get_reward_score([5, 6])
    with pytest.raises(UserError, match=r"sessions: .*chat"):
        pipe.stream_infer("Hi", SHORT, sessions=[pipe.session()])


@pytest.mark.full
def test_prompts_wait_where_there_is_room_for_few(running: Running) -> None:
    length = 1024 - 60
    config = GenerationConfig(max_new_tokens=3, ignore_eos=True)
    prompts = [[1 + (place + row) % 250 for place in range(length)] for row in range(12)]
    with pipeline(f"http://{running.local.http}", max_batch_size=12) as pipe:
        responses = pipe(prompts, config)

    refused = total(
        metrics(running.local.metrics), "modelswarm_gateway_streams_total", 'outcome="refused"'
    )
    assert refused > 0
    assert [response.generate_token_len for response in responses] == [3] * 12
