"""The number of streams on the channels of one client, without a gateway."""

from __future__ import annotations

import subprocess
import sys
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


def test_connection_in_the_child_of_a_fork_is_refused() -> None:
    """gRPC's threads are not in the child, so that a call would wait for ever."""
    program = """
import os, signal
from modelswarm.client.sessions.connection import Connection
from modelswarm.errors import UserError
connection = Connection("127.0.0.1:9")
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(30)
for ask in (connection.list_models, lambda: connection.stream_session(iter(()))):
    try:
        ask()
    except UserError as error:
        print(error, flush=True)
os._exit(0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    said = "gateway: the connection was made in another process; make one in this process\n"
    assert (ended.returncode, ended.stdout) == (0, 2 * said), ended.stderr
