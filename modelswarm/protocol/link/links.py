"""The links of this process to its peers, two lanes each.

Dials and accepts links, sends items, and calls its handler when a peer is linked, when it is lost, and with the items
it sent. An error of a link closes that link only: both lanes, one `on_link_down`, one line in the log. Links are not
dialled again from here. Used by the nodes of gateway and server. Does not know the meaning of items.

Two servers may have dialled each other. All items for a peer leave on the link that was up first, which keeps the
order per lane. If one link of a peer breaks, all its links are closed.
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
from modelswarm.protocol.link.handshake import LinkAcceptor, exchange_hello
from modelswarm.protocol.link.lane import LaneQueue, LaneWorker, LinkLimits
from modelswarm.protocol.link.listener import Listener, ServeCall, open_lane
from modelswarm.protocol.link.stream import MessageStream, StreamBroken
from modelswarm.protocol.messages import Hello, Item, Lane, Send
from modelswarm.protocol.wire.codec import FrameError

log = logging.getLogger(__name__)


class LinkHandler(Protocol):
    """Callbacks of Links, made on the event loop, never from within `Links.send` or `Links.dial`."""

    def on_link_up(self, peer: PeerId, hello: Hello) -> None:
        """The first link of a peer is up."""
        ...

    def on_link_down(self, peer: PeerId, reason: str) -> None:
        """All links of a peer are closed, or it could not be dialled (`peer` is then as it was dialled)."""
        ...

    def on_items(self, peer: PeerId, items: list[Item]) -> None:
        """Items of one lane, in order. Must not block; payloads of rows are views of a frame."""
        ...


class _Link:
    """Two open lanes. `broken` is resolved with the reason when they must end."""

    def __init__(
        self, hello: Hello, dialled: MessageStream | None = None, dialled_peer: PeerId | None = None
    ) -> None:
        self.hello = hello
        self.dialled = dialled  # the live lane, if this process dialled
        self.dialled_peer = dialled_peer or hello.peer  # the peer as it was dialled
        self.lanes: dict[Lane, LaneWorker] = {}
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def put(self, lane: Lane, item: Item) -> LaneWorker:
        """Queue an item; the caller sends what the returned lane has."""
        worker = self.lanes[lane]
        if not worker.put(item):
            self.end("the peer does not read: too much is queued for it")
        return worker

    async def flush_and_finish(self) -> None:
        """Write the queued items of the live lane; return when the peer has read them all.

        Accepted links are not flushed: a gateway announces its shutdown on the links it dialled.
        """
        if self.dialled is not None:
            await self.lanes[Lane.LIVE].wait_flushed()
            self.dialled.finish_writing()
            await asyncio.shield(self.broken)

    def end(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)


@dataclass(slots=True)
class _Dial:
    """A running dial, and the items to send once the link is up."""

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
            link.lanes[lane].send_queued()
        if self.overflow:
            link.end("too much was queued before the link was up")


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

    async def listen(self, target: str, calls: Mapping[str, ServeCall] | None = None) -> str:
        """Accept links on "host:port" (0: any port); returns the bound target. OSError if it fails.

        `calls`: methods of the port beside those of links.
        """
        listener = Listener(self._accept, calls)
        bound = await listener.start(target)
        self._listener = listener
        self._hello = replace(self._hello, target=self._hello.target or bound)
        return bound

    def set_target(self, target: str) -> None:
        """Set the address in the Hello of later links, for a process that does not listen."""
        self._hello = replace(self._hello, target=target)

    def dial(self, address: Address) -> None:
        """Open a link to a peer; `on_link_up` or `on_link_down` follows. A linked peer is not dialled again."""
        if self._closing or address.peer in self._dials or self._is_linked(address.peer):
            return
        waiting = {lane: LaneQueue(self._limits.queued_bytes) for lane in Lane}
        self._dials[address.peer] = _Dial(waiting)
        self._start_task(self._dial(address))

    def _is_linked(self, peer: PeerId) -> bool:
        return peer in self._links or any(is_dialled_peer(other, peer) for other in self._links)

    def send(self, sends: Sequence[Send]) -> None:
        """Queue items in order. Without a link and a target they are lost, after `on_link_down` reported it.

        While the links are closed all are lost: an item behind the end of a lane would break the lane.
        """
        if self._closing:
            return
        lanes: dict[LaneWorker, None] = {}
        for send in sends:
            links = self._links.get(send.to.peer)
            if links:
                lanes[links[0].put(send.lane, send.item)] = None
            elif send.to.target:
                self.dial(send.to)
                self._dials[send.to.peer].put(send.lane, send.item)
        for lane in lanes:
            lane.send_queued()

    def unlink(self, peer: PeerId, reason: str) -> None:
        """Close the links of a peer; `on_link_down` follows."""
        for link in self._links.get(peer, ()):
            link.end(reason)

    def queued_bytes(self, peer: PeerId, lane: Lane) -> int:
        """Return the approximate number of bytes queued for a lane of a peer."""
        links = self._links.get(peer)
        return links[0].lanes[lane].queued_bytes if links else 0

    async def close(self) -> None:
        """Flush the links that this process dialled, then close all. No callback follows."""
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
        streams: dict[Lane, MessageStream] = {}
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                hello = await self._open_lanes(address, streams)
        except TimeoutError:
            self._on_dial_failed(address, f"{address.target} did not answer in time")
        except StreamBroken as error:
            self._on_dial_failed(address, str(error))
        except ValueError as error:  # no host name, no port
            self._on_dial_failed(address, f"{address.target!r} cannot be dialled: {error}")
        else:
            await self._run_link(_Link(hello, streams[Lane.LIVE], address.peer), streams)
        finally:
            for stream in streams.values():
                stream.close()

    async def _open_lanes(self, address: Address, streams: dict[Lane, MessageStream]) -> Hello:
        """Open one lane after the other into `streams`, and exchange Hellos on each.

        If another process answers at the address, the first refusal ends the dial. It never gets both lanes, which it
        would take for a new link that replaces its present link with this process.
        """
        link = secrets.token_hex(8)
        hellos = []
        for lane in Lane:
            streams[lane] = await open_lane(address.target, lane)
            own = replace(self._hello, link=link, lane=lane)
            hellos.append(await exchange_hello(streams[lane], own, address))
        if len({hello.peer for hello in hellos}) > 1:  # it restarted between the two lanes
            raise StreamBroken(f"two peers answer at {address.target}")
        return hellos[0]

    def _on_dial_failed(self, address: Address, reason: str) -> None:
        del self._dials[address.peer]
        if not self._closing and not self._is_linked(address.peer):
            log.debug("%s cannot be linked: %s", address.peer, reason)
            self._handler.on_link_down(address.peer, reason)

    # Accepting

    async def _accept(self, lane: Lane, stream: MessageStream) -> None:
        """Serve an accepted lane until it ends."""
        pair = await self._acceptor.accept_lane(self._hello, lane, stream)
        try:
            if lane is pair.hello.lane:  # it came first, so it runs the link for both
                await self._run_link(_Link(pair.hello), pair.streams)
            else:
                await pair.ended.wait()
        finally:
            pair.ended.set()

    # Links that are up

    async def _run_link(self, link: _Link, streams: Mapping[Lane, MessageStream]) -> None:
        for lane, stream in streams.items():
            receive = partial(self._received, link)
            link.lanes[lane] = LaneWorker(stream, self._limits, link.hello.peer, receive)
        tasks = [asyncio.create_task(worker.run()) for worker in link.lanes.values()]
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
        """Wait until the link must end; return the reason."""
        clock = asyncio.get_running_loop().time
        poll_seconds = self._limits.stalled_seconds / 4
        ends: list[asyncio.Future[Any]] = [*tasks, link.broken]
        while True:
            await asyncio.wait(ends, timeout=poll_seconds, return_when=asyncio.FIRST_COMPLETED)
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
            # The peer dials again only after its old link ended; that end has not been noticed here yet.
            self._on_link_down(links[0], "replaced by a new link")
            links = []
        self._links[peer] = [*links, link]
        dial = self._dials.get(link.dialled_peer)
        if dial is not None:
            dial.flush(link)
            if link.dialled is not None:
                del self._dials[link.dialled_peer]
        if not links and not self._closing:
            self._handler.on_link_up(peer, link.hello)

    def _on_link_down(self, link: _Link, reason: str) -> None:
        peer = link.hello.peer
        links = self._links.get(peer, [])
        if link not in links:
            return  # another link of this peer broke first
        del self._links[peer]
        for other in links:
            other.end(reason)  # `link` too: its task waits for `broken`
        if not self._closing:
            log.info("the link to %s is closed: %s", peer, reason)
            self._handler.on_link_down(peer, reason)

    def _received(self, link: _Link, items: list[Item]) -> None:
        if not self._closing and not link.broken.done():
            self._handler.on_items(link.hello.peer, items)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("internal error in a link", exc_info=error)


def _describe_failure(task: asyncio.Task[Never]) -> str:
    error = task.exception() if not task.cancelled() else None
    match error:
        case StreamBroken():
            return str(error)
        case FrameError():
            return f"the peer violated the protocol: {error}"
        case None:
            return "cancelled"
        case _:
            log.error("internal error in a link", exc_info=error)
            return "internal error"
