"""Structured output over gRPC: each kind of grammar, and the loss of the tail in the middle of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import pytest
from support.processes.session_call import SessionCall
from support.processes.streams import TOY_MODEL
from support.processes.swarm import Running

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}],
    "triggers": ["<n>"],
}


def request(**wanted: Any) -> api_pb2.GenerateRequest:
    return api_pb2.GenerateRequest(
        model=TOY_MODEL,
        prompt="go",
        max_tokens=300,
        structured_outputs=api_pb2.StructuredOutputs(**wanted),
        sampling=api_pb2.Sampling(temperature=1.0, seed=4),
    )


def generate(swarm: Running, **wanted: Any) -> api_pb2.GenerateResponse:
    with grpc.insecure_channel(swarm.local.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        made: api_pb2.GenerateResponse = stub.Generate(request(**wanted), timeout=120)
    return made


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"json": json.dumps(SCHEMA)}, r'\{"x":[0-9]\}'),
        ({"json": json.dumps(SCHEMA), "whitespace_pattern": "[ ]"}, r'\{ ?"x" ?: ?[0-9] ?\}'),
        ({"regex": "[0-9]{4}-[01][0-9]"}, "[0-9]{4}-[01][0-9]"),
        ({"choice": ["ja", "nein"]}, "ja|nein"),
        ({"grammar": 'start: "x" | "yz"'}, "x|yz"),
        ({"grammar": 'root ::= "x" | "yz"'}, "x|yz"),
    ],
)
def test_answer_follows_its_grammar(
    four_spans: Running, wanted: dict[str, Any], pattern: str
) -> None:
    answer = generate(four_spans, **wanted)
    assert re.fullmatch(pattern, answer.text)
    assert answer.finish_reason == "stop"


def test_structural_tag_follows_its_trigger(four_spans: Running) -> None:
    answer = generate(four_spans, structural_tag=json.dumps(TAG))
    for begun in answer.text.split("<n>")[1:]:
        assert "7</n>".startswith(begun[:5]) or begun.startswith("7</n>")


def test_any_object_is_json(four_spans: Running) -> None:
    answer = generate(four_spans, json_object=True)
    assert answer.text.startswith("{")
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_killed_tail_changes_no_token(four_spans: Running) -> None:
    asked = request(regex="[a-z]{200}")
    with grpc.insecure_channel(four_spans.local.grpc) as channel:
        stub = api_pb2_grpc.InferenceStub(channel)
        four_spans.wait_whole()
        calm = [
            token for part in stub.GenerateStream(asked, timeout=120) for token in part.token_ids
        ]
        text = ""
        tokens: list[int] = []
        for part in stub.GenerateStream(asked, timeout=120):
            text += part.text
            if not tokens:
                session = four_spans.wait_session(lambda session: session.state == "running")
                four_spans.kill(session.route[-1].peer)
            tokens += part.token_ids
    assert re.fullmatch("[a-z]{200}", text)
    assert tokens == calm


@pytest.mark.full
def test_step_of_a_session_keeps_its_grammar_after_a_kill(four_spans: Running) -> None:
    wanted = {
        "max_tokens": 300,
        "logprobs": 1,
        "sampling": {"temperature": 1.0, "seed": 4},
        "structured_outputs": {"regex": "[a-z]{200}"},
    }
    four_spans.wait_whole()
    with SessionCall(four_spans.local.grpc) as call:
        call.open(TOY_MODEL, max_length=900)
        first = call.tokens(prompt="go", max_tokens=5, ignore_eos=True)
        end = call.ask(state={}).position
        calm = call.tokens(prompt=" on", **wanted)
        call.ask(rewind={"position": end})
        call.send(step={"prompt": " on", **wanted})
        answers = [call.receive()]
        session = four_spans.wait_session(lambda session: session.state == "running")
        four_spans.kill(session.route[-1].peer)
        while not answers[-1].part.finish_reason:
            answers.append(call.receive())
        call.ask(close={})
    parts = [answer.part for answer in answers]
    assert len(first) == 5
    assert [token for part in parts for token in part.token_ids] == calm
    assert re.fullmatch("[a-z]{200}", "".join(part.text for part in parts))
    scored = [entry.token_id for part in parts for entry in part.logprobs]
    assert scored == calm[: len(scored)]
    assert len(scored) >= len(calm) - 1, "the end token has no text"
