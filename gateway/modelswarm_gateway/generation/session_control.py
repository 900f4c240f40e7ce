"""Opens, describes and closes a named session for its client, outside of its turns. Used by both APIs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from modelswarm.protocol.identity import name_of
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn, Reservation
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.errors import ApiError, Code, invalid_field
from modelswarm_gateway.generation.continuation import session_exists
from modelswarm_gateway.generation.named_sessions import SessionKey
from modelswarm_gateway.generation.request import GenerationRequest, Prompt, TokenPrompt
from modelswarm_gateway.generation.rows.block_ranges import placeholder
from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.generation.session_locator import OwnedElsewhere
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

# The one entry of a session that was opened and has had no turn: a hop needs a row to run. The first turn replaces it.
PLACE_HOLDER = TokenPrompt((0,))


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as its client may see it: servers by name, no addresses, nothing of other sessions."""

    view: SessionView
    kept: ParkedTurn | None
    seconds_left: float | None  # until it is dropped; None during a turn

    def describe(self, key: SessionKey) -> dict[str, object]:
        """Return the JSON object of the session."""
        turn = None if self.kept is None else self.kept.turn
        is_empty = self.kept is None or self.kept.is_empty
        expires = None if self.seconds_left is None else round(time.time() + self.seconds_left)
        hops = [
            {"server": name_of(hop.peer), "first": hop.first, "last": hop.last}
            for hop in self.view.route
        ]
        return {
            "id": key[1],
            "object": "session",
            "model": key[0],
            "state": self.view.state,
            "position": 0 if is_empty else self.view.length,
            "max_length": turn.session_length or None if turn else None,
            "ttl": turn.session_ttl or None if turn else None,
            "expires_at": expires,
            "epoch": self.view.epoch.counter,
            "reroutes": self.view.reroutes,
            "route": hops,
        }


async def open_session(service: GenerationService, key: SessionKey, wanted: Reservation) -> None:
    """Open a session and reserve all its positions on every server of its route. Raise ApiError.

    No room is refused before any token: the servers run one row, which only holds the place.
    """
    model, session_id = key
    card = service.backend.model_card(model)
    if card is not None and wanted.max_length > card.max_length > 0:
        detail = f"the context of {model!r} has {card.max_length} positions"
        raise invalid_field("max_length", f"{wanted.max_length} is too many; {detail}")
    holder: Prompt = PLACE_HOLDER
    if wanted.blocks is not None and card is not None:
        holder = placeholder(card)
    request = GenerationRequest(
        model, holder, "max_length", SamplingOptions(max_tokens=0), session_id=session_id,
        reservation=wanted, blocks=wanted.blocks,
    )  # fmt: skip
    try:
        await _run_first_turn(service, request, key, wanted.ttl)
    except ApiError as error:
        if error.code is Code.CONTEXT_LENGTH:
            raise invalid_field("max_length", f"{error.message}") from error
        raise


async def fork_session(
    service: GenerationService, key: SessionKey, new: SessionKey, position: int | None
) -> bool:
    """Open the session `new` with the log of another one, or its first `position` entries (R15, forks).

    Return False if that session is nowhere. It is taken over first if its gateway was lost. Raise OwnedElsewhere if
    another gateway holds it; ApiError for an unknown model, while a turn runs, or if the log is shorter.
    """
    sessions = service.named_sessions
    await service.locate_session(key)
    if not sessions.has_session(key):
        return False
    await service.await_turn_end(key)
    if sessions.is_busy(key):
        raise sessions.busy_error(key)
    kept = service.backend.parked_turn(sessions.session_name(key))
    if kept is not None and kept.turn.blocks is not None:
        detail = "a session of blocks is not forked; open another one, and send it the rows"
        raise invalid_field("session_id", detail)
    log = () if kept is None or kept.is_empty else kept.tokens
    length = len(log) if position is None else position
    if kept is None or not 0 < length <= len(log):
        detail = f"position: {length}; allowed: 1 to the number of entries, {len(log)}"
        raise ApiError(Code.SESSION_LOST, detail, param="position")
    request = GenerationRequest(
        key[0], TokenPrompt(log[:length]), "position", SamplingOptions(max_tokens=0),
        session_id=new[1], parent_id=key[1],
    )  # fmt: skip
    await _run_first_turn(service, request, new, kept.turn.session_ttl)
    return True


async def _run_first_turn(
    service: GenerationService, request: GenerationRequest, key: SessionKey, ttl: int
) -> None:
    """Run a turn that generates nothing in a new session, and keep the session for `ttl` seconds between turns."""
    try:
        generation = await service.start_generation(request)
    except OwnedElsewhere as elsewhere:
        raise session_exists() from elsewhere
    try:
        finish = None
        while finish is None:
            chunk = await generation.next_chunk(service.keepalive_seconds(key[0]))
            finish = None if chunk is None else chunk.finish
        service.named_sessions.set_ttl(key, ttl)
    finally:
        generation.close()


async def session_state(service: GenerationService, key: SessionKey) -> SessionState | None:
    """Return the state of a session; None if no running gateway holds it. Raise ApiError or OwnedElsewhere."""
    kept = kept_view(service, key)
    location = None
    if kept is None or not (kept.is_reachable or service.named_sessions.is_busy(key)):
        location = await check_elsewhere(service, key)
        kept = kept_view(service, key)  # the core releases a session that ran elsewhere since
    if kept is not None and (location is None or location.last_started <= kept.newest_run_epoch):
        log = service.backend.parked_turn(kept.session)
        return SessionState(kept, log, service.named_sessions.seconds_left(key))
    if location is not None and location.log_holders:
        detail = "the gateway of this session was lost; the session's next turn takes it over"
        raise ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
    return None


async def attach_session(service: GenerationService, key: SessionKey) -> SessionState:
    """Return the state of a session, which is taken over first if its gateway was lost.

    Raise OwnedElsewhere if another running gateway holds it, ApiError if it is gone.
    """
    await service.locate_session(key)
    found = await session_state(service, key)
    if found is None:
        raise session_not_found(key)
    return found


def session_not_found(key: SessionKey) -> ApiError:
    detail = f"no gateway holds a session {key[1][:80]!r} of {key[0]!r}"
    return ApiError(Code.NOT_FOUND, detail, param="session_id")


def owner_not_reached() -> ApiError:
    detail = (
        "the gateway that holds this session cannot be reached; it drops idle sessions by itself"
    )
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


async def close_session(service: GenerationService, key: SessionKey) -> bool:
    """Close the session, which frees its KV. Return False if no running gateway holds it.

    Raise OwnedElsewhere if another gateway holds it; ApiError for an unknown model, or while a turn runs. The name of a
    session is no right to end the stream of its client. A turn whose client has just left gets time to end.
    """
    sessions = service.named_sessions
    if sessions.has_session(key):
        await service.await_turn_end(key)
        if sessions.is_busy(key):
            raise sessions.busy_error(key)
        kept = kept_view(service, key)
        try:
            if kept is None or not kept.is_reachable:
                await check_elsewhere(service, key)
        finally:
            has_begun = sessions.is_busy(key)  # another turn, meanwhile
            if not has_begun:
                sessions.drop_session(key)
        if has_begun:
            raise sessions.busy_error(key)
        return kept is not None
    await check_elsewhere(service, key)
    return False


def kept_view(service: GenerationService, key: SessionKey) -> SessionView | None:
    """Return the session as this gateway keeps it; another one may have taken it over if it is not reachable."""
    sessions = service.named_sessions
    return (
        service.backend.session(sessions.session_name(key)) if sessions.has_session(key) else None
    )


async def check_elsewhere(service: GenerationService, key: SessionKey) -> SessionLocation:
    """Return what the servers know of a session that is not here.

    Raise OwnedElsewhere if another running gateway holds it, ApiError for a model that is unknown, or unknown as yet.
    """
    service.find_card(key[0])
    location = await service.find_session(key)
    if location.is_owner_alive:
        raise OwnedElsewhere(location.owner_target)
    return location
