"""Costs of servers and reasons of routes as messages of api.proto. Used by the Swarm service."""

from __future__ import annotations

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.admin.swarm_state import check_model
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.explain import HopExplanation, ServerCost, SessionExplanation


def explain_routes(backend: SessionBackend, model: str) -> api_pb2.RoutesReply:
    """Return the costs and routes of `model`; of all models if it is empty. Raise ApiError for an unknown model."""
    check_model(backend, model)
    found = backend.explain_routes(model)
    return api_pb2.RoutesReply(
        servers=[_server(server) for server in found.servers],
        sessions=[_session(session) for session in found.sessions],
    )


def _server(cost: ServerCost) -> api_pb2.ServerCost:
    return api_pb2.ServerCost(
        peer=cost.peer,
        model=cost.model,
        first=cost.first,
        last=cost.last,
        zone=cost.zone,
        block_ms=cost.block_ms,
        hop_ms=cost.hop_ms,
        wait_ms=cost.wait_ms,
        rtt_ms=cost.rtt_ms,
        load=cost.load,
        score=cost.score,
        state=cost.state,
    )


def _session(reason: SessionExplanation) -> api_pb2.RouteReason:
    return api_pb2.RouteReason(
        id=reason.session,
        model=reason.model,
        state=reason.state,
        hops=[_hop(hop) for hop in reason.hops],
        cost_ms=reason.cost_ms,
        best_ms=reason.best_ms,
        best=[api_pb2.Hop(peer=hop.peer, first=hop.first, last=hop.last) for hop in reason.best],
    )


def _hop(hop: HopExplanation) -> api_pb2.HopReason:
    made = api_pb2.HopReason(peer=hop.peer, first=hop.first, last=hop.last)
    if hop.route_hop is not None:
        made.chosen_ms, made.best_ms = hop.route_hop.cost_to_go_ms, hop.route_hop.best_ms
        made.best, made.options = hop.route_hop.best_peer, hop.route_hop.options
    return made
