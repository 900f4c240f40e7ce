"""Prompts of blocks, and a gateway or servers that do not know them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ports import inference_port
from transformers import LlamaConfig
from typing_extensions import override

from modelswarm.client.hf.blocks import Blocks
from modelswarm.client.sessions.base import MESSAGE_BYTES
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.session import Prefix
from modelswarm.client.training.prompts import SoftPrompts
from modelswarm.errors import UnavailableError
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

COUNT, WIDTH, BLOCKS = 5, 4, 3
SERVED = ServedModel("m", 100, BLOCKS, WIDTH, "float32")


class Lists(api_pb2_grpc.InferenceServicer):
    """A gateway that lists one model."""

    takes_block_rows = False

    @override
    def ListModels(self, request: Any, context: Any) -> Any:
        model = api_pb2.Model(
            id="m",
            max_model_len=100,
            n_blocks=BLOCKS,
            hidden_size=WIDTH,
            dtype="float32",
            block_rows=self.takes_block_rows,
        )
        return api_pb2.ListModelsResponse(models=[model])


@pytest.fixture
def lists() -> Lists:
    return Lists()  # type: ignore[abstract]  # it is asked for nothing else


@pytest.fixture
def blocks(lists: Lists) -> Iterator[Blocks]:
    with inference_port(lists) as target:
        connection = Connection(target)
        made = Blocks(connection, SERVED, "", LlamaConfig(), {})
        made.prompts = SoftPrompts("deep_ptune", COUNT, WIDTH, BLOCKS, 1.0)
        yield made
        connection.close()


def test_older_gateway_or_server_is_an_error(blocks: Blocks, lists: Lists) -> None:
    with pytest.raises(
        UnavailableError, match=r"'deep_ptune' does not generate: .* is older than 2\.4"
    ):
        blocks.prefix()
    lists.takes_block_rows = True  # a rolling upgrade has ended
    assert blocks.prefix() is not None
    blocks.prompts = SoftPrompts("ptune", COUNT, WIDTH, BLOCKS, 1.0)
    found = blocks.prefix()
    assert found is not None and not found.has_block_rows


def test_prefix_has_the_rows_of_each_position_together(blocks: Blocks, lists: Lists) -> None:
    lists.takes_block_rows = True
    found, prompts = blocks.prefix(), blocks.prompts
    assert found is not None and prompts is not None and prompts.deep is not None
    step = found.as_step(2)
    shape = (COUNT - 2, 1 + BLOCKS, WIDTH)
    assert tuple(step.hidden_states.shape) == shape
    rows = torch.frombuffer(bytearray(step.hidden_states.data), dtype=torch.float32).view(shape)
    assert rows[:, 0].equal(prompts.first[2:])
    assert rows[:, 1:].equal(prompts.deep[:, 2:].transpose(0, 1))


def test_long_prefix_comes_in_several_steps() -> None:
    served = ServedModel("m", 100, 63, 4096, "float32")  # 1 MiB for each position
    count, row = 5, served.row_bytes
    prefix = Prefix(count, served, bytes(count * row * 64), has_block_rows=True)
    steps, start = [], 0
    while start < count:
        steps.append(prefix.as_step(start))
        start += steps[-1].hidden_states.shape[0]
    assert [step.hidden_states.shape[0] for step in steps] == [2, 2, 1]
    assert max(step.ByteSize() for step in steps) < MESSAGE_BYTES + 1000
