"""Link endpoints for tests: one that records, one that sends raw frames, one in a process of its own.

Used by the tests of links and of server processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.link.lane import LinkLimits
from modelswarm.protocol.link.links import Links
from modelswarm.protocol.link.listener import open_lane
from modelswarm.protocol.link.stream import MessageStream
from modelswarm.protocol.messages import PROTOCOL_VERSION, Hello, Item, Lane, Role, Send
from modelswarm.protocol.wire.frames import pack, unpack

DEADLINE = 300.0  # limit of any wait, in seconds
PATIENT = LinkLimits(connect_seconds=DEADLINE, handshake_seconds=DEADLINE)
"""Limits of links that are dialled once: the other process may get no processor for a second."""


def hello(peer: PeerId, version: tuple[int, int] = PROTOCOL_VERSION) -> Hello:
    return Hello(version, peer, Role.GATEWAY, "", Lane.LIVE)


@dataclass
class Recorder:
    """A link handler that keeps everything. `echo`: each item is sent back on the live lane."""

    up: list[Hello] = field(default_factory=list)
    down: list[tuple[PeerId, str]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    calls: int = 0  # calls of `on_items`
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    hook: Callable[[PeerId, list[Item]], None] | None = None

    def on_link_up(self, peer: PeerId, hello: Hello) -> None:
        self.up.append(hello)
        self.changed.set()

    def on_link_down(self, peer: PeerId, reason: str) -> None:
        self.down.append((peer, reason))
        self.changed.set()

    def on_items(self, peer: PeerId, items: list[Item]) -> None:
        self.calls += 1
        self.items += items
        self.changed.set()
        if self.hook is not None:
            self.hook(peer, items)

    async def until(self, true: Callable[[], bool], deadline: float = DEADLINE) -> None:
        async with asyncio.timeout(deadline):
            while not true():
                await self.changed.wait()
                self.changed.clear()


class Node:
    """The links of a process, and a recorder of what they receive."""

    def __init__(self, own: Hello, limits: LinkLimits | None = None) -> None:
        self.peer = own.peer
        self.received = Recorder()
        self.links = Links(own, self.received, limits=limits or PATIENT)
        self.target = ""

    @property
    def address(self) -> Address:
        return Address(self.peer, self.target)

    async def listen(self) -> None:
        self.target = await self.links.listen("127.0.0.1:0")

    def send(self, to: Address, items: Sequence[Item], lane: Lane = Lane.LIVE) -> None:
        self.links.send([Send(to, lane, item) for item in items])

    def echo(self) -> None:
        def back(peer: PeerId, items: list[Item]) -> None:
            self.send(Address(peer, ""), items)

        self.received.hook = back


@contextlib.asynccontextmanager
async def nodes(*names: str, limits: LinkLimits | None = None) -> AsyncIterator[list[Node]]:
    """Yield listening nodes of this process, and close them."""
    made = [Node(hello(f"{name}/1/x"), limits) for name in names]
    try:
        for node in made:
            await node.listen()
        yield made
    finally:
        for node in made:
            await node.links.close()


async def joined(dialler: Node, acceptor: Node) -> None:
    """Link two ends."""
    dialler.links.dial(acceptor.address)
    await dialler.received.until(lambda: any(h.peer == acceptor.peer for h in dialler.received.up))
    await acceptor.received.until(lambda: any(h.peer == dialler.peer for h in acceptor.received.up))


class RawPeer:
    """Two lanes to a listening node, for arbitrary bytes."""

    def __init__(self, own: Hello) -> None:
        self._own = replace(own, link="raw")
        self.lanes: dict[Lane, MessageStream] = {}

    async def open(self, target: str) -> None:
        for lane in Lane:
            self.lanes[lane] = await open_lane(target, lane)

    async def greet(self, lane: Lane) -> Hello:
        stream = self.lanes[lane]
        for frame in pack([replace(self._own, lane=lane)]):
            await stream.write(frame)
        answer = unpack(await stream.read())[0]
        assert isinstance(answer, Hello)
        return answer

    def close(self) -> None:
        for stream in self.lanes.values():
            stream.close()


@contextlib.asynccontextmanager
async def raw_peer(to: Node, own: Hello, greeted: Sequence[Lane] = ()) -> AsyncIterator[RawPeer]:
    raw = RawPeer(own)
    try:
        await raw.open(to.target)
        for lane in greeted:
            await raw.greet(lane)
        yield raw
    finally:
        raw.close()


@contextlib.asynccontextmanager
async def echo_process(dials: Node | None = None) -> AsyncIterator[tuple[Address, int]]:
    """Yield address and process id of another process that sends every item back."""
    extra = [] if dials is None else [dials.peer, dials.target]
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *extra, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            target = (await process.stdout.readline()).decode().strip()
        yield Address("echo/1/x", target), process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _main(dial: Address | None) -> None:
    node = Node(hello("echo/1/x"))
    node.echo()
    await node.listen()
    sys.stdout.write(f"{node.target}\n")
    sys.stdout.flush()
    if dial is not None:
        node.links.dial(dial)
    await asyncio.Event().wait()  # until it is killed


if __name__ == "__main__":
    asyncio.run(_main(Address(*sys.argv[1:3]) if len(sys.argv) == 3 else None))
