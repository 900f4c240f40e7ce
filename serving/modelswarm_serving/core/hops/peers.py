"""Which processes have a link here, how often each pair broke, and since when a gateway is gone (R5, R19).

Used by `server.py`. Knows nothing of sessions. Times in which this process itself stood still count for no gateway:
what it said meanwhile is still to be read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from modelswarm.protocol.heartbeat import BUSY_SECONDS
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Role

MAX_TICK_SECONDS = 3 * BUSY_SECONDS
"""What passes at most between two looks at the clock counts: less than any lease, so that none ends by one look; and
not nothing, so that leases end also where a process never gets to look in time. Awake, it looks every BUSY_SECONDS."""

MAX_BROKEN_PEERS = 1024
"""Generations are kept for so many peers that broke last: a restarted process never comes back as the same peer."""


class Peers:
    def __init__(self, lease_seconds: float) -> None:
        self._own_lease = lease_seconds
        self._last_tick = -math.inf
        self._stalled = 0.0  # seconds in which this process stood still
        self._leases: dict[PeerId, float] = {}  # of gateways, as they were started
        self._resigned: set[PeerId] = set()  # gateways that have ended, as they said themselves
        self._linked: dict[PeerId, Role] = {}
        self._break_counts: dict[PeerId, int] = {}
        self._gone_since: dict[PeerId, float] = {}
        self._targets: dict[PeerId, str] = {}  # of linked gateways
        self._last_heard: dict[PeerId, float] = {}  # linked gateways, when they last said anything

    def advance_clock(self, now: float) -> None:
        """This process looks at the clock, before anything else is done."""
        if self._last_tick > -math.inf:
            self._stalled += max(0.0, now - self._last_tick - MAX_TICK_SECONDS)
        self._last_tick = now

    def elapsed(self, now: float) -> float:
        """A clock that stands still while this process does."""
        return now - self._stalled

    def on_peer_connected(
        self, peer: PeerId, role: Role, target: str, lease_seconds: float, now: float
    ) -> None:
        self._linked[peer] = role
        if role is Role.GATEWAY:
            self._targets[peer], self._last_heard[peer] = target, self.elapsed(now)
            self._leases[peer] = lease_seconds
        self._gone_since.pop(peer, None)

    def on_peer_lost(self, peer: PeerId, now: float) -> None:
        self._linked.pop(peer, None)
        self._targets.pop(peer, None)
        self._last_heard.pop(peer, None)
        self._gone_since.setdefault(peer, self.elapsed(now))
        self._break_counts[peer] = self._break_counts.pop(peer, 0) + 1
        if len(self._break_counts) > MAX_BROKEN_PEERS:
            del self._break_counts[next(iter(self._break_counts))]

    def generation(self, peer: PeerId) -> int:
        return self._break_counts.get(peer, 0)

    def is_server(self, peer: PeerId) -> bool:
        return self._linked.get(peer) is Role.SERVER

    @property
    def gateways(self) -> list[PeerId]:
        """Those that are linked."""
        return [peer for peer, role in self._linked.items() if role is Role.GATEWAY]

    def linked_count(self, role: Role) -> int:
        return Counter(self._linked.values())[role]

    def is_linked(self, peer: PeerId) -> bool:
        return peer in self._linked

    def target_of(self, gateway: PeerId) -> str:
        """Where other gateways reach it, as it said itself; empty when its link is not up."""
        return self._targets.get(gateway, "")

    def on_message(self, peer: PeerId, now: float) -> None:
        if peer in self._last_heard:
            self._last_heard[peer] = self.elapsed(now)

    def silent_seconds(self, gateway: PeerId, now: float) -> float:
        """Seconds without a sign of life: a process that stands still keeps its connections."""
        if gateway in self._resigned:
            return math.inf
        heard = self._last_heard.get(gateway)
        return max(
            0.0, self.gone_seconds(gateway, now) if heard is None else self.elapsed(now) - heard
        )

    def lease_seconds(self, gateway: PeerId) -> float:
        """For how long its sessions are its own without a sign of life. A gateway counts on the lease that it was
        started with, and an adopter on the one that a server tells it: so the longer of the two."""
        return max(self._own_lease, self._leases.get(gateway, 0.0))

    def has_lapsed(self, peer: PeerId, now: float) -> bool:
        """Whether it is a gateway whose lease was over when it spoke again just now."""
        return peer in self._leases and self.silent_seconds(peer, now) >= self.lease_seconds(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Its link broke and has not come back."""
        return peer in self._break_counts and peer not in self._linked

    def start_lease(self, gateway: PeerId, now: float) -> None:
        """`gateway` has a hop here. One whose link is not up (a late message) gets a lease all the same."""
        if gateway not in self._linked:
            self._gone_since.setdefault(gateway, self.elapsed(now))

    def on_heartbeat(self, peer: PeerId, draining: bool, now: float) -> None:
        """Renews a lease that runs; one that rests (the link is up) has nothing to renew. A gateway that ends gives up
        what is its own here: it is for whoever comes first, and the gateway will never want it again."""
        if draining and self._linked.get(peer) is Role.GATEWAY:
            self._resigned.add(peer)
        if peer in self._gone_since:
            self._gone_since[peer] = self.elapsed(now)

    def gone_seconds(self, peer: PeerId, now: float) -> float:
        """Seconds since the link to `peer` went; negative while it is up."""
        since = self._gone_since.get(peer)
        return -1.0 if since is None else self.elapsed(now) - since

    def keep_owners(self, owners: Collection[PeerId]) -> None:
        """Drop the clocks of peers that own nothing here."""
        for peer in [peer for peer in self._gone_since if peer not in owners]:
            del self._gone_since[peer]
        idle = [peer for peer in self._leases if peer not in owners and peer not in self._linked]
        for peer in idle:
            del self._leases[peer]
        self._resigned.intersection_update((*owners, *self._linked))
