"""Timers that tell when a heartbeat to a peer is due (R21, failure detection).

Used by the nodes of gateways and servers. Any message to a peer is a sign of life, so a process that sends data needs
no heartbeats for that. Only a heartbeat carries a server's status (free pages, load, steps), so a server also sends one
to a peer that receives data. Pure: time comes in. Does not know the content of a heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

# Interval of a server's heartbeats to a gateway whose sessions run on it, in seconds.
BUSY_SECONDS = 0.1
# Longest interval between heartbeats to a peer without sessions, in seconds.
IDLE_SECONDS = 5.0
# Longest time that a gateway receives data without a heartbeat among them, in seconds.
STATUS_SECONDS = 0.5
# Interval of a gateway's heartbeats to a server on its routes, in seconds.
GATEWAY_BUSY_SECONDS = 1.0
# Shortest lease, in seconds: the lease of a running process must not end between two of its heartbeats (R19, leases).
MIN_LEASE_SECONDS = 4 * BUSY_SECONDS
# Longest lease, in seconds; a Hello that states a longer one is refused.
MAX_LEASE_SECONDS = 86400.0
# A gateway's lease counts on a server up to so many times the server's own, or its sessions could keep pages for a day.
MAX_LEASE_RATIO = 4


def counted_lease(own_seconds: float, stated_seconds: float) -> float:
    """Return the lease that a server counts for a gateway which states `stated_seconds` (R19, leases)."""
    return max(own_seconds, min(stated_seconds, MAX_LEASE_RATIO * own_seconds))


@dataclass(slots=True)
class _Peer:
    last_message: float = -math.inf
    last_heartbeat: float = -math.inf  # the first heartbeat is due at once
    is_busy: bool = False  # at the last look


class HeartbeatTimer:
    def __init__(
        self,
        busy_seconds: float,
        idle_seconds: Callable[[], float],
        status_seconds: float = math.inf,
    ) -> None:
        """`idle_seconds` is called at every look. `status_seconds`: longest time without a heartbeat among the data to
        a busy peer; infinite if heartbeats carry no status."""
        self._busy_seconds = busy_seconds
        self._idle_seconds = idle_seconds
        self._status_seconds = status_seconds
        self._peers: dict[PeerId, _Peer] = {}

    @classmethod
    def for_gateway(cls, lease_seconds: float = 30.0) -> HeartbeatTimer:
        """Heartbeats to servers: every second while our routes run there, every 5 s otherwise.

        The gateway looks every 50 ms. A server only counts leases by them (R19, leases), so an eighth of a lease is
        often enough. Each heartbeat takes some tenths of a millisecond of a server's loop and engine from the rows.
        """
        idle = min(IDLE_SECONDS, lease_seconds / 4)
        return cls(min(GATEWAY_BUSY_SECONDS, lease_seconds / 8), lambda: idle)

    @classmethod
    def for_server(
        cls, jitter: Callable[[], float], busy_seconds: float = BUSY_SECONDS
    ) -> HeartbeatTimer:
        """Heartbeats to gateways: every 100 ms while their sessions run here, every 5 s otherwise.

        The server looks every BUSY_SECONDS, so a heartbeat that would be late at the next look is due now. Where data
        flow, a heartbeat goes every half second, for its status. `jitter` returns numbers in [0, 1): it keeps idle
        heartbeats of many servers apart.
        """
        early = BUSY_SECONDS / 2
        return cls(
            busy_seconds - early,
            lambda: IDLE_SECONDS * (0.75 + 0.25 * jitter()),
            max(STATUS_SECONDS, busy_seconds) - early,
        )

    @property
    def peers(self) -> list[PeerId]:
        return list(self._peers)

    def on_peer_connected(self, peer: PeerId) -> None:
        self._peers[peer] = _Peer()

    def on_peer_lost(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)

    def on_sent(self, peer: PeerId, now: float) -> None:
        if state := self._peers.get(peer):
            state.last_message = now

    def take_due(self, now: float, busy: Collection[PeerId]) -> list[PeerId]:
        """Return the peers that are due a heartbeat, and count it as sent. `busy`: peers that share routes with us."""
        idle = self._idle_seconds()
        found = []
        for peer, state in self._peers.items():
            became_idle, state.is_busy = state.is_busy and peer not in busy, peer in busy
            if self._is_due(state, now, idle, became_idle):
                state.last_message = state.last_heartbeat = now
                found.append(peer)
        return found

    def _is_due(self, state: _Peer, now: float, idle: float, became_idle: bool) -> bool:
        """`became_idle`: since the last look, so the last status that the peer has still shows the load."""
        if now - state.last_message >= (self._busy_seconds if state.is_busy else idle):
            return True
        if math.isinf(self._status_seconds):
            return False
        interval = self._status_seconds if state.is_busy else idle
        return became_idle or now - state.last_heartbeat >= interval
