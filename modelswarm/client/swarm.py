"""Client of the gateway's admin API, the gRPC service Swarm: servers, spans, health, sessions, routes and drains.

Used by `LocalSwarm` while it starts, and by `status`, `drain`, `routes`, `chat --verbose` and `demo`. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self, TypeAlias

import grpc

from modelswarm.errors import ModelSwarmError, UnreachableError, UserError
from modelswarm.process.socket_options import WITHOUT_PROXY
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

CALL_TIMEOUT_SECONDS = 5.0
# A snapshot names each session with its route: thousands of them exceed the 4 MiB that gRPC takes by itself.
_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), WITHOUT_PROXY)

Route: TypeAlias = tuple[api_pb2.Hop, ...]
"""The hops of a session, head first."""


class SwarmClientError(UnreachableError):
    """The gateway does not answer gRPC calls."""


class DrainTimeoutError(ModelSwarmError):
    """The server still had sessions when the time was up."""


class SwarmClient:
    def __init__(self, target: str) -> None:
        self._target = target
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._swarm = api_pb2_grpc.SwarmStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def fetch_snapshot(self, timeout: float = CALL_TIMEOUT_SECONDS) -> api_pb2.Snapshot:
        """Return the gateway's present view of models, servers and sessions."""
        try:
            return self._swarm.List(api_pb2.ListRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise self._unreachable(error) from error

    def drain_server(
        self,
        server: str,
        *,
        undo: bool = False,
        wait: float = 0.0,
        timeout: float = CALL_TIMEOUT_SECONDS,
    ) -> Iterator[api_pb2.DrainProgress]:
        """Drain a server, or undo that; yields the progress until no session is left. See `api.proto`."""
        request = api_pb2.DrainRequest(server=server, undo=undo, wait_seconds=wait)
        try:
            yield from self._swarm.Drain(request, timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate_error(error, "SERVER") from error

    def explain_routes(
        self, model: str = "", timeout: float = CALL_TIMEOUT_SECONDS
    ) -> api_pb2.RoutesReply:
        """Return the cost of each server and the reason for each session's route; of one model, or of all."""
        try:
            return self._swarm.Routes(api_pb2.RoutesRequest(model=model), timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate_error(error, "--model") from error

    def _translate_error(self, error: grpc.RpcError, named: str) -> ModelSwarmError:
        code, details = error.code(), error_details(error)
        if code is grpc.StatusCode.NOT_FOUND:
            return UserError(named, details)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            return ModelSwarmError(details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DrainTimeoutError("the time is up")
        return self._unreachable(error)

    def _unreachable(self, error: grpc.RpcError) -> ModelSwarmError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ModelSwarmError(
                f"{self._target} is a gRPC port without the admin API; "
                "allowed: the gateway's admin port, by default port 8003 (--admin)"
            )
        message = f"no gateway answers at {self._target} (gRPC): {error_details(error)}"
        return SwarmClientError(message, self._target, "gRPC")

    def fetch_running_route(self) -> Route:
        """Return the route of the only session that runs a turn now; empty unless exactly one does and has a route."""
        running = [state for state in self.fetch_snapshot().sessions if state.state == "running"]
        return tuple(running[0].route) if len(running) == 1 else ()


def route_peers(hops: Route) -> tuple[str, ...]:
    """Return the peers of a route, head first."""
    return tuple(hop.peer for hop in hops)


def format_route(hops: Route) -> str:
    """Return a route as `a [0:4] -> b [4:8]`."""
    return " -> ".join(f"{name_of(hop.peer)} [{hop.first}:{hop.last}]" for hop in hops)


def error_details(error: grpc.RpcError) -> str:
    """Return the cause that the gateway, or the channel, gives for a failed call."""
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else str(error)
