"""Sessions at a gateway of a call that fails, and of a `with` block that ends in another context, are closed."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from support.eventually import eventually
from support.ports import inference_port
from transformers import GenerationConfig, LlamaConfig
from typing_extensions import override

from modelswarm.client.hf.auto import DistributedLlamaForCausalLM
from modelswarm.client.hf.blocks import Blocks
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import NoCapacityError
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

SERVED = ServedModel("m", 100, 2, 8, "float32", vocab_size=97)


class OneRoom(api_pb2_grpc.InferenceServicer):
    """A gateway with room for one session."""

    opened = 0

    @override
    def Session(self, requests: Any, context: Any) -> Any:
        next(requests)
        if self.opened:
            context.set_trailing_metadata((("error-code", "no_capacity"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no free KV; try again")
        self.opened += 1
        try:
            yield api_pb2.SessionResponse(state=api_pb2.SessionState(session_id="s"))
            for request in requests:
                if request.HasField("close"):
                    yield api_pb2.SessionResponse(closed=api_pb2.SessionClosed())
                    return
        finally:
            self.opened -= 1


@pytest.fixture
def gateway() -> OneRoom:
    return OneRoom()  # type: ignore[abstract]  # it is asked for nothing else


@pytest.fixture
def model(gateway: OneRoom) -> Iterator[Any]:
    with inference_port(gateway) as target:
        connection = Connection(target)
        config: Any = LlamaConfig(
            vocab_size=97, hidden_size=8, num_hidden_layers=2, num_attention_heads=2
        )
        blocks, plain = Blocks(connection, SERVED, "", config, {}), GenerationConfig()  # type: ignore[no-untyped-call]
        yield DistributedLlamaForCausalLM(config, plain, connection, SERVED, blocks)
        connection.close()


def test_failed_forward_keeps_no_session(model: Any, gateway: OneRoom) -> None:
    """The error is alive here, and with it the frames of the call: a smaller batch would find no room."""
    for use_cache in (False, True):
        with pytest.raises(NoCapacityError) as refused:
            model(torch.tensor([[5, 6], [7, 8]]), use_cache=use_cache)
        eventually("the first row's session is closed", lambda: not gateway.opened)
        assert refused.value.retryable


def test_session_may_end_in_another_context(model: Any, gateway: OneRoom) -> None:
    """Web frameworks ask each item of a generator in a context of its own."""
    session = model.inference_session(max_length=8)
    contextvars.copy_context().run(session.__enter__)
    assert gateway.opened
    session.__exit__(None, None, None)
    eventually("the session is closed", lambda: not gateway.opened)


def test_batch_without_room_leaves_the_session_open(model: Any, gateway: OneRoom) -> None:
    """The call can be repeated: the row that the session had before keeps its room."""
    with model.inference_session(max_length=8) as session:
        for _ in range(2):
            with pytest.raises(NoCapacityError, match=r"^1 of 2 rows fit; "):
                model.generate(torch.tensor([[5], [6]]), max_new_tokens=2)
        assert (gateway.opened, session.position) == (1, 0)
    eventually("the session is closed", lambda: not gateway.opened)
