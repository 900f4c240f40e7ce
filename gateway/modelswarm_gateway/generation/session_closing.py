"""Closes a named session before its idle time is over, because its client is done with it. Used by the HTTP API."""

from __future__ import annotations

from modelswarm_gateway.errors import model_not_found
from modelswarm_gateway.generation.named_sessions import wire_name
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere


async def close_session(service: GenerationService, model: str, session_id: str) -> bool:
    """Close the session, which frees its KV. Return False if no running gateway holds it.

    Raise OwnedElsewhere if another gateway holds it; ApiError for an unknown model, or while a turn runs. The name of a
    session is no right to end the stream of its client. A turn whose client has just left gets time to end.
    """
    sessions, key = service.named_sessions, (model, session_id)
    if sessions.has_session(key):
        await service.await_turn_end(key)
        if sessions.is_busy(key):
            raise sessions.busy_error(key)
        sessions.drop_session(key)
        return True
    if service.backend.model_card(model) is None:
        raise model_not_found(model)
    location = await service.backend.find_session(wire_name(key), model)
    if location.is_owner_alive:
        raise OwnedElsewhere(location.owner_target)
    return False
