"""Links: what joins this process to its peers, two lanes each.

Used by the node shells of gateway and server: it dials and accepts, tells its handler when a peer is
there, when it is gone and what it said, and sends. Whatever goes wrong with a link closes that link
only: both lanes, `unlinked` once, one line in the log. It never dials again by itself, and it does
not know what the items mean.

Between two servers each may have dialled the other. Everything for a peer leaves on the link that
was up first, so that order per lane holds; when one link of a peer breaks, all of them are closed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Never, Protocol

from modelswarm.protocol.identity import Address, PeerId, is_dialled_peer
from modelswarm.protocol.link.grpc_stream import DialledStream, Listener, Stream, StreamBroken
from modelswarm.protocol.link.handshake import LinkAcceptor, exchange_hello
from modelswarm.protocol.link.lane import LaneQueue, LaneWorker, LinkLimits
from modelswarm.protocol.messages import Hello, Item, Lane, Send
from modelswarm.protocol.wire.codec import FrameError

log = logging.getLogger(__name__)


class LinkHandler(Protocol):
    """Called on the event loop, and never from within `Links.send` or `Links.dial`."""

    def linked(self, peer: PeerId, hello: Hello) -> None:
        """The first link of a peer is up."""
        ...

    def unlinked(self, peer: PeerId, reason: str) -> None:
        """All links of a peer are gone, or it could not be dialled (named as it was dialled)."""
        ...

    def received(self, peer: PeerId, items: list[Item]) -> None:
        """Items of one lane, in order. Must not block; payloads of rows are views of a frame."""
        ...


class _Link:
    """Two lanes that are up. `broken` is resolved with the reason once they have to end."""

    def __init__(
        self, hello: Hello, dialled: DialledStream | None = None, dialled_peer: PeerId | None = None
    ) -> None:
        self.hello = hello
        self.dialled = dialled  # its live lane, if it was this process that dialled
        self.dialled_peer = dialled_peer or hello.peer  # whom it dialled
        self.lanes: dict[Lane, LaneWorker] = {}
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def put(self, lane: Lane, item: Item) -> None:
        if not self.lanes[lane].put(item):
            self.end("the peer does not read: too much is queued for it")

    async def flush_and_finish(self) -> None:
        """Say what is queued on the live lane; returns when the peer has heard it all.

        On accepted links nothing is worth it: a gateway that closes says so on links it dialled.
        """
        if self.dialled is not None:
            await self.lanes[Lane.LIVE].wait_flushed()
            await self.dialled.finish_writing()
            await asyncio.shield(self.broken)

    def end(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)


@dataclass(slots=True)
class _Dial:
    """A dial under way, and what is to be sent once a link is up."""

    queues: dict[Lane, LaneQueue]
    overflow: bool = False

    def put(self, lane: Lane, item: Item) -> None:
        if not self.queues[lane].put(item):
            self.overflow = True

    def flush(self, link: _Link) -> None:
        for lane, outbox in self.queues.items():
            for item in outbox.take():
                link.put(lane, item)
            outbox.on_written()
        if self.overflow:
            link.end("too much was queued before it was up")


class Links:
    """All links of one process. Made and used on its event loop."""

    def __init__(
        self, hello: Hello, handler: LinkHandler, *, limits: LinkLimits | None = None
    ) -> None:
        self._hello = hello
        self._handler = handler
        self._limits = limits or LinkLimits()
        self._links: dict[PeerId, list[_Link]] = {}
        self._dials: dict[PeerId, _Dial] = {}
        self._acceptor = LinkAcceptor(self._limits.handshake_seconds)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._closing = False

    async def listen(self, target: str) -> str:
        """Accept links on "host:port" (0: any port); returns the bound target. OSError if it fails."""
        listener = Listener(self._accept)
        bound = await listener.start(target)
        self._listener = listener
        self._hello = replace(self._hello, target=self._hello.target or bound)
        return bound

    def set_target(self, target: str) -> None:
        """What links that are made from now on say of where this process can be reached, if it does not listen."""
        self._hello = replace(self._hello, target=target)

    def dial(self, address: Address) -> None:
        """Link to a peer: `linked` or `unlinked` follows. Nothing happens if it is linked already."""
        if self._closing or address.peer in self._dials or self._is_linked(address.peer):
            return
        waiting = {lane: LaneQueue(self._limits.queued_bytes) for lane in Lane}
        self._dials[address.peer] = _Dial(waiting)
        self._start_task(self._dial(address))

    def _is_linked(self, peer: PeerId) -> bool:
        return peer in self._links or any(is_dialled_peer(other, peer) for other in self._links)

    def send(self, sends: Sequence[Send]) -> None:
        """Queue items in order. Without a link and a target they are lost: `unlinked` told it."""
        for send in sends:
            links = self._links.get(send.to.peer)
            if links:
                links[0].put(send.lane, send.item)
            elif send.to.target:
                self.dial(send.to)
                if not self._closing:
                    self._dials[send.to.peer].put(send.lane, send.item)

    def unlink(self, peer: PeerId, reason: str) -> None:
        """Close the links of a peer; `unlinked` follows."""
        for link in self._links.get(peer, ()):
            link.end(reason)

    def queued_bytes(self, peer: PeerId, lane: Lane) -> int:
        """About how many bytes wait for a lane of a peer."""
        links = self._links.get(peer)
        return links[0].lanes[lane].queued_bytes if links else 0

    async def close(self) -> None:
        """Say what is queued for those we dialled, then end everything; no callbacks any more."""
        self._closing = True
        await self._finish_links()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._listener is not None:
            await self._listener.stop()

    async def _finish_links(self) -> None:
        links = [link for links in self._links.values() for link in links]
        if not links:
            return
        tasks = [asyncio.create_task(link.flush_and_finish()) for link in links]
        await asyncio.wait(tasks, timeout=self._limits.close_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in links:
            link.end("closing")

    # Dialling

    async def _dial(self, address: Address) -> None:
        try:
            streams = {lane: DialledStream(address.target, lane) for lane in Lane}
        except Exception as error:  # gRPC says in many ways that this is no address
            self._on_dial_failed(address, f"{address.target!r} cannot be dialled: {error}")
            return
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                hello = await self._exchange_hellos(address, streams)
        except TimeoutError:
            self._on_dial_failed(address, f"{address.target} did not answer in time")
        except StreamBroken as error:
            self._on_dial_failed(address, str(error))
        else:
            await self._run_link(_Link(hello, streams[Lane.LIVE], address.peer), streams)
        finally:
            await asyncio.gather(*(stream.close() for stream in streams.values()))

    async def _exchange_hellos(self, address: Address, streams: dict[Lane, DialledStream]) -> Hello:
        """One lane after the other: whoever else may answer there takes a pair of them for a new link of ours, which
        would end the one that we have."""
        link = secrets.token_hex(8)
        hellos = [
            await exchange_hello(stream, replace(self._hello, link=link, lane=lane), address)
            for lane, stream in streams.items()
        ]
        if len({hello.peer for hello in hellos}) > 1:  # it restarted between the two lanes
            raise StreamBroken(f"two peers answer at {address.target}")
        return hellos[0]

    def _on_dial_failed(self, address: Address, reason: str) -> None:
        del self._dials[address.peer]
        if not self._closing and not self._is_linked(address.peer):
            log.debug("%s cannot be linked: %s", address.peer, reason)
            self._handler.unlinked(address.peer, reason)

    # Accepting

    async def _accept(self, lane: Lane, stream: Stream) -> None:
        """Runs as long as the lane is up."""
        pair = await self._acceptor.accept_lane(self._hello, lane, stream)
        try:
            if lane is pair.hello.lane:  # it came first, so it runs the link for both
                await self._run_link(_Link(pair.hello), pair.streams)
            else:
                await pair.ended.wait()
        finally:
            pair.ended.set()

    # Links that are up

    async def _run_link(self, link: _Link, streams: Mapping[Lane, Stream]) -> None:
        for lane, stream in streams.items():
            link.lanes[lane] = LaneWorker(stream, self._limits, partial(self._received, link))
        tasks = [
            asyncio.create_task(run())
            for worker in link.lanes.values()
            for run in (worker.run_reader, worker.run_writer)
        ]
        reason = "the connection is lost"
        try:
            self._on_link_up(link)
            reason = await self._wait_for_end(link, tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:
                self._on_link_down(link, reason)
            finally:
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_end(self, link: _Link, tasks: list[asyncio.Task[Never]]) -> str:
        """Returns why the link has to end."""
        clock = asyncio.get_running_loop().time
        patience = self._limits.stalled_seconds / 4
        ends: list[asyncio.Future[Any]] = [*tasks, link.broken]
        while True:
            await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    return _describe_failure(task)
            if link.broken.done():
                return link.broken.result()
            for worker in link.lanes.values():
                if worker.is_stalled(clock()):
                    return "the peer does not read"

    def _on_link_up(self, link: _Link) -> None:
        peer = link.hello.peer
        links = self._links.get(peer, [])
        if link.dialled is None and any(other.dialled is None for other in links):
            # It dials again only when its old link is gone, which we have not noticed yet.
            self._on_link_down(links[0], "replaced by a new link")
            links = []
        self._links[peer] = [*links, link]
        dial = self._dials.get(link.dialled_peer)
        if dial is not None:
            dial.flush(link)
            if link.dialled is not None:
                del self._dials[link.dialled_peer]
        if not links and not self._closing:
            self._handler.linked(peer, link.hello)

    def _on_link_down(self, link: _Link, reason: str) -> None:
        peer = link.hello.peer
        links = self._links.get(peer, [])
        if link not in links:
            return  # another link of this peer broke first
        del self._links[peer]
        for other in links:
            other.end(reason)  # this one too: `broken` tells whoever waits for the end
        if not self._closing:
            log.info("the link to %s is closed: %s", peer, reason)
            self._handler.unlinked(peer, reason)

    def _received(self, link: _Link, items: list[Item]) -> None:
        if not self._closing and not link.broken.done():
            self._handler.received(link.hello.peer, items)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a link failed by a fault of ours", exc_info=error)


def _describe_failure(task: asyncio.Task[Never]) -> str:
    error = task.exception() if not task.cancelled() else None
    match error:
        case StreamBroken():
            return str(error)
        case FrameError():
            return f"it sent something else than this protocol: {error}"
        case None:
            return "cancelled"
        case _:
            log.error("a link failed by a fault of ours", exc_info=error)
            return "internal error"
