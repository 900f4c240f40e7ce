"""A minimal gateway in this process: it links to servers, opens a route, sends a prompt and collects tokens.

Used by tests of server processes. It has no recovery.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from support.processes.link_peers import DEADLINE, Node, hello
from support.processes.server import ServerProcess

from modelswarm.protocol.identity import NO_HANDLE, Address, Epoch, Handle
from modelswarm.protocol.messages import (
    Close,
    Create,
    FaultReport,
    Fence,
    FenceAck,
    Finish,
    Heartbeat,
    Input,
    Item,
    Lane,
    ModelFileChunk,
    ModelFileRequest,
    Neighbour,
    Sampling,
    StartEpoch,
    Token,
    Turn,
)

EPOCH = Epoch(1, 1)


@dataclass(frozen=True, slots=True)
class Route:
    hops: tuple[Neighbour, ...]


class FakeGateway:
    def __init__(self, servers: Sequence[ServerProcess], name: str = "gateway/1/x") -> None:
        self.node = Node(hello(name))
        self.received = self.node.received
        self._servers = servers
        self._replies = 0

    def of(self, kind: type[Item]) -> list[Item]:
        return [item for item in self.received.items if isinstance(item, kind)]

    @property
    def tokens(self) -> list[Token]:
        return [item for item in self.received.items if isinstance(item, Token)]

    @property
    def reports(self) -> list[FaultReport]:
        return [item for item in self.received.items if isinstance(item, FaultReport)]

    async def link(self) -> None:
        for server in self._servers:
            self.node.links.dial(server.address)
        peers = {server.address.peer for server in self._servers}
        await self.received.until(lambda: peers <= {h.peer for h in self.received.up})

    async def open(self, session: str, end: int, sampling: Sampling | None = None) -> Route:
        """Open a hop on every server, in order of their blocks."""
        replies: dict[Handle, Address] = {}
        for server in self._servers:
            self._replies += 1
            replies[self._replies] = server.address
            first, last = server.member["first"], server.member["last"]
            turn = Turn(end - 1, end, sampling or Sampling())
            create = Create(session, first, last)
            fence = Fence(NO_HANDLE, self._replies, EPOCH, 0, 0, create, turn)
            self.node.send(server.address, [fence])
        await self.received.until(lambda: replies.keys() <= self._fenced().keys())
        fenced = self._fenced()
        assert all(fenced[reply].refusal is None for reply in replies), fenced
        return Route(
            tuple(Neighbour(a, fenced[reply].server_handle) for reply, a in replies.items())
        )

    def go(self, route: Route, prompt: Sequence[int], credit: int = 1 << 20) -> None:
        hops = route.hops
        for i, hop in enumerate(hops):
            tail = i == len(hops) - 1
            go = StartEpoch(
                hop.handle,
                EPOCH,
                length=len(prompt),
                start=0,
                send_from=0,
                predecessor=hops[i - 1] if i else None,
                successor=None if tail else hops[i + 1],
                ring=hops[0] if tail and i else None,
                credit=credit if tail else 0,
                hops=len(hops),
            )
            self.node.send(hop.address, [go])
            if i == 0 or tail:
                entries = Input(hop.handle, EPOCH, 0, tuple(prompt))
                self.node.send(hop.address, [entries], Lane.BULK)

    async def generate(self, route: Route, prompt: Sequence[int]) -> list[int]:
        """Start the route with `prompt`; return all tokens up to the last of the turn."""
        before = len(self.tokens)
        self.go(route, prompt)
        await self.received.until(lambda: self._finished(before))
        return [token.token for token in self.tokens[before:]]

    def close(self, route: Route) -> None:
        for hop in route.hops:
            self.node.send(hop.address, [Close(hop.handle)])

    async def file(self, name: str) -> bytes | None:
        """Return a model file of the first server; None if the server reports it missing."""
        before = len(self.of(ModelFileChunk))
        self.node.send(self._servers[0].address, [ModelFileRequest(name)])
        await self.received.until(lambda: self._complete(before))
        parts = [c for c in self.of(ModelFileChunk)[before:] if isinstance(c, ModelFileChunk)]
        assert all(part.name == name for part in parts)
        return None if parts[0].missing else b"".join(part.data for part in parts)

    async def all_pages_free(self, deadline: float = DEADLINE) -> None:
        """Wait for a heartbeat with all pages free; idle servers send one every 5 s."""
        seen = len(self.of(Heartbeat))

        def free() -> bool:
            heartbeats = [
                heartbeat
                for heartbeat in self.of(Heartbeat)[seen:]
                if isinstance(heartbeat, Heartbeat)
            ]
            return any(b.free_pages == b.total_pages and b.sessions == 0 for b in heartbeats)

        await self.received.until(free, deadline)

    def _fenced(self) -> dict[Handle, FenceAck]:
        return {item.handle: item for item in self.received.items if isinstance(item, FenceAck)}

    def _finished(self, before: int) -> bool:
        assert not self.reports, self.reports
        return any(token.finish is not Finish.NONE for token in self.tokens[before:])

    def _complete(self, before: int) -> bool:
        parts = [c for c in self.of(ModelFileChunk)[before:] if isinstance(c, ModelFileChunk)]
        return bool(parts) and parts[-1].offset + len(parts[-1].data) == parts[-1].total


@contextlib.asynccontextmanager
async def fake_gateway(
    servers: Sequence[ServerProcess], name: str = "gateway/1/x"
) -> AsyncIterator[FakeGateway]:
    """Yield a gateway that is linked to all servers."""
    gateway = FakeGateway(servers, name)
    try:
        await gateway.link()
        yield gateway
    finally:
        await gateway.node.links.close()
