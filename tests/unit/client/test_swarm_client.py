"""The client of the admin API against a stand-in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from typing_extensions import override

from modelswarm.client.swarm import SwarmClient
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

LARGE = 5 << 20  # bytes; gRPC takes 4 MiB unless it is told otherwise


class Gateway(api_pb2_grpc.SwarmServicer):
    """Has one model, whose name is as long as the names of thousands of sessions."""

    @override
    def List(self, request: api_pb2.ListRequest, context: object) -> api_pb2.Snapshot:
        return api_pb2.Snapshot(models=[api_pb2.ModelState(model="m" * LARGE)])


def test_snapshot_of_many_sessions_is_received() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    gateway = Gateway()  # type: ignore[abstract]  # it is asked for nothing else
    api_pb2_grpc.add_SwarmServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with SwarmClient(f"127.0.0.1:{port}") as swarm:
            assert len(swarm.fetch_snapshot().models[0].model) == LARGE
    finally:
        server.stop(None).wait()
