"""What the gateway knows, by its gRPC door: servers, spans, health and sessions.

Used by `LocalSwarm` while it starts, and by `status`, `chat --verbose` and `demo`. Knows `api.proto`, draws nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self, TypeAlias

import grpc

from modelswarm.errors import ModelSwarmError
from modelswarm.protocol import api_pb2, api_pb2_grpc

CALL_SECONDS = 5.0


Route: TypeAlias = tuple[api_pb2.Hop, ...]
"""Head first."""


class SwarmDoorError(ModelSwarmError):
    """The gateway's gRPC door does not answer."""


class SwarmDoor:
    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target)
        self._swarm = api_pb2_grpc.SwarmStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def snapshot(self, timeout: float = CALL_SECONDS) -> api_pb2.Snapshot:
        """What the gateway knows now."""
        try:
            return self._swarm.List(api_pb2.ListRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise SwarmDoorError(
                f"no gateway answers at {self._target} (gRPC): {reason_of(error)}"
            ) from error

    def serves(self, servers: int) -> bool:
        """Whether some model is ready and this many servers are linked; False while nobody answers."""
        try:
            known = self.snapshot()
        except SwarmDoorError:
            return False
        linked = [server for server in known.servers if server.health == "linked"]
        return len(linked) >= servers and any(model.ready for model in known.models)

    def route(self, session: str) -> Route:
        """The hops of a session, head first; empty when it has none now."""
        found = (state for state in self.snapshot().sessions if state.id == session)
        return next((tuple(state.route) for state in found), ())

    def running_route(self) -> Route:
        """The route of the only session that runs a turn now; empty when there is none, or none is settled."""
        running = [state for state in self.snapshot().sessions if state.state == "running"]
        return tuple(running[0].route) if len(running) == 1 else ()


def server_name(peer: str) -> str:
    """`name/incarnation/boot` is shown by its name."""
    return peer.split("/", 1)[0]


def peers_of(hops: Route) -> tuple[str, ...]:
    return tuple(hop.peer for hop in hops)


def route_text(hops: Route) -> str:
    return " -> ".join(f"{server_name(hop.peer)} [{hop.first}:{hop.last}]" for hop in hops)


def reason_of(error: grpc.RpcError) -> str:
    """What the other side, or the channel, says is wrong."""
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else str(error)
