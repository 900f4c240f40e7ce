"""Linked processes, link generations, and the leases of gateways (R5: link faults, R19: leases).

Used by `server.py` and `fencing.py`. Time in which this process was stalled does not count against a gateway, because
its messages of that time are still unread. Knows nothing of sessions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from modelswarm.protocol.heartbeat import BUSY_SECONDS, counted_lease
from modelswarm.protocol.identity import NO_GATEWAY, PeerId
from modelswarm.protocol.messages import Role

MAX_TICK_SECONDS = 3 * BUSY_SECONDS
"""Seconds that count at most between two readings of the clock; a running process reads it every BUSY_SECONDS. Less
than any lease, so that no lease expires by one reading. More than 0, so that leases also expire where every reading
is late."""

MAX_BROKEN_PEERS = 1024
"""Generations are kept for this many peers, those lost last: a restarted process never returns as the same peer."""

MAX_ENDED_GATEWAYS = 1024
"""Ended gateways are remembered up to this number, those named last. Their leases would otherwise run again."""


class Peers:
    def __init__(self, lease_seconds: float) -> None:
        self._own_lease = lease_seconds
        self._last_tick = -math.inf
        self._stalled = 0.0  # seconds
        self._leases: dict[PeerId, float] = {}  # seconds, as each gateway stated
        self._resigned: set[PeerId] = set()  # gateways that announced their end
        self._ended: dict[PeerId, None] = {}  # gateways that their successors named, oldest first
        self._linked: dict[PeerId, Role] = {}
        self._break_counts: dict[PeerId, int] = {}
        self._gone_since: dict[PeerId, float] = {}
        self._targets: dict[PeerId, str] = {}  # of linked gateways
        self._last_message_at: dict[PeerId, float] = {}  # linked gateways, time of the last message

    def advance_clock(self, now: float) -> None:
        """Read the clock; called before everything else."""
        if self._last_tick > -math.inf:
            self._stalled += max(0.0, now - self._last_tick - MAX_TICK_SECONDS)
        self._last_tick = now

    def elapsed(self, now: float) -> float:
        """Return the time of a clock that does not advance while this process is stalled."""
        return now - self._stalled

    def add_link(
        self, peer: PeerId, role: Role, target: str, lease_seconds: float, now: float
    ) -> None:
        self._linked[peer] = role
        if role is Role.GATEWAY:
            self._targets[peer], self._last_message_at[peer] = target, self.elapsed(now)
            self._leases[peer] = lease_seconds
        self._gone_since.pop(peer, None)

    def remove_link(self, peer: PeerId, now: float) -> None:
        self._linked.pop(peer, None)
        self._targets.pop(peer, None)
        self._last_message_at.pop(peer, None)
        self._gone_since.setdefault(peer, self.elapsed(now))
        self._break_counts[peer] = self._break_counts.pop(peer, 0) + 1
        if len(self._break_counts) > MAX_BROKEN_PEERS:
            del self._break_counts[next(iter(self._break_counts))]

    def mark_ended(self, gateway: PeerId) -> None:
        """Record that the process of a gateway has ended, as its successor says: its lease is over."""
        self._ended.pop(gateway, None)
        self._ended[gateway] = None
        if len(self._ended) > MAX_ENDED_GATEWAYS:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, peer: PeerId) -> bool:
        """True if the process of `peer` has ended; its link may still deliver what it had sent."""
        return peer in self._ended

    def generation(self, peer: PeerId) -> int:
        return self._break_counts.get(peer, 0)

    def is_server(self, peer: PeerId) -> bool:
        return self._linked.get(peer) is Role.SERVER

    @property
    def gateways(self) -> list[PeerId]:
        """The linked gateways."""
        return [peer for peer, role in self._linked.items() if role is Role.GATEWAY]

    def linked_count(self, role: Role) -> int:
        return Counter(self._linked.values())[role]

    def is_linked(self, peer: PeerId) -> bool:
        """True if the link is up and its process is not known to have ended."""
        return peer in self._linked and peer not in self._ended

    def target_of(self, gateway: PeerId) -> str:
        """Return the address where other gateways reach it; empty when its link is down."""
        return self._targets.get(gateway, "")

    def on_message(self, peer: PeerId, now: float) -> None:
        if peer in self._last_message_at:
            self._last_message_at[peer] = self.elapsed(now)

    def silent_seconds(self, gateway: PeerId, now: float) -> float:
        """Return `unheard_seconds`; infinite for a gateway that gave up its hops or has ended."""
        if gateway in self._resigned or gateway in self._ended:
            return math.inf
        return self.unheard_seconds(gateway, now)

    def unheard_seconds(self, gateway: PeerId, now: float) -> float:
        """Return the seconds since the last message; without a link, since the link broke.

        Links are not enough, as a stalled process keeps them.
        """
        last_message_at = self._last_message_at.get(gateway)
        return max(
            0.0,
            self.gone_seconds(gateway, now)
            if last_message_at is None
            else self.elapsed(now) - last_message_at,
        )

    def lease_seconds(self, gateway: PeerId) -> float:
        """Return the lease of a gateway: the seconds of silence during which it keeps its sessions.

        A gateway relies on the lease it was started with, another gateway on the lease this server states. So the
        longer of the two counts, up to four times this server's own.
        """
        return counted_lease(self._own_lease, self._leases.get(gateway, 0.0))

    def has_lapsed(self, peer: PeerId, now: float) -> bool:
        """True for a gateway whose lease expired before the message that just came."""
        return peer in self._leases and self.silent_seconds(peer, now) >= self.lease_seconds(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """True if its link broke and has not come back, or for NO_GATEWAY."""
        return peer not in self._linked and (peer == NO_GATEWAY or peer in self._break_counts)

    def start_lease(self, gateway: PeerId, now: float) -> None:
        """Start the lease of a gateway that owns a hop but has no link (its message came late)."""
        if gateway not in self._linked:
            self._gone_since.setdefault(gateway, self.elapsed(now))

    def on_heartbeat(self, peer: PeerId, draining: bool, now: float) -> None:
        """Renew a running lease; while the link is up, no lease runs.

        A draining gateway gives up its hops here for good: the first gateway that claims them gets them.
        """
        if draining and self._linked.get(peer) is Role.GATEWAY:
            self._resigned.add(peer)
        if peer in self._gone_since:
            self._gone_since[peer] = self.elapsed(now)

    def on_relinquished(self, now: float) -> None:
        """Record that a hop was left without an owner. All such hops are those of one gateway that ended."""
        self._resigned.add(NO_GATEWAY)
        self._gone_since.setdefault(NO_GATEWAY, self.elapsed(now))

    def gone_seconds(self, peer: PeerId, now: float) -> float:
        """Return the seconds since the link to `peer` broke; negative while it is up."""
        since = self._gone_since.get(peer)
        return -1.0 if since is None else self.elapsed(now) - since

    def keep_owners(self, owners: Collection[PeerId]) -> None:
        """Drop the leases of peers that own no hop here."""
        for peer in [peer for peer in self._gone_since if peer not in owners]:
            del self._gone_since[peer]
        idle = [peer for peer in self._leases if peer not in owners and peer not in self._linked]
        for peer in idle:
            del self._leases[peer]
        self._resigned.intersection_update((*owners, *self._linked))
