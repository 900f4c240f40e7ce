"""One lane of an open link: a queue of items, and their frames on a stream.

Made by `links.py` for each of the two streams of a link. Items that are sent together are packed into as few frames as
possible. Nothing here waits for the handler or blocks a sender (R11, windows). A queue that grows too long,
or a peer that reads nothing for too long, ends the link. Knows items and frames; does not know peers or sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Never

from typing_extensions import Buffer

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.link.stream import MessageStream
from modelswarm.protocol.messages import Fence, Input, Item, LogChunk, ModelFileChunk, Rows
from modelswarm.protocol.wire.frames import pack, unpack

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Timeouts of a link, and the limit of its queues."""

    connect_seconds: float = 1.0
    handshake_seconds: float = 5.0
    stalled_seconds: float = 30.0
    # Per lane: many times a server's window per peer (R11, windows). More than the opaque rows of all sessions of a
    # gateway, 512 MiB, which may restart on one server at once (R14, opaque rows).
    queued_bytes: int = 640 << 20
    close_seconds: float = 0.5  # for writing queued items when this process closes its links


class LaneQueue:
    """Items waiting for a lane, with their size in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Item] = []
        self._bytes = 0
        self._writing = 0  # bytes of the items that the writer has taken and not finished

    def put(self, item: Item) -> bool:
        """Add an item. False if the limit is exceeded: the lane must then end."""
        self._items.append(item)
        self._bytes += _item_bytes(item)
        return self.queued_bytes <= self._limit

    def take(self) -> list[Item]:
        items, self._items = self._items, []
        self._writing, self._bytes = self._bytes, 0
        return items

    def on_written(self) -> None:
        self._writing = 0

    @property
    def queued_bytes(self) -> int:
        return self._bytes + self._writing


class LaneWorker:
    """Reads and writes one stream. `run` ends only by raising; `links.py` then ends the link."""

    def __init__(
        self,
        stream: MessageStream,
        limits: LinkLimits,
        peer: PeerId,
        receive: Callable[[list[Item]], None],
    ) -> None:
        self._stream = stream
        self._peer = peer
        self._limits = limits
        self._receive = receive
        self._queue = LaneQueue(limits.queued_bytes)
        self._frames: Iterator[bytes] = iter(())  # of the items that were taken from the queue
        self._is_scheduled = False  # something was sent in this pass of the loop, the rest follows
        self._flushed = asyncio.Event()
        self._flushed.set()

    def put(self, item: Item) -> bool:
        """Queue an item until `send_queued`. False if the limit is exceeded: the lane must then end."""
        self._flushed.clear()
        return self._queue.put(item)

    def send_queued(self) -> None:
        """Send what is queued: the first time in a pass of the loop at once, then together at its end."""
        if self._is_scheduled:
            return
        self._is_scheduled = True
        self._flush()
        asyncio.get_running_loop().call_soon(self._on_pass_ended)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the items that the socket has not taken."""
        return self._queue.queued_bytes + self._stream.buffered_bytes

    async def run(self) -> Never:
        await self._stream.deliver_to(self._on_message, self._flush)

    def _on_message(self, message: Buffer) -> None:
        self._receive(unpack(message))

    def _on_pass_ended(self) -> None:
        self._is_scheduled = False
        self._flush()

    def _flush(self) -> None:
        """Send what is queued, as far as the socket takes it."""
        try:
            while self._stream.paused_since is None:
                frame = next(self._frames, None)
                if frame is not None:
                    self._stream.send_message(frame)
                    continue
                self._queue.on_written()
                items = self._queue.take()
                if not items:
                    self._flushed.set()
                    return
                self._frames = pack(items, self._report_unencodable)
        except Exception as error:
            self._stream.close(error)

    def _report_unencodable(self, item: Item, error: Exception) -> None:
        """Drop an item instead of the link: its session recovers by a deadline, and no other one is affected."""
        log.error(
            "a message to %s cannot be encoded and is dropped: %s: %s",
            self._peer, describe_item(item), error,
        )  # fmt: skip

    async def wait_flushed(self) -> None:
        """Return when no item is queued."""
        await self._flushed.wait()

    def is_stalled(self, now: float) -> bool:
        """Return True if the peer has not read for `stalled_seconds` while something is sent."""
        since = self._stream.paused_since
        return since is not None and now - since > self._limits.stalled_seconds


def describe_item(item: Item) -> str:
    """Return the kind of an item with its session or handle, as far as it has them."""
    create = item.create if isinstance(item, Fence) else None
    session = create.session if create is not None else getattr(item, "session", "")
    handle = getattr(item, "handle", NO_HANDLE)
    names = [f"session {session}"] if session else []
    names += [f"handle {handle:#x}"] if handle else []
    return ", ".join([type(item).__name__, *names])


def _item_bytes(item: Item) -> int:
    """Return the approximate size of an item in bytes, in memory and on the wire."""
    match item:
        case Rows(payload=payload):
            return 64 + len(payload)
        case Input(tokens=tokens, rows=rows) | LogChunk(tokens=tokens, rows=rows):
            return 64 + 8 * len(tokens) + len(rows)
        case ModelFileChunk(data=data):
            return 64 + len(data)
        case _:
            return 128
