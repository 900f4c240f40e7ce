"""What follows when a session was overdue and all its hops have answered: who is blamed, and what that means (R5).

Called by the loop before Go. Reads counters by `blame.py`; tells the registry, which counts.
"""

from __future__ import annotations

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.recovery.fault_attribution import Witness, blame
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.sessions.session import Session

APART = 0.5  # seconds: what several sessions find within them is one failure of a link


def judge(session: Session, registry: ServerRegistry, now: float) -> set[PeerId]:
    """The servers that the session is to do without, if it can."""
    epoch, session.overdue = session.overdue, None
    if epoch is None:
        return set()
    found = blame(
        [
            Witness(hop.peer, hop.counters, not registry.health.step_times(hop.peer).is_progressing(now))
            for hop in session.hops
        ],
        epoch,
        session.length,
    )
    if found is None:
        return set()
    if len(found.peers) == 2:
        # failures count as seen from one end: first a lost token, then a lost window is the same link seen by us
        one, other = sorted(found.peers)
        registry.on_link_failed(one, other, -1 - int(now / APART), now)
        return set()
    registry.eject(found.peers[0], "overdue", now)
    return set(found.peers)
