"""The hops of this server by handle and by (session, block range), and the former owners of handles.

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
    """The gateway to notify when a StartEpoch comes for a hop that it no longer has here. A handle has one owner."""

    gateway: PeerId
    gateway_handle: Handle


class HopTable:
    def __init__(self, random_bits: Callable[[], int]) -> None:
        self._random_bits = random_bits
        self._hops: dict[Handle, Hop] = {}
        self._by_key: dict[tuple[str, int, int], Hop] = {}
        self._former: dict[Handle, FormerOwner] = {}  # handles of freed and of taken hops

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[Hop]:
        return iter(self._hops.values())

    def get(self, handle: Handle) -> Hop | None:
        return self._hops.get(handle)

    def get_by_key(self, session: str, first: int, last: int) -> Hop | None:
        return self._by_key.get((session, first, last))

    def former_owner(self, handle: Handle) -> FormerOwner | None:
        return self._former.get(handle)

    def new_handle(self) -> Handle:
        while True:
            handle = self._random_bits() & HANDLE_MASK
            if handle != NO_HANDLE and handle not in self._hops and handle not in self._former:
                return handle

    def add(self, hop: Hop) -> None:
        self._hops[hop.handle] = hop
        self._by_key[hop.key] = hop

    def remove(self, hop: Hop) -> None:
        del self._hops[hop.handle]
        del self._by_key[hop.key]
        self._former[hop.handle] = FormerOwner(hop.gateway, hop.gateway_handle)
        if len(self._former) > MAX_FORMER_OWNERS:
            del self._former[next(iter(self._former))]

    def set_owner(self, hop: Hop, gateway: PeerId) -> None:
        """Make `gateway` the owner, under a new handle: the former owner's messages no longer find the hop."""
        self.remove(hop)
        hop.handle, hop.gateway, hop.started_by_owner = self.new_handle(), gateway, False
        self.add(hop)

    def owned_by(self, gateways: Iterable[PeerId]) -> list[Hop]:
        owners = set(gateways)
        return [hop for hop in self._hops.values() if hop.gateway in owners]
