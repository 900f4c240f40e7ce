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

AWAKE_SECONDS = 3 * BUSY_SECONDS
"""What passes at most between two looks at the clock counts: less than any lease, so that none ends by one look; and
not nothing, so that leases end also where a process never gets to look in time. Awake, it looks every BUSY_SECONDS."""

REMEMBERED_PEERS = 1024
"""Generations are kept for so many peers that broke last: a restarted process never comes back as the same peer."""


class Peers:
    def __init__(self, lease_seconds: float) -> None:
        self._own_lease = lease_seconds
        self._looked = -math.inf
        self._still = 0.0  # seconds in which this process stood still
        self._leases: dict[PeerId, float] = {}  # of gateways, as they were started
        self._resigned: set[PeerId] = set()  # gateways that have ended, as they said themselves
        self._up: dict[PeerId, Role] = {}
        self._broken: dict[PeerId, int] = {}
        self._gone: dict[PeerId, float] = {}
        self._targets: dict[PeerId, str] = {}  # of linked gateways
        self._heard: dict[PeerId, float] = {}  # linked gateways, when they last said anything

    def look(self, now: float) -> None:
        """This process looks at the clock, before anything else is done."""
        if self._looked > -math.inf:
            self._still += max(0.0, now - self._looked - AWAKE_SECONDS)
        self._looked = now

    def awake(self, now: float) -> float:
        """A clock that stands still while this process does."""
        return now - self._still

    def connected(
        self, peer: PeerId, role: Role, target: str, lease_seconds: float, now: float
    ) -> None:
        self._up[peer] = role
        if role is Role.GATEWAY:
            self._targets[peer], self._heard[peer] = target, self.awake(now)
            self._leases[peer] = lease_seconds
        self._gone.pop(peer, None)

    def disconnected(self, peer: PeerId, now: float) -> None:
        self._up.pop(peer, None)
        self._targets.pop(peer, None)
        self._heard.pop(peer, None)
        self._gone.setdefault(peer, self.awake(now))
        self._broken[peer] = self._broken.pop(peer, 0) + 1
        if len(self._broken) > REMEMBERED_PEERS:
            del self._broken[next(iter(self._broken))]

    def generation(self, peer: PeerId) -> int:
        return self._broken.get(peer, 0)

    def is_server(self, peer: PeerId) -> bool:
        return self._up.get(peer) is Role.SERVER

    @property
    def gateways(self) -> list[PeerId]:
        """Those that are linked."""
        return [peer for peer, role in self._up.items() if role is Role.GATEWAY]

    def count(self, role: Role) -> int:
        return Counter(self._up.values())[role]

    def is_up(self, peer: PeerId) -> bool:
        return peer in self._up

    def target(self, gateway: PeerId) -> str:
        """Where other gateways reach it, as it said itself; empty when its link is not up."""
        return self._targets.get(gateway, "")

    def heard(self, peer: PeerId, now: float) -> None:
        if peer in self._heard:
            self._heard[peer] = self.awake(now)

    def silent_for(self, gateway: PeerId, now: float) -> float:
        """Seconds without a sign of life: a process that stands still keeps its connections."""
        if gateway in self._resigned:
            return math.inf
        heard = self._heard.get(gateway)
        return max(0.0, self.gone_for(gateway, now) if heard is None else self.awake(now) - heard)

    def lease(self, gateway: PeerId) -> float:
        """For how long its sessions are its own without a sign of life. A gateway counts on the lease that it was
        started with, and an adopter on the one that a server tells it: so the longer of the two."""
        return max(self._own_lease, self._leases.get(gateway, 0.0))

    def lapsed(self, peer: PeerId, now: float) -> bool:
        """Whether it is a gateway whose lease was over when it spoke again just now."""
        return peer in self._leases and self.silent_for(peer, now) >= self.lease(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Its link broke and has not come back."""
        return peer in self._broken and peer not in self._up

    def owns(self, gateway: PeerId, now: float) -> None:
        """`gateway` has a hop here. One whose link is not up (a late message) gets a lease all the same."""
        if gateway not in self._up:
            self._gone.setdefault(gateway, self.awake(now))

    def beat(self, peer: PeerId, draining: bool, now: float) -> None:
        """Renews a lease that runs; one that rests (the link is up) has nothing to renew. A gateway that ends gives up
        what is its own here: it is for whoever comes first, and the gateway will never want it again."""
        if draining and self._up.get(peer) is Role.GATEWAY:
            self._resigned.add(peer)
        if peer in self._gone:
            self._gone[peer] = self.awake(now)

    def gone_for(self, peer: PeerId, now: float) -> float:
        """Seconds since the link to `peer` went; negative while it is up."""
        since = self._gone.get(peer)
        return -1.0 if since is None else self.awake(now) - since

    def forget(self, owners: Collection[PeerId]) -> None:
        """Drop the clocks of peers that own nothing here."""
        for peer in [peer for peer in self._gone if peer not in owners]:
            del self._gone[peer]
        idle = [peer for peer in self._leases if peer not in owners and peer not in self._up]
        for peer in idle:
            del self._leases[peer]
        self._resigned.intersection_update((*owners, *self._up))
