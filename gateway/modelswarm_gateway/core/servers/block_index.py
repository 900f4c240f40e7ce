"""The connected servers of one variant, indexed by the blocks they hold.

Kept by `server_registry.py` as servers connect and disconnect, so that no query walks over all of them. Knows their
Hellos, and nothing of their health.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.servers.server import Server


class BlockIndex:
    def __init__(self, n_blocks: int) -> None:
        self.servers: dict[PeerId, Server] = {}  # in order of arrival
        self._holders: list[dict[PeerId, Server]] = [{} for _ in range(n_blocks)]
        self._lengths: list[Counter[int]] = [
            Counter() for _ in range(n_blocks)
        ]  # max_length of the holders
        self._spans: dict[tuple[int, int], dict[PeerId, Server]] = {}
        self._max_length: int | None = None  # cached until a server is added or removed

    def add(self, server: Server) -> None:
        """Add a server that is not in the index."""
        hello = server.hello
        self.servers[hello.peer] = server
        self._spans.setdefault((hello.first, hello.last), {})[hello.peer] = server
        for block in range(hello.first, hello.last):
            self._holders[block][hello.peer] = server
            self._lengths[block][hello.max_length] += 1
        self._max_length = None

    def remove(self, peer: PeerId) -> None:
        hello = self.servers.pop(peer).hello
        span = hello.first, hello.last
        del self._spans[span][peer]
        if not self._spans[span]:
            del self._spans[span]
        for block in range(*span):
            del self._holders[block][peer]
            lengths = self._lengths[block]
            lengths[hello.max_length] -= 1
            if not lengths[hello.max_length]:
                del lengths[hello.max_length]
        self._max_length = None

    @property
    def is_complete(self) -> bool:
        return all(self._holders)

    @property
    def max_length(self) -> int:
        """The greatest session length some route can hold; without a route, the length every server can hold."""
        if self._max_length is None:
            if self.is_complete:
                self._max_length = min(max(lengths) for lengths in self._lengths)
            else:
                held = (length for lengths in self._lengths for length in lengths)
                self._max_length = min(held, default=0)
        return self._max_length

    def uncovered(self, without: Collection[PeerId]) -> list[int]:
        """Return the blocks that no server holds, those `without` not counted."""
        return [
            block
            for block, holders in enumerate(self._holders)
            if all(peer in without for peer in holders)
        ]

    def sole_blocks(self, server: Server, counts: Callable[[Server], bool]) -> list[int]:
        """Return the blocks of a server that no other server holds for which `counts` is true."""
        return [
            block
            for block in range(server.hello.first, server.hello.last)
            if not any(
                counts(other) for other in self._holders[block].values() if other is not server
            )
        ]

    def replicas_of(self, server: Server) -> Collection[Server]:
        """Return the servers that hold the same blocks, itself included."""
        return self._spans[server.hello.first, server.hello.last].values()
