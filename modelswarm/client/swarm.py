"""What the gateway knows, by its gRPC door: servers, spans, health and sessions.

Used by `LocalSwarm` while it starts, and by `status`, `drain`, `routes`, `chat --verbose` and `demo`; draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

CALL_TIMEOUT_SECONDS = 5.0


Route: TypeAlias = tuple[api_pb2.Hop, ...]
"""Head first."""


class SwarmClientError(ModelSwarmError):
    """The gateway's gRPC door does not answer."""


class DrainTimeoutError(ModelSwarmError):
    """Sessions are still on their way."""


class SwarmClient:
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

    def fetch_snapshot(self, timeout: float = CALL_TIMEOUT_SECONDS) -> api_pb2.Snapshot:
        """What the gateway knows now."""
        try:
            return self._swarm.List(api_pb2.ListRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise SwarmClientError(
                f"no gateway answers at {self._target} (gRPC): {error_details(error)}"
            ) from error

    def is_serving(self, servers: int) -> bool:
        """Whether some model is ready and this many servers are linked; False while nobody answers."""
        try:
            known = self.fetch_snapshot()
        except SwarmClientError:
            return False
        linked = [server for server in known.servers if server.health == "linked"]
        return len(linked) >= servers and any(model.ready for model in known.models)

    def drain_server(
        self, server: str, *, undo: bool = False, wait: float = 0.0, timeout: float = CALL_TIMEOUT_SECONDS
    ) -> Iterator[api_pb2.DrainState]:
        """Has the gateway's sessions leave a server; how far they are, until none is there. See `api.proto`."""
        request = api_pb2.DrainRequest(server=server, undo=undo, wait_seconds=wait)
        try:
            yield from self._swarm.Drain(request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate_error(error, "SERVER") from error

    def explain_routes(self, model: str = "", timeout: float = CALL_TIMEOUT_SECONDS) -> api_pb2.RoutesReply:
        """What servers cost and why sessions have their routes; of one model, or of all."""
        try:
            return self._swarm.Routes(api_pb2.RoutesRequest(model=model), timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate_error(error, "--model") from error

    def _translate_error(self, error: grpc.RpcError, named: str) -> ModelSwarmError:
        code, said = error.code(), error_details(error)
        if code is grpc.StatusCode.NOT_FOUND:
            return UserError(named, said)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ModelSwarmError(said)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DrainTimeoutError("the time is up")
        return SwarmClientError(f"no gateway answers at {self._target} (gRPC): {said}")

    def fetch_route(self, session: str) -> Route:
        """The hops of a session, head first; empty when it has none now."""
        found = (state for state in self.fetch_snapshot().sessions if state.id == session)
        return next((tuple(state.route) for state in found), ())

    def fetch_running_route(self) -> Route:
        """The route of the only session that runs a turn now; empty when there is none, or none is settled."""
        running = [state for state in self.fetch_snapshot().sessions if state.state == "running"]
        return tuple(running[0].route) if len(running) == 1 else ()


def route_peers(hops: Route) -> tuple[str, ...]:
    return tuple(hop.peer for hop in hops)


def format_route(hops: Route) -> str:
    return " -> ".join(f"{name_of(hop.peer)} [{hop.first}:{hop.last}]" for hop in hops)


def error_details(error: grpc.RpcError) -> str:
    """What the other side, or the channel, says is wrong."""
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else str(error)
