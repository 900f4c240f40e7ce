"""Held sessions: those that try again now.

The loss of a block holds all sessions of its model at one moment, so their pauses end at one moment, too. A try plans
a route. Thousands of tries at once would delay the tokens of all other streams (I7, isolation). Used by `gateway.py`.
Knows no routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Session, SessionState

# Number of held sessions that try again at a time; the others follow at the next ticks.
TRIES_AT_A_TIME = 32


def wake_held(sessions: Iterable[Session], now: float, reason: RefusalReason | None = None) -> None:
    """End the pauses of held sessions; with a `reason` only of those that are held for it."""
    for session in sessions:
        if session.state is SessionState.HELD and reason in (None, session.refusal):
            session.retry_at = min(session.retry_at, now)


def retry_held(recovery: Recovery, sessions: Iterable[Session], now: float) -> None:
    """Let held sessions try again whose pauses are over, those first that are due for longest."""
    due = [s for s in sessions if s.state is SessionState.HELD and s.retry_at <= now]
    for session in nsmallest(TRIES_AT_A_TIME, due, key=lambda each: each.retry_at):
        recovery.enter_loop(session, now)
