"""Held sessions: those that try again now.

The loss of a block holds all sessions of its model at one moment, so their pauses end at one moment, too. A try plans
a route. Thousands of tries at once would delay the tokens of all other streams, and in one queue the recovery of other
models (I7, isolation). Used by `gateway.py`. Knows no routes.
"""

from __future__ import annotations

from collections import defaultdict
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
    """Let held sessions try again whose pauses are over: as many of each model, the longest due first."""
    due: dict[str, list[Session]] = defaultdict(list)
    for session in sessions:
        if session.state is SessionState.HELD and session.retry_at <= now:
            due[session.model].append(session)
    for held in due.values():
        most = max(1, TRIES_AT_A_TIME // len(due))
        for session in nsmallest(most, held, key=lambda each: each.retry_at):
            recovery.enter_loop(session, now)
