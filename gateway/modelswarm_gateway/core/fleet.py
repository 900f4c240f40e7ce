"""The servers this gateway is linked to, and which pairs of them keep losing each other.

Used by the loop to cover blocks. Knows nothing of sessions beyond how many hops each server carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import Beat, Hello
from modelswarm_gateway.routing import Candidate, Leg, cover


@dataclass(slots=True)
class Server:
    hello: Hello
    beat: Beat | None = None

    @property
    def address(self) -> Address:
        return Address(self.hello.peer, self.hello.target)

    @property
    def draining(self) -> bool:
        return self.beat is not None and self.beat.draining


@dataclass(slots=True)
class Pair:
    """Failures of the link between two living servers, each generation of it counted once (R5)."""

    seen: set[tuple[PeerId, int]] = field(default_factory=set)
    since: float = 0.0


class Fleet:
    def __init__(self, pair_seconds: float, draw: Callable[[], int]) -> None:
        self._pair_seconds = pair_seconds
        self._draw = draw
        self._servers: dict[PeerId, Server] = {}
        self._pairs: dict[frozenset[PeerId], Pair] = {}
        self.hops: Counter[PeerId] = Counter()  # this gateway's own hops, by server

    def join(self, hello: Hello) -> None:
        self._servers[hello.peer] = Server(hello)

    def leave(self, peer: PeerId) -> None:
        self._servers.pop(peer, None)

    def linked(self, peer: PeerId) -> bool:
        return peer in self._servers

    def get(self, peer: PeerId) -> Server | None:
        return self._servers.get(peer)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def of_model(self, model: str) -> list[Server]:
        return [server for server in self._servers.values() if server.hello.model == model]

    def beat(self, peer: PeerId, beat: Beat) -> None:
        if server := self._servers.get(peer):
            server.beat = beat

    def pair_failed(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        if not (self.linked(reporter) and self.linked(peer)):
            return  # one of them died: nothing is known against the link between them
        pair = self._pairs.setdefault(frozenset((reporter, peer)), Pair(since=now))
        if now - pair.since > self._pair_seconds:
            pair.seen.clear()
        pair.since = now
        pair.seen.add((reporter, generation))

    def bad_pairs(self, now: float) -> dict[frozenset[PeerId], int]:
        """Pairs to avoid, with how often each failed, as seen from one end: at least twice, and not long ago."""
        expired = [pair for pair, p in self._pairs.items() if now - p.since > self._pair_seconds]
        for pair in expired:
            del self._pairs[pair]
        failures = {
            names: max(Counter(reporter for reporter, _ in pair.seen).values())
            for names, pair in self._pairs.items()
        }
        return {names: count for names, count in failures.items() if count >= 2}

    def failing(self, route: Sequence[PeerId], now: float) -> dict[frozenset[PeerId], int]:
        """The pairs to avoid in a route: neighbours, and tail and head, which the ring joins."""
        bad = self.bad_pairs(now)
        links = zip(route, [*route[1:], route[0]], strict=True)
        return {pair: bad[pair] for link in links if (pair := frozenset(link)) in bad}

    def cover(
        self,
        model: str,
        blocks: tuple[int, int],
        now: float,
        *,
        before: PeerId | None,
        after: PeerId | None,
        without: Collection[PeerId],
    ) -> list[Leg] | None:
        """Servers for `blocks`; those that are leaving only if nobody else holds a block."""
        servers = [s for s in self.of_model(model) if s.hello.peer not in without]
        staying = [s for s in servers if not s.draining]
        for choice in (staying, servers):
            legs = cover(
                [self._candidate(server) for server in choice],
                blocks,
                before=before,
                after=after,
                bad_pairs=self.bad_pairs(now),
                jitter=lambda: (self._draw() >> 11) / (1 << 53),
            )
            if legs is not None:
                return legs
        return None

    def _candidate(self, server: Server) -> Candidate:
        hello = server.hello
        return Candidate(hello.peer, hello.first, hello.last, self.hops[hello.peer])

    def n_blocks(self, model: str) -> int | None:
        return next((s.hello.n_blocks for s in self.of_model(model)), None)

    def max_length(self, model: str) -> int:
        return min((s.hello.max_length for s in self.of_model(model)), default=0)

    def uncovered(self, model: str) -> list[int]:
        """Blocks of the model that no linked server holds."""
        held = {b for s in self.of_model(model) for b in range(s.hello.first, s.hello.last)}
        return [b for b in range(self.n_blocks(model) or 0) if b not in held]
