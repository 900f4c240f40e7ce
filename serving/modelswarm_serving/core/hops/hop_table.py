"""The hops of this server by handle and by (session, block range), and the former owners of freed hops.

Used by `fencing.py` and `server.py`. Frees no pages and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from modelswarm.protocol.identity import NO_HANDLE, Handle, PeerId
from modelswarm_serving.core.hops.hop import Hop

MAX_FORMER_OWNERS = 1024
HANDLE_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FormerOwner:
    """The gateway to notify when a StartEpoch comes for a hop that it no longer has here."""

    gateway: PeerId
    gateway_handle: Handle


class HopTable:
    def __init__(self, random_bits: Callable[[], int]) -> None:
        self._random_bits = random_bits
        self._hops: dict[Handle, Hop] = {}
        self._by_key: dict[tuple[str, int, int], Hop] = {}
        self._freed: dict[Handle, FormerOwner] = {}
        self._taken: dict[Handle, FormerOwner] = {}  # hops taken over by another gateway

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[Hop]:
        return iter(self._hops.values())

    def get(self, handle: Handle) -> Hop | None:
        return self._hops.get(handle)

    def get_by_key(self, session: str, first: int, last: int) -> Hop | None:
        return self._by_key.get((session, first, last))

    def former_owner_of_freed(self, handle: Handle) -> FormerOwner | None:
        return self._freed.get(handle)

    def new_handle(self) -> Handle:
        while True:
            handle = self._random_bits() & HANDLE_MASK
            if handle != NO_HANDLE and not any(
                handle in known for known in (self._hops, self._freed, self._taken)
            ):
                return handle

    def add(self, hop: Hop) -> None:
        self._hops[hop.handle] = hop
        self._by_key[hop.key] = hop

    def remove(self, hop: Hop) -> None:
        del self._hops[hop.handle]
        del self._by_key[hop.key]
        self._freed[hop.handle] = FormerOwner(hop.gateway, hop.gateway_handle)
        if len(self._freed) > MAX_FORMER_OWNERS:
            del self._freed[next(iter(self._freed))]

    def set_owner(self, hop: Hop, gateway: PeerId, gateway_handle: Handle) -> None:
        """Make `gateway` the owner; the former owner is kept, as its StartEpoch may still come."""
        self._taken[hop.handle] = FormerOwner(hop.gateway, hop.gateway_handle)
        if len(self._taken) > MAX_FORMER_OWNERS:
            del self._taken[next(iter(self._taken))]
        hop.gateway, hop.gateway_handle, hop.started_by_owner = gateway, gateway_handle, False

    def former_owner_of_taken(self, handle: Handle) -> FormerOwner | None:
        return self._taken.get(handle)

    def owned_by(self, gateways: Iterable[PeerId]) -> list[Hop]:
        owners = set(gateways)
        return [hop for hop in self._hops.values() if hop.gateway in owners]
