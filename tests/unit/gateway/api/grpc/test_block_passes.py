"""The choice of a server for a forward or backward pass."""

from __future__ import annotations

import pytest
from support.gateway_service import make_service_with_model

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.block_passes import BlockPasses
from modelswarm_gateway.errors import ApiError, Code
from tools.dashboard.metric_registries import BLOCKS, MODEL


async def test_ended_pass_leaves_nothing_of_its_server() -> None:
    """A server that is restarted has another identity, so that counts of ended passes would only grow."""
    service, _ = make_service_with_model()
    passes = BlockPasses(service)
    head = api_pb2.PassHead(model=MODEL, blocks=api_pb2.BlockRange(first=0, last=BLOCKS))
    with pytest.raises(ApiError) as refused:
        async with passes._accepted(head):
            pass  # nothing listens at the server's address
    assert refused.value.code is Code.NO_SERVERS
    assert not passes._running
