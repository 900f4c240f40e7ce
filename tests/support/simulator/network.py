"""The links of a simulated swarm: they delay, reorder across lanes and links, break, and repeat.

Behaves as `modelswarm.protocol.link.links` does: a Send dials when there is no link and takes the one that was up first
when there are two; order holds within one lane of one link and nowhere else; when one link of a pair goes, all of them
go and each side hears it once, in its own time. What is in flight on a broken link is lost from some point on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from support.simulator.clock import Clock
from support.simulator.scenario import Weather
from support.simulator.trace import Trace, Violation

from modelswarm.protocol.identity import Address, PeerId, name_of, pod_of
from modelswarm.protocol.messages import Heartbeat, Hello, Item, Lane, Rows, Send

_UNLIMITED = 1 << 60
DIAL_SECONDS = 1.0  # until a dial that nobody answers is given up
_NEVER_REPEATED = (Hello, Heartbeat)


class Endpoint(Protocol):
    """A process, as the network sees it. A restarted process is another endpoint."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> Address: ...
    @property
    def alive(self) -> bool: ...
    @property
    def wakes_at(self) -> float: ...  # until then it is stopped: it neither reads nor writes
    def linked(self, other: Endpoint) -> None: ...
    def unlinked(self, peer: PeerId) -> None: ...
    def received(self, peer: PeerId, item: Item) -> None: ...


class Port:
    """One endpoint's own view of its links."""

    __slots__ = ("dialing", "endpoint", "links", "peer")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.peer = endpoint.address.peer
        self.links: dict[PeerId, list[Link]] = {}
        self.dialing: dict[PeerId, list[Send]] = {}


class Channel:
    """One direction of one lane of one link: first in, first out."""

    __slots__ = ("bytes", "clear", "delivered", "limit", "receiver", "sender", "sent")

    def __init__(self, sender: Port, receiver: Port, clear: float) -> None:
        self.sender = sender
        self.receiver = receiver
        self.clear = clear  # nothing arrives before this
        self.sent = 0
        self.delivered = 0
        self.limit = _UNLIMITED  # messages beyond this number are lost
        self.bytes = 0  # of rows that are on their way


class Link:
    __slots__ = ("acceptor", "broken", "channels", "dialler", "open_at")

    def __init__(self, dialler: Port, acceptor: Port, now: float, answered: float) -> None:
        self.dialler = dialler
        self.acceptor = acceptor
        self.broken = False
        self.open_at = {acceptor.peer}
        self.channels = {
            (sender.peer, lane): Channel(sender, receiver, clear)
            for sender, receiver, clear in (
                (dialler, acceptor, now),
                (acceptor, dialler, answered),
            )
            for lane in Lane
        }

    def far_end(self, port: Port) -> Port:
        return self.acceptor if port is self.dialler else self.dialler


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather, trace: Trace) -> None:
        self.clock = clock
        self.weather = weather
        self.trace = trace
        self.lost = 0
        self.repeated = 0
        self.hushed_until = 0.0
        self.silent_until = 0.0  # links of parted pairs break then at the latest
        self._rng = rng
        self._ports: dict[PeerId, Port] = {}
        self._listening: dict[str, Port] = {}
        self._links: dict[Link, None] = {}
        self._parted: set[frozenset[str]] = set()

    # -- endpoints -------------------------------------------------------------------------

    def join(self, endpoint: Endpoint) -> None:
        port = Port(endpoint)
        self._ports[port.peer] = port
        if endpoint.address.target:
            self._listening[endpoint.address.target] = port

    def died(self, peer: PeerId) -> None:
        """The process is gone; whoever had a link to it hears that in a moment."""
        port = self._ports.pop(peer)
        for links in port.links.values():
            for link in links:
                link.open_at.discard(peer)
                self._break(link)
        for link in [each for each in self._links if each.dialler is port]:
            self._break(link)

    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of process names that are linked now."""
        found = {
            (link.dialler.endpoint.name, link.acceptor.endpoint.name): None for link in self._links
        }
        return list(found)

    def drop(self, one: str, other: str) -> None:
        """Break every link of a pair."""
        names = {one, other}
        for link in list(self._links):
            if {link.dialler.endpoint.name, link.acceptor.endpoint.name} == names:
                self._break(link)

    def part(self, deaf: str, mute: str, silence: float) -> None:
        """From now on these two can't talk, for good: first `deaf` hears nothing, later the links break."""
        self._parted.add(frozenset((deaf, mute)))
        self.silent_until = max(self.silent_until, self.clock.now + silence)
        for link in self._links:
            for channel in link.channels.values():
                if (channel.receiver.endpoint.name, channel.sender.endpoint.name) == (deaf, mute):
                    channel.limit = channel.delivered
        self.clock.after(silence, self.drop, deaf, mute)

    def hush(self, deaf: str, mute: str, seconds: float) -> None:
        """For so long nothing new that `mute` says arrives at `deaf`; nothing is lost, and no link breaks."""
        until = self.clock.now + seconds
        self.hushed_until = max(self.hushed_until, until)
        for link in self._links:
            for channel in link.channels.values():
                if (channel.receiver.endpoint.name, channel.sender.endpoint.name) == (deaf, mute):
                    channel.clear = max(channel.clear, until)

    # -- sending ---------------------------------------------------------------------------

    def send(self, peer: PeerId, send: Send) -> None:
        port = self._ports[peer]
        to = send.to
        if to.peer in port.links:
            self._transmit(port.links[to.peer][0], port, send)
        elif to.target:
            self.dial(peer, to)
            port.dialing[to.peer].append(send)
        else:
            self._lose(port, send)

    def dial(self, peer: PeerId, to: Address) -> None:
        port = self._ports[peer]
        if to.peer not in port.dialing and to.peer not in port.links:
            port.dialing[to.peer] = []
            self.clock.after(self._latency(Lane.LIVE), self._arrive, port, to)

    def _transmit(self, link: Link, port: Port, send: Send) -> None:
        if link.broken:
            self._lose(port, send)
            return
        if self.trace.enabled:
            self.trace.note(
                self.clock.now, port.endpoint.name, f"> {self._name(send.to)}", send.item
            )
        channel = link.channels[port.peer, send.lane]
        channel.clear = max(self.clock.now + self._latency(send.lane), channel.clear)
        channel.sent += 1
        self._fill(channel, send.item)
        self.clock.at(channel.clear, self._deliver, link, channel, channel.sent, send.item)
        if self.weather.duplicate_chance:
            self._perhaps_twice(link, channel, send.item)

    def _fill(self, channel: Channel, item: Item) -> None:
        """Nobody waits for a lane (R11): who sends more than it takes ends it, with everybody's rows."""
        channel.bytes += _size(item)
        if channel.bytes > self.weather.lane_bytes:
            names = channel.sender.endpoint.name, channel.receiver.endpoint.name
            raise Violation(f"{channel.bytes} bytes of rows are on their way {'-'.join(names)}")

    def _perhaps_twice(self, link: Link, channel: Channel, item: Item) -> None:
        if self._rng.random() < self.weather.duplicate_chance:
            late = self._rng.expovariate(1 / self.weather.duplicate_delay)
            if not isinstance(item, _NEVER_REPEATED):
                self.clock.at(channel.clear + late, self._repeat, link, channel, item)

    def _deliver(self, link: Link, channel: Channel, number: int, item: Item) -> None:
        receiver = channel.receiver
        if self._asleep(receiver, self._deliver, link, channel, number, item):
            return
        channel.bytes -= _size(item)
        if number > channel.limit or receiver.peer not in link.open_at:
            self.lost += 1
            return
        channel.delivered = number
        if self.trace.enabled:
            self._note_arrival(receiver, channel.sender, "<", item)
        receiver.endpoint.received(channel.sender.peer, item)

    def _repeat(self, link: Link, channel: Channel, item: Item) -> None:
        if self._asleep(channel.receiver, self._repeat, link, channel, item):
            return
        if channel.limit == _UNLIMITED and channel.receiver.peer in link.open_at:
            self.repeated += 1
            if self.trace.enabled:
                self._note_arrival(channel.receiver, channel.sender, "< again", item)
            channel.receiver.endpoint.received(channel.sender.peer, item)

    def _lose(self, port: Port, send: Send) -> None:
        self.lost += 1
        if self.trace.enabled:
            self.trace.note(
                self.clock.now, port.endpoint.name, f"> {self._name(send.to)} LOST", send.item
            )

    # -- the life of a link ----------------------------------------------------------------

    def _arrive(self, port: Port, to: Address) -> None:
        """A dial reaches the other process: it hears of the link first."""
        acceptor = self._listening.get(to.target)
        if not self._here(port):
            return
        if acceptor is None or not acceptor.endpoint.alive or acceptor.peer != to.peer:
            self.clock.after(self._notice(), self._refused, port, to.peer)
            return
        if self._asleep(acceptor, self._arrive, port, to):
            return
        if frozenset((port.endpoint.name, acceptor.endpoint.name)) in self._parted:
            self.clock.after(self._rng.uniform(0, DIAL_SECONDS), self._refused, port, to.peer)
            return
        answered = self.clock.now + self._latency(Lane.LIVE)
        link = Link(port, acceptor, self.clock.now, answered)
        self._links[link] = None
        self.clock.at(answered, self._answered, port, link)
        if any(old.acceptor is acceptor for old in acceptor.links.get(port.peer, ())):
            self._close(acceptor, port.peer)  # it dials again: the old link is gone
        self._open(acceptor, link)

    def _answered(self, port: Port, link: Link) -> None:
        if not self._here(port) or self._asleep(port, self._answered, port, link):
            return
        if link.broken:
            self._refused(port, link.acceptor.peer)
        else:
            self._open(port, link)
            port.dialing.pop(link.acceptor.peer)

    def _open(self, port: Port, link: Link) -> None:
        far = link.far_end(port)
        link.open_at.add(port.peer)
        links = port.links.setdefault(far.peer, [])
        links.append(link)
        waiting = port.dialing.get(far.peer, [])
        for send in waiting:
            self._transmit(link, port, send)
        waiting.clear()
        if len(links) == 1:
            self.trace.note(self.clock.now, port.endpoint.name, f"linked {far.endpoint.name}")
            port.endpoint.linked(far.endpoint)

    def _refused(self, port: Port, peer: PeerId) -> None:
        if not self._here(port) or self._asleep(port, self._refused, port, peer):
            return
        for send in port.dialing.pop(peer, ()):
            self._lose(port, send)
        if peer not in port.links:
            self._close(port, peer)

    def _break(self, link: Link) -> None:
        if link.broken:
            return
        link.broken = True
        self._links.pop(link)
        for channel in link.channels.values():
            in_flight = channel.sent - channel.delivered
            kept = self._rng.randint(0, in_flight) if self._rng.random() < 0.5 else 0
            channel.limit = min(channel.limit, channel.delivered + kept)
        self.clock.after(self._notice(), self._hear, link.dialler, link)
        self.clock.after(self._notice(), self._hear, link.acceptor, link)

    def _hear(self, port: Port, link: Link) -> None:
        if self._asleep(port, self._hear, port, link):
            return
        peer = link.far_end(port).peer
        if self._here(port) and link in port.links.get(peer, ()):
            self._close(port, peer)

    def _close(self, port: Port, peer: PeerId) -> None:
        """This side gives up all its links to a peer, and hears it once."""
        for link in port.links.pop(peer, ()):
            link.open_at.discard(port.peer)
            self._break(link)
        self.trace.note(self.clock.now, port.endpoint.name, f"unlinked {pod_of(peer)}")
        port.endpoint.unlinked(peer)

    # -- chance ----------------------------------------------------------------------------

    def _latency(self, lane: Lane) -> float:
        weather = self.weather
        mean = weather.latency * (weather.bulk_factor if lane is Lane.BULK else 1.0)
        delay = self._rng.expovariate(1 / mean)
        if weather.spike_chance and self._rng.random() < weather.spike_chance:
            delay += self._rng.uniform(0, weather.spike)
        return delay

    def _notice(self) -> float:
        delay = self._rng.expovariate(1 / self.weather.notice)
        if self._rng.random() < self.weather.late_notice_chance:
            delay += self._rng.uniform(0, self.weather.late_notice)
        return delay

    def _asleep(self, port: Port, action: Callable[..., None], *args: Any) -> bool:
        """Whether the process is stopped; then this happens when it wakes, in the order in which it came."""
        wakes_at = port.endpoint.wakes_at
        if self.clock.now >= wakes_at:
            return False
        self.clock.at(wakes_at, action, *args)
        return True

    def _here(self, port: Port) -> bool:
        return self._ports.get(port.peer) is port

    def _name(self, to: Address) -> str:
        return name_of(to.peer)

    def _note_arrival(self, receiver: Port, sender: Port, what: str, item: Item) -> None:
        self.trace.note(
            self.clock.now, receiver.endpoint.name, f"{what} {sender.endpoint.name}", item
        )


def _size(item: Item) -> int:
    return len(item.payload) if isinstance(item, Rows) else 0
