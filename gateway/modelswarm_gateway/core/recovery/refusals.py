"""Refusal reasons of sessions, and the messages that explain them to clients.

Used by the recovery loop and for views. Decides neither whether a session is held nor for how long.
"""

from __future__ import annotations

from modelswarm.placement.spans import format_blocks
from modelswarm.protocol.messages import Refusal
from modelswarm_gateway.core.interface.row_sizes import BLOCK_ROWS_SINCE
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.sessions.session import Session

REASONS = {  # of a session that a server refused
    Refusal.NO_PAGES: RefusalReason.NO_ROOM,
    Refusal.TOO_LONG: RefusalReason.TOO_LONG,
    # More room would not help: the session's KV on other servers is worth keeping.
    Refusal.DRAINING: RefusalReason.NO_SERVERS,
    Refusal.WRONG_BLOCKS: RefusalReason.NO_SERVERS,
    Refusal.NO_ADAPTER: RefusalReason.NO_SERVERS,
}

RETRY_SECONDS = 1.0
DEVICE_RETRY_SECONDS = 10.0  # for so long a server whose device was full admits no new work


def retry_seconds(session: Session, reason: RefusalReason) -> float:
    """Return the seconds after which the turn may be tried again."""
    is_pause = reason is RefusalReason.NO_ROOM and not session.crowded
    return DEVICE_RETRY_SECONDS if is_pause else RETRY_SECONDS


def explain_refusal(registry: ServerRegistry, session: Session, reason: RefusalReason) -> str:
    """Return the message for the client."""
    model, needed = session.model, session.turn.reserved_positions
    if reason is RefusalReason.TOO_LONG:
        return f"{needed} positions are more than a server of {model} can ever hold"
    if reason is RefusalReason.NO_ROOM and not session.crowded:
        return f"a device of the servers of {model} was full, so they start no new work for some seconds"
    if reason is RefusalReason.NO_ROOM:
        room = session.most_room
        is_known = not session.has_run and room is not None and room < needed
        fits = f"; at most {room} fit now" if is_known else ""
        return f"no free KV for {needed} positions on the servers of {model}{fits}"
    if reason is RefusalReason.FAULTS:
        last = f": the last route ended with {session.last_fault}" if session.last_fault else ""
        return f"no token in {session.attempts} attempts{last}"
    if missing := registry.uncovered_blocks(model):
        return f"no server holds block{'s' if len(missing) != 1 else ''} {format_blocks(missing)} of {model}"
    if stopping := registry.uncovered_blocks(
        model, without=registry.drains.peers_with(SHUTDOWN_CAUSE)
    ):
        return f"the servers of {model} for blocks {format_blocks(stopping)} are about to stop"
    if session.turn.prompt_rows and registry.older_than(model, BLOCK_ROWS_SINCE):
        return (
            f"the servers of {model} that know rows of blocks (version 2.4) do not hold all blocks"
        )
    tails = [hello for hello in registry.hellos_of(model) if hello.last == hello.n_blocks]
    if session.turn.sampling.grammar is not None and not any(tail.grammar for tail in tails):
        return f"no server of {model} that samples can hold an answer to a grammar now"
    return f"the servers of {model} do not answer"
