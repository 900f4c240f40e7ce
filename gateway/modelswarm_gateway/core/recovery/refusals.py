"""Why a session cannot run now: what a server's refusal means for it, and what its client is told.

Used by the loop (`recovery.py`) and for views. Decides neither whether a session waits nor for how long.
"""

from __future__ import annotations

from modelswarm.placement.spans import format_blocks
from modelswarm.protocol.messages import Refusal
from modelswarm_gateway.core.interface.turn import Why
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.sessions.session import Session

_MEANING = {
    Refusal.NO_PAGES: Why.NO_ROOM,
    Refusal.TOO_LONG: Why.TOO_LONG,
    Refusal.DRAINING: Why.NO_SERVERS,  # room would not help: its KV elsewhere is worth keeping
    Refusal.WRONG_BLOCKS: Why.NO_SERVERS,
}


def meaning(refusal: Refusal) -> Why:
    return _MEANING[refusal]


def detail(registry: ServerRegistry, session: Session, why: Why) -> str:
    model = session.model
    if why is Why.TOO_LONG:
        return f"{session.turn.reserved_positions} positions are more than a server of {model} can ever hold"
    if why is Why.NO_ROOM:
        return (
            f"no free KV for {session.turn.reserved_positions} positions on the servers of {model}"
        )
    if why is Why.FAULTS:
        last = f": the last route ended with {session.trouble}" if session.trouble else ""
        return f"no token in {session.loops} attempts{last}"
    if missing := registry.uncovered_blocks(model):
        return f"no server holds block{'s' if len(missing) != 1 else ''} {format_blocks(missing)} of {model}"
    if leaving := registry.uncovered_blocks(
        model, without=registry.drains.peers_with(SHUTDOWN_CAUSE)
    ):
        return f"the servers of {model} for blocks {format_blocks(leaving)} are about to stop"
    return f"the servers of {model} do not answer"
