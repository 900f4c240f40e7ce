"""The handshake of a link: Hello first on each lane, in both directions, and the checks of the peer.

`exchange_hello` is the dialling side of one lane. `LinkAcceptor` is the accepting side: it pairs the two lanes of a
link by the `link` id that the dialling side chose. Refusals are StreamBroken with a reason for people; the acceptor's
reason reaches the other side as the end of its stream. Used by `links.py` on new streams. Knows no sockets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from modelswarm.protocol.heartbeat import MAX_LEASE_SECONDS, counted_lease
from modelswarm.protocol.identity import Address, is_dialled_peer
from modelswarm.protocol.link.hello_checks import hello_fault
from modelswarm.protocol.link.stream import MessageStream, Stream, StreamBroken
from modelswarm.protocol.messages import Hello, Lane, Role
from modelswarm.protocol.wire.codec import FrameError
from modelswarm.protocol.wire.frames import pack, unpack


async def exchange_hello(stream: Stream, hello: Hello, address: Address) -> Hello:
    """Send Hello on a dialled lane, and return the acceptor's. StreamBroken if it is not the dialled peer."""
    await _send_hello(stream, hello)
    answer = await _receive_hello(stream)
    _check_fields(answer)
    _check_version(hello, answer)
    if not is_dialled_peer(answer.peer, address.peer):
        raise StreamBroken(f"other identity: {answer.peer} answers at {address.target}")
    _check_lease(answer)
    if (answer.link, answer.lane) != (hello.link, hello.lane):
        raise StreamBroken("the answer belongs to another link")
    return answer


@dataclass(slots=True)
class LanePair:
    """The two lanes of an accepted link. `complete` is set when both are there, `ended` when either has ended."""

    hello: Hello  # of the lane that came first
    streams: dict[Lane, MessageStream] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


# Accepted lanes without a complete handshake at a time: an unknown process may hold each for the handshake's time.
MAX_HANDSHAKES = 256


class LinkAcceptor:
    """Answers the Hello of accepted lanes and pairs the lanes of a link."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._incomplete: dict[tuple[str, str], LanePair] = {}
        self._handshakes = 0

    async def accept_lane(self, own: Hello, lane: Lane, stream: MessageStream) -> LanePair:
        """Answer a lane's Hello and wait for the link's other lane. Both lanes get the same LanePair."""
        if self._handshakes >= MAX_HANDSHAKES:
            raise StreamBroken(f"{MAX_HANDSHAKES} handshakes are going on already; try again")
        self._handshakes += 1
        try:
            async with asyncio.timeout(self._timeout):
                theirs = await _receive_hello(stream)
                _check_hello(own, theirs, lane)
                await _send_hello(stream, replace(own, link=theirs.link, lane=lane))
                return await self._pair_lanes(theirs, stream)
        except TimeoutError:
            raise StreamBroken("a Hello on both lanes of the link did not arrive in time") from None
        finally:
            self._handshakes -= 1

    async def _pair_lanes(self, hello: Hello, stream: MessageStream) -> LanePair:
        key = (hello.peer, hello.link)
        pair = self._incomplete.setdefault(key, LanePair(hello))
        if replace(hello, lane=pair.hello.lane) != pair.hello or hello.lane in pair.streams:
            raise StreamBroken("the two lanes of a link disagree")
        pair.streams[hello.lane] = stream
        if len(pair.streams) == len(Lane):
            del self._incomplete[key]
            pair.complete.set()
        try:
            await pair.complete.wait()
        except asyncio.CancelledError:
            self._incomplete.pop(key, None)
            pair.ended.set()  # the other lane may have come just now
            raise
        return pair


async def _send_hello(stream: Stream, hello: Hello) -> None:
    for frame in pack([hello]):
        await stream.write(frame)


async def _receive_hello(stream: Stream) -> Hello:
    try:
        items = unpack(await stream.read())
    except FrameError as error:
        raise StreamBroken(f"not a Hello: {error}") from error
    if len(items) != 1 or not isinstance(items[0], Hello):
        raise StreamBroken("the first message is not a Hello")
    return items[0]


def _check_hello(own: Hello, theirs: Hello, lane: Lane) -> None:
    _check_fields(theirs)
    _check_version(own, theirs)
    if theirs.lane != lane:
        raise StreamBroken(f"a Hello for the {theirs.lane.value} lane on the {lane.value} lane")
    if theirs.peer == own.peer:
        raise StreamBroken(f"{theirs.peer!r} cannot be the name of a peer")
    _check_lease(theirs)


def _check_fields(theirs: Hello) -> None:
    """Raise StreamBroken for a field with a forbidden value. The value is not repeated: it may have any length."""
    if fault := hello_fault(theirs):
        raise StreamBroken(f"a Hello with a {fault} that is not allowed")


def _check_version(own: Hello, theirs: Hello) -> None:
    if own.version[0] != theirs.version[0] or abs(own.version[1] - theirs.version[1]) > 1:
        raise StreamBroken(
            f"{theirs.peer} speaks protocol {_format_version(theirs)}, {own.peer} speaks {_format_version(own)}"
        )


def _check_lease(theirs: Hello) -> None:
    if theirs.lease_ms > 1000 * MAX_LEASE_SECONDS:
        raise StreamBroken(
            f"{theirs.peer} states a lease of {theirs.lease_ms} ms; allowed: at most {MAX_LEASE_SECONDS:.0f} s"
        )


def lease_fault(own_seconds: float, theirs: Hello) -> str | None:
    """Return a warning if the two sides of a link have different leases (R19, leases), else None.

    The link is used all the same.
    """
    own_ms = round(1000 * own_seconds)
    if theirs.lease_ms in (0, own_ms):
        return None
    stated = theirs.lease_ms / 1000
    server, gateway = (stated, own_seconds) if theirs.role is Role.SERVER else (own_seconds, stated)
    return (
        f"{theirs.peer} was started with --lease {stated:g}, this process with {own_ms / 1000:g}: "
        f"{counted_lease(server, gateway):g} seconds count between the two; give both the same"
    )


def _format_version(hello: Hello) -> str:
    return ".".join(map(str, hello.version))
