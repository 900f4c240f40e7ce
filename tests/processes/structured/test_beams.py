"""Beam search over HTTP and gRPC on a real swarm: equal to transformers, with kills, refusals by name."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

PROMPT = [65, 12, 200, 7, 9, 31, 8, 100]
DISTURBED = 250  # tokens, so many that two drains end before the answer does
LONG = PROMPT * 30  # longer than what a fork must save
SOME_ENDS = list(range(0, 320, 20))
NOTICED = ("--suspect-after", "2", "--fence-timeout", "3")  # a frozen server is
# Fields of the request, with transformers' names.
CASES: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": SOME_ENDS},
    {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": SOME_ENDS, "early_stopping": True},
    {"num_beams": 2, "eos_token_id": SOME_ENDS, "early_stopping": "never", "length_penalty": 1.5},
    {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": SOME_ENDS, "length_penalty": -1.0},
]


@pytest.fixture(scope="module")
def running(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("beams", gateway_flags=NOTICED, detects_silence=True)
    with running_swarm(
        toy_folder, "beams", spans=2, replicas=2, sessions=12, settings=settings
    ) as made:
        yield made


def answers_of_transformers(
    toy_model: Any, prompt: list[int], count: int, wanted: dict[str, Any]
) -> list[tuple[list[int], float]]:
    """Return the tokens and the score of each answer."""
    made = toy_model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=count,
        return_dict_in_generate=True,
        output_scores=True,
        **{"eos_token_id": None, "pad_token_id": 0, **wanted},
    )
    ends = wanted.get("eos_token_id", [])
    answers = []
    for row, score in zip(made.sequences.tolist(), made.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append((tokens[:end], score))
    return answers


def body_of(prompt: list[int], count: int, wanted: dict[str, Any]) -> dict[str, Any]:
    names = {"num_return_sequences": "n", "eos_token_id": "stop_token_ids"}
    return {
        "model": TOY_MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True,
        **{names.get(name, name): value for name, value in wanted.items()},
    }  # fmt: skip


def post(running: Running, path: str = "completions", **body: Any) -> httpx.Response:
    return httpx.post(f"http://{running.local.http}/v1/{path}", json=body, timeout=300)


@pytest.mark.parametrize("wanted", CASES, ids=lambda wanted: "-".join(wanted))
def test_answers_and_scores_equal_transformers(
    running: Running, toy_model: Any, wanted: dict[str, Any]
) -> None:
    expected = answers_of_transformers(toy_model, PROMPT, 12, wanted)
    body = body_of(PROMPT, 12, wanted)
    answer = post(running, **body, return_token_ids=True, logprobs=1)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in expected]
    penalty = wanted.get("length_penalty", 1.0)
    for choice, (tokens, score) in zip(choices, expected, strict=True):
        ends = tokens[-1] in wanted.get("eos_token_id", ())
        assert choice["finish_reason"] == ("stop" if ends else "length")
        logprobs = choice["logprobs"]["token_logprobs"]
        assert sum(logprobs) / len(tokens) ** penalty == pytest.approx(score, abs=1e-3)
        assert all(len(top) in (1, 2) for top in choice["logprobs"]["top_logprobs"])
    running.wait_empty()


def test_beams_of_vllm_are_as_many_as_answers(running: Running, toy_model: Any) -> None:
    wanted = {"num_beams": 3, "num_return_sequences": 3}
    expected = answers_of_transformers(toy_model, PROMPT, 8, wanted)
    body = body_of(PROMPT, 8, {}) | {"use_beam_search": True, "n": 3}
    found = post(running, **body, return_token_ids=True).json()["choices"]
    assert [choice["token_ids"] for choice in found] == [tokens for tokens, _ in expected]
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": TOY_MODEL, "max_tokens": 4}
    found = post(running, "chat/completions", **chat, num_beams=2, n=2).json()["choices"]
    assert len({choice["message"]["content"] for choice in found}) == 2


def test_example_of_the_page_works(running: Running) -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text("utf-8")
    example = page.split("### Beam search")[1].split("```json\n")[1].split("```")[0]
    answer = post(running, **json.loads(example) | {"model": TOY_MODEL})
    assert len(answer.json()["choices"]) == 2, answer.text


def test_grpc_gives_the_same_answers(running: Running, toy_model: Any) -> None:
    wanted = {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": SOME_ENDS}
    expected = answers_of_transformers(toy_model, PROMPT, 9, wanted | {"early_stopping": True})
    request = api_pb2.GenerateRequest(
        model=TOY_MODEL,
        tokens=api_pb2.TokenIds(ids=PROMPT),
        max_tokens=9,
        num_beams=3,
        n=2,
        early_stopping="true",
        ignore_eos=True,
        sampling=api_pb2.Sampling(stop_token_ids=SOME_ENDS),
    )
    with grpc.insecure_channel(running.local.grpc) as channel:
        stub: Any = api_pb2_grpc.InferenceStub(channel)
        answer = stub.Generate(request, timeout=300)
        assert [list(each.token_ids) for each in answer.choices] == [ids for ids, _ in expected]
        with pytest.raises(grpc.RpcError, match=r"num_beams: .* call Generate"):
            next(stub.GenerateStream(request, timeout=300))


def test_rows_in_place_of_tokens_give_the_same_beams(running: Running, toy_model: Any) -> None:
    """The rows are of no token, and so many that beams fork."""
    with torch.no_grad():
        rows = toy_model.get_input_embeddings()(torch.tensor(LONG)) * 1.1
    expected = toy_model.generate(
        inputs_embeds=rows[None],
        do_sample=False,
        num_beams=3,
        num_return_sequences=2,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    given = api_pb2.Tensor(dtype="float32", shape=rows.shape, data=rows.numpy().tobytes())
    request = api_pb2.GenerateRequest(
        model=TOY_MODEL, hidden_states=given, max_tokens=12, num_beams=3, n=2, ignore_eos=True
    )
    with grpc.insecure_channel(running.local.grpc) as channel:
        answer = api_pb2_grpc.InferenceStub(channel).Generate(request, timeout=300)
    assert [list(each.token_ids) for each in answer.choices] == expected.tolist()
    running.wait_empty()


def test_prompt_of_beams_is_computed_once(running: Running, toy_model: Any) -> None:
    """The other beams fork from the first one; each of them computes a few rows of its own."""
    before = sum(running.rows().values())
    wanted = {"num_beams": 4}
    expected = answers_of_transformers(toy_model, LONG, 4, wanted)
    answer = post(running, **body_of(LONG, 4, wanted), return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == expected[0][0]
    running.wait_empty()
    spans = 2
    assert sum(running.rows().values()) - before < spans * 2 * len(LONG)


def has_grown(length: int, session: api_pb2.Session) -> bool:
    return session.length >= length


def kill(running: Running, peer: str) -> Callable[[], object]:
    running.kill(peer)
    return running.wait_whole


def freeze(running: Running, peer: str) -> Callable[[], object]:
    running.local.kill(name_of(peer), signal.SIGSTOP)
    return lambda: running.local.kill(name_of(peer), signal.SIGCONT)


def drain(running: Running, peer: str) -> Callable[[], object]:
    states = list(running.view.drain_server(name_of(peer), timeout=300))
    assert states[-1].done
    return lambda: list(running.view.drain_server(name_of(peer), undo=True))


@pytest.mark.parametrize(
    "disturb", [kill, *(pytest.param(each, marks=pytest.mark.full) for each in (freeze, drain))]
)
def test_disturbed_servers_change_no_beam(
    running: Running, toy_model: Any, disturb: Callable[[Running, str], Callable[[], object]]
) -> None:
    """Beams of a long prompt fork from one session. A server is disturbed in the middle, and another one later."""
    wanted = {"num_beams": 4, "num_return_sequences": 4}
    expected = answers_of_transformers(toy_model, LONG, DISTURBED, wanted)
    body = body_of(LONG, DISTURBED, wanted)
    running.wait_whole()
    before = running.faults().resumed
    with ExitStack() as ends, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: post(running, **body, return_token_ids=True))
        for grown, hop in ((8, 1), (24, 0)):
            found = running.wait_session(partial(has_grown, len(LONG) + grown))
            ends.callback(disturb(running, found.route[hop].peer))
        choices = asked.result().json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in expected]
    assert disturb is drain or running.faults().resumed > before
    running.wait_empty()
    running.wait_whole()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"session_id": "s"}, "session_id"),
        ({"stop": "x"}, "stop"),
        ({"temperature": 0.5}, "temperature"),
        ({"guided_regex": "a", "ignore_eos": False}, "guided_regex"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"n": 5}, "n"),
        ({"num_beams": 21}, "num_beams"),
        ({"num_beams": 10, "stop_token_ids": list(range(11))}, "num_beams"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": False}, "use_beam_search"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"num_beams": 1, "length_penalty": 2}, "length_penalty"),
        ({"num_beams": None, "early_stopping": True}, "early_stopping"),
        ({"prompt": PROMPT * 200}, "prompt"),
    ],
)
def test_beams_that_cannot_be_are_refused_by_name(
    running: Running, fields: dict[str, Any], param: str
) -> None:
    answer = post(running, **(body_of(PROMPT, 4, {"num_beams": 4}) | fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
