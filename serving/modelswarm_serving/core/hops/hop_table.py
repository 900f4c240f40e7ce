"""The hops of this server by handle and by (session, block range), and the names of those freed of late.

Used by `lifecycle.py` and `server.py`. Frees no pages and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from modelswarm.protocol.identity import NO_HANDLE, Handle, PeerId
from modelswarm_serving.core.hops.hop import Hop

REMEMBERED_HOPS = 1024
HANDLE_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class FreedHop:
    """Whom to tell when a Go comes for a hop that this server gave up by itself."""

    gateway: PeerId
    reply: Handle


class Registry:
    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._hops: dict[Handle, Hop] = {}
        self._ranges: dict[tuple[str, int, int], Hop] = {}
        self._freed: dict[Handle, FreedHop] = {}
        self._lost: dict[Handle, FreedHop] = {}  # hops that were taken, and who had them before

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[Hop]:
        return iter(self._hops.values())

    def get(self, handle: Handle) -> Hop | None:
        return self._hops.get(handle)

    def at(self, session: str, first: int, last: int) -> Hop | None:
        return self._ranges.get((session, first, last))

    def freed(self, handle: Handle) -> FreedHop | None:
        return self._freed.get(handle)

    def new_handle(self) -> Handle:
        while True:
            handle = self._draw() & HANDLE_MASK
            if handle != NO_HANDLE and not any(
                handle in known for known in (self._hops, self._freed, self._lost)
            ):
                return handle

    def add(self, hop: Hop) -> None:
        self._hops[hop.handle] = hop
        self._ranges[hop.range] = hop

    def remove(self, hop: Hop) -> None:
        del self._hops[hop.handle]
        del self._ranges[hop.range]
        self._freed[hop.handle] = FreedHop(hop.gateway, hop.reply)
        if len(self._freed) > REMEMBERED_HOPS:
            del self._freed[next(iter(self._freed))]

    def taken(self, hop: Hop, gateway: PeerId, reply: Handle) -> None:
        """Another gateway has it from now on; the one that had it may yet say Go."""
        self._lost[hop.handle] = FreedHop(hop.gateway, hop.reply)
        if len(self._lost) > REMEMBERED_HOPS:
            del self._lost[next(iter(self._lost))]
        hop.gateway, hop.reply, hop.led = gateway, reply, False

    def lost(self, handle: Handle) -> FreedHop | None:
        return self._lost.get(handle)

    def of(self, gateways: Iterable[PeerId]) -> list[Hop]:
        owners = set(gateways)
        return [hop for hop in self._hops.values() if hop.gateway in owners]
