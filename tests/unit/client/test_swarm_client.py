"""The client of the admin API, and the command that drains by it, against a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest
from support.ports import free_port, grpc_port
from typing_extensions import override

from modelswarm.cli import run
from modelswarm.client.sessions.connection import Connection
from modelswarm.client.swarm import SwarmClient
from modelswarm.errors import ModelSwarmError
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

LARGE = 5 << 20  # bytes; gRPC takes 4 MiB unless it is told otherwise


class Gateway(api_pb2_grpc.SwarmServicer):
    """Has one model, whose name is as long as the names of thousands of sessions. Its drains never end."""

    @override
    def List(self, request: api_pb2.ListRequest, context: object) -> api_pb2.Snapshot:
        return api_pb2.Snapshot(models=[api_pb2.ModelState(model="m" * LARGE)])

    @override
    def Drain(
        self, request: api_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> Iterator[api_pb2.DrainProgress]:
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()
        yield from ()


@pytest.fixture
def target() -> Iterator[str]:
    gateway = Gateway()  # type: ignore[abstract]  # it is asked for nothing else
    with grpc_port(
        lambda server: api_pb2_grpc.add_SwarmServicer_to_server(gateway, server)
    ) as port:
        yield f"127.0.0.1:{port}"


def test_proxy_of_the_environment_is_not_asked(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would ask it for 127.0.0.1, too: `up` would wait for its own gateway until it gives up."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with SwarmClient(target) as swarm:
        assert swarm.fetch_snapshot().models
    with pytest.raises(ModelSwarmError, match="no Inference API"):
        Connection(target).list_models()


def test_snapshot_of_many_sessions_is_received(target: str) -> None:
    with SwarmClient(target) as swarm:
        assert len(swarm.fetch_snapshot().models[0].model) == LARGE


def test_late_drain_names_the_whole_time(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "s", "--admin", target, "--wait", "0.5", "--timeout", "0.25"]) == 1
    assert "s: it has not reported that it is empty after 0.75 s" in capsys.readouterr().err
