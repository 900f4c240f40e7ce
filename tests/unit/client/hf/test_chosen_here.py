"""Tokens that transformers' own loop chooses from the logits of a gateway, which is a stand-in here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ports import inference_port
from transformers import GenerationConfig, LlamaConfig, MaxLengthCriteria, StoppingCriteria
from typing_extensions import override

from modelswarm.client.hf.auto import DistributedLlamaForCausalLM
from modelswarm.client.hf.blocks import Blocks
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

VOCABULARY = 97
SERVED = ServedModel("m", 100, 2, 8, "float32", vocab_size=VOCABULARY)
END, PAD = 9, 0


class Counter(api_pb2_grpc.InferenceServicer):
    """A gateway whose model counts: behind a token comes the next number."""

    @override
    def GenerateStream(self, request: Any, context: Any) -> Any:
        last = request.tokens.ids[-1]
        tokens = range(last + 1, last + 1 + request.max_tokens)
        yield api_pb2.GenerateResponse(token_ids=tokens, finish_reason="length")

    @override
    def Session(self, requests: Any, context: Any) -> Any:
        position = 0
        for request in requests:
            match request.WhichOneof("request"):
                case "step":
                    ids = request.step.tokens.ids
                    position += len(ids)
                    row = torch.nn.functional.one_hot(torch.tensor(ids[-1] + 1), VOCABULARY)
                    data = row.float().numpy().tobytes()
                    logits = api_pb2.Tensor(dtype="float32", shape=(1, VOCABULARY), data=data)
                    part = api_pb2.GenerateResponse(logits=logits, finish_reason="length")
                    yield api_pb2.SessionResponse(position=position, part=part)
                case "close":
                    yield api_pb2.SessionResponse(closed=api_pb2.SessionClosed())
                    return
                case other:
                    position = request.rewind.position if other == "rewind" else position
                    state = api_pb2.SessionState(session_id="s", position=position)
                    yield api_pb2.SessionResponse(position=position, state=state)


@pytest.fixture
def model() -> Iterator[Any]:
    counter = Counter()  # type: ignore[abstract]  # it is asked for nothing else
    with inference_port(counter) as target:
        connection = Connection(target)
        config: Any = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2
        )
        blocks, plain = Blocks(connection, SERVED, "", config, {}), GenerationConfig()  # type: ignore[no-untyped-call]
        plain.eos_token_id, plain.pad_token_id = END, PAD
        yield DistributedLlamaForCausalLM(config, plain, connection, SERVED, blocks)
        connection.close()


class StopAt(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    @override
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        return input_ids[:, -1] == self.token


def test_padding_of_a_row_is_no_part_of_its_session(model: Any) -> None:
    """A row that a criterion has ended is padded until the others end, and goes on behind its own last token."""
    ids = torch.tensor([[1], [5]])
    given = {"stopping_criteria": [StopAt(3)], "logits_processor": [lambda ids, scores: scores]}
    with model.inference_session(max_length=20, batch_size=2) as session:
        found = model.generate(ids, max_new_tokens=6, **given)
        assert found.tolist() == [[1, 2, 3, PAD, PAD], [5, 6, 7, 8, END]]
        assert session.tokens == [[1, 2, 3], [5, 6, 7, 8, END]]


def test_scores_may_be_a_default_of_the_model(model: Any) -> None:
    model.generation_config.return_dict_in_generate = True
    model.generation_config.output_scores = True
    found = model.generate(torch.tensor([[1]]), max_new_tokens=2)
    assert found.sequences.tolist() == [[1, 2, 3]]
    assert [int(each.argmax()) for each in found.scores] == [2, 3]


@pytest.mark.parametrize(("length", "last"), [(30, 30), (5, 5), (1, 11)])
def test_length_of_the_callers_criterion_counts(model: Any, length: int, last: int) -> None:
    """transformers takes it in place of the one of max_length."""
    model.generation_config.max_length = 12
    ids = torch.tensor([[10]]) if last == 11 else torch.tensor([[1]])
    given = {"stopping_criteria": [MaxLengthCriteria(length)], "eos_token_id": 96}
    assert int(model.generate(ids, **given)[0, -1]) == last


@pytest.mark.parametrize("ends", [(8, 9), torch.tensor([8, 9]), torch.tensor(8)])
def test_end_tokens_may_be_a_tuple_or_a_tensor(model: Any, ends: Any) -> None:
    """Rows that begin with padding need a mask where the padding is an end token."""
    with pytest.raises(ArgumentError, match=r"^attention_mask: rows begin with pad_token_id 8, wh"):
        model.generate(torch.tensor([[8, 1], [1, 2]]), eos_token_id=ends, pad_token_id=8)
