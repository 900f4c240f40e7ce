"""The number of streams on the channels of one client, without a gateway."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.ports import free_port

from modelswarm.client.sessions.channels import STREAMS_PER_CHANNEL, Channels


def test_call_that_fails_takes_no_place_on_a_channel() -> None:
    address = f"127.0.0.1:{free_port()}"
    made: list[grpc.Channel] = []

    def make() -> grpc.Channel:
        made.append(grpc.insecure_channel(address))
        return made[-1]

    def fail(stub: Any) -> Any:
        stub.Session(iter(()), timeout="soon")  # TypeError, before anything is sent

    channels = Channels(make)
    try:
        for _ in range(2 * STREAMS_PER_CHANNEL):
            with pytest.raises(TypeError):
                channels.start(fail)
        assert len(made) == 1
    finally:
        channels.close()
