"""The links of a simulated swarm: they delay, reorder across lanes and links, break, and repeat.

Behaves as `modelswarm.protocol.link.links` does. A Send dials when there is no link, and takes the oldest one when
there are two. Order holds within one lane of one link and nowhere else. When one link of a pair breaks, all of them do,
and each side is notified once, in its own time. Messages in flight on a broken link are lost from some point on.
In some worlds every message is encoded and decoded as on a real link.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from support.simulator.clock import Clock
from support.simulator.scenario import Conditions
from support.simulator.trace import Trace, Violation

from modelswarm.protocol.identity import Address, PeerId, name_of, pod_of
from modelswarm.protocol.messages import Heartbeat, Hello, Item, Lane, Rows, Send
from modelswarm.protocol.wire.frames import pack, unpack

Codec: TypeAlias = Callable[[Item], Item]

_UNLIMITED = 1 << 60
LATE_SECONDS = 0.02  # in a scenario with spikes, a message that takes longer is a disturbance
_NEVER_REPEATED = (Hello, Heartbeat)


def over_wire(item: Item) -> Item:
    """Return an item as its receiver reads it."""
    [frame] = pack((item,))
    [received] = unpack(frame)
    return received


class Disturbances:
    """The time until which the scenario disturbs each process: it, its steps, its links or messages on them."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self.long_steps: Counter[PeerId] = (
            Counter()
        )  # steps that took longer than any undisturbed one

    def record(self, until: float, *names: str) -> None:
        for name in names:
            self._until[name] = max(until, self._until.get(name, -math.inf))

    def seconds_since(self, now: float, *names: str) -> float:
        """Return the seconds since one of the processes was disturbed; 0 if one is now."""
        last = max(self._until.get(name, -math.inf) for name in names)
        return max(0.0, now - last)


class Endpoint(Protocol):
    """A process as the network knows it. A restarted process is another endpoint."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> Address: ...
    @property
    def alive(self) -> bool: ...
    @property
    def resumes_at(self) -> float: ...  # until then it is stopped: it neither reads nor writes
    @property
    def replaces(self) -> tuple[PeerId, ...]: ...  # of a gateway, as in its Hello
    def on_link_up(self, other: Endpoint) -> None: ...
    def on_link_down(self, peer: PeerId) -> None: ...
    def on_item(self, peer: PeerId, item: Item) -> None: ...


class Port:
    """The links of one endpoint."""

    __slots__ = ("dialing", "endpoint", "links", "peer")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.peer = endpoint.address.peer
        self.links: dict[PeerId, list[Link]] = {}
        self.dialing: dict[PeerId, list[Send]] = {}


class Channel:
    """One direction of one lane of one link: first in, first out."""

    __slots__ = ("bytes", "clear", "delivered", "limit", "receiver", "sender", "sent", "settled")

    def __init__(self, sender: Port, receiver: Port, clear: float) -> None:
        self.sender = sender
        self.receiver = receiver
        self.clear = clear  # nothing arrives before this
        self.sent = 0
        self.delivered = 0
        self.settled = 0  # messages that were delivered or lost
        self.limit = _UNLIMITED  # messages beyond this number are lost
        self.bytes = 0  # of rows in flight


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
    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        conditions: Conditions,
        trace: Trace,
        codec: Codec | None = None,
    ) -> None:
        self.clock = clock
        self.conditions = conditions
        self.trace = trace
        self._codec = codec
        self.lost = 0
        self.repeated = 0
        self.delayed_until = 0.0
        self.one_way_until = 0.0  # links of parted pairs break then at the latest
        self.disturbances = Disturbances()
        self._rng = rng
        self._ports: dict[PeerId, Port] = {}
        self._listening: dict[str, Port] = {}
        self._links: dict[Link, None] = {}
        self._parted: set[frozenset[str]] = set()
        self._isolated: dict[str, float] = {}  # names of processes without links, until when

    # -- endpoints -------------------------------------------------------------------------

    def join(self, endpoint: Endpoint) -> None:
        port = Port(endpoint)
        self._ports[port.peer] = port
        if endpoint.address.target:
            self._listening[endpoint.address.target] = port

    def remove(self, peer: PeerId) -> None:
        """Remove a killed process and break its links."""
        port = self._ports.pop(peer)
        self.disturbances.record(self.clock.now, port.endpoint.name)
        for links in port.links.values():
            for link in links:
                link.open_at.discard(peer)
                self._break(link)
        for link in [each for each in self._links if each.dialler is port]:
            self._break(link)

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of names of processes with a link."""
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

    def part(self, receiver: str, sender: str, silence: float) -> None:
        """Part two processes for good: `receiver` receives nothing, and after `silence` seconds their links break."""
        self._parted.add(frozenset((receiver, sender)))
        self.disturbances.record(math.inf, receiver, sender)
        self.one_way_until = max(self.one_way_until, self.clock.now + silence)
        for link in self._links:
            for channel in link.channels.values():
                if (channel.receiver.endpoint.name, channel.sender.endpoint.name) == (
                    receiver,
                    sender,
                ):
                    channel.limit = channel.delivered
        self.clock.after(silence, self.drop, receiver, sender)

    def isolate(self, name: str, seconds: float) -> None:
        """Break all links of a process; it gets no others for some seconds."""
        self._isolated[name] = self.clock.now + seconds
        self.disturbances.record(self._isolated[name], name)
        for pair in self.pairs():
            if name in pair:
                self.drop(*pair)

    def _can_link(self, one: str, other: str) -> bool:
        is_isolated = any(self._isolated.get(name, 0.0) > self.clock.now for name in (one, other))
        return not is_isolated and frozenset((one, other)) not in self._parted

    def delay_direction(self, receiver: str, sender: str, seconds: float) -> None:
        """Deliver nothing new from `sender` to `receiver` for some seconds. Nothing is lost, and no link breaks."""
        until = self.clock.now + seconds
        self.delayed_until = max(self.delayed_until, until)
        self.disturbances.record(until, receiver, sender)
        for link in self._links:
            for channel in link.channels.values():
                if (channel.receiver.endpoint.name, channel.sender.endpoint.name) == (
                    receiver,
                    sender,
                ):
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
        item = send.item if self._codec is None else _encode(self._codec, send.item)
        channel = link.channels[port.peer, send.lane]
        channel.clear = max(self.clock.now + self._latency(send.lane), channel.clear)
        if self.conditions.spike_chance and channel.clear > self.clock.now + LATE_SECONDS:
            self.disturbances.record(
                channel.clear, port.endpoint.name, channel.receiver.endpoint.name
            )
        channel.sent += 1
        self._count_bytes(channel, item)
        self.clock.at(channel.clear, self._deliver, link, channel, channel.sent, item)
        if self.conditions.duplicate_chance:
            self._maybe_duplicate(link, channel, item)

    def _count_bytes(self, channel: Channel, item: Item) -> None:
        """Check the limit of a lane: beyond it a real lane ends, with the rows of all sessions (R11, windows)."""
        channel.bytes += _size(item)
        if channel.bytes > self.conditions.max_lane_bytes:
            names = channel.sender.endpoint.name, channel.receiver.endpoint.name
            raise Violation(f"{channel.bytes} bytes of rows are in flight {'-'.join(names)}")

    def _maybe_duplicate(self, link: Link, channel: Channel, item: Item) -> None:
        if self._rng.random() < self.conditions.duplicate_chance:
            late = self._rng.expovariate(1 / self.conditions.duplicate_delay)
            if not isinstance(item, _NEVER_REPEATED):
                self.clock.at(channel.clear + late, self._repeat, link, channel, item)

    def _deliver(self, link: Link, channel: Channel, number: int, item: Item) -> None:
        receiver = channel.receiver
        if self._postpone(receiver, self._deliver, link, channel, number, item):
            return
        if number > channel.settled + 1:  # an earlier one was postponed more often
            self.clock.at(self.clock.now, self._deliver, link, channel, number, item)
            return
        channel.settled = number
        channel.bytes -= _size(item)
        if number > channel.limit or receiver.peer not in link.open_at:
            self.lost += 1
            return
        channel.delivered = number
        if self.trace.enabled:
            self._note_arrival(receiver, channel.sender, "<", item)
        receiver.endpoint.on_item(channel.sender.peer, item)

    def _repeat(self, link: Link, channel: Channel, item: Item) -> None:
        if self._postpone(channel.receiver, self._repeat, link, channel, item):
            return
        if channel.limit == _UNLIMITED and channel.receiver.peer in link.open_at:
            self.repeated += 1
            if self.trace.enabled:
                self._note_arrival(channel.receiver, channel.sender, "< again", item)
            channel.receiver.endpoint.on_item(channel.sender.peer, item)

    def _lose(self, port: Port, send: Send) -> None:
        self.lost += 1
        if self.trace.enabled:
            self.trace.note(
                self.clock.now, port.endpoint.name, f"> {self._name(send.to)} LOST", send.item
            )

    # -- the life of a link ----------------------------------------------------------------

    def _arrive(self, port: Port, to: Address) -> None:
        """A dial reaches the other process, which is notified first."""
        acceptor = self._listening.get(to.target)
        if not self._is_running(port):
            return
        if acceptor is None or not acceptor.endpoint.alive or acceptor.peer != to.peer:
            self.clock.after(self._link_down_delay(), self._refused, port, to.peer)
            return
        if self._postpone(acceptor, self._arrive, port, to):
            return
        if not self._can_link(port.endpoint.name, acceptor.endpoint.name):
            self.clock.after(
                self._rng.uniform(0, self.conditions.dial_seconds), self._refused, port, to.peer
            )
            return
        answered = self.clock.now + self._latency(Lane.LIVE)
        link = Link(port, acceptor, self.clock.now, answered)
        self._links[link] = None
        self.clock.at(answered, self._answered, port, link)
        if any(old.acceptor is acceptor for old in acceptor.links.get(port.peer, ())):
            self._close(acceptor, port.peer)  # a second dial: the old link is gone
        self._open(acceptor, link)

    def _answered(self, port: Port, link: Link) -> None:
        if not self._is_running(port) or self._postpone(port, self._answered, port, link):
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
            port.endpoint.on_link_up(far.endpoint)

    def _refused(self, port: Port, peer: PeerId) -> None:
        if not self._is_running(port) or self._postpone(port, self._refused, port, peer):
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
            delivered = self._rng.randint(0, in_flight) if self._rng.random() < 0.5 else 0
            channel.limit = min(channel.limit, channel.delivered + delivered)
        self.clock.after(self._link_down_delay(), self._notify, link.dialler, link)
        self.clock.after(self._link_down_delay(), self._notify, link.acceptor, link)

    def _notify(self, port: Port, link: Link) -> None:
        if self._postpone(port, self._notify, port, link):
            return
        peer = link.far_end(port).peer
        if self._is_running(port) and link in port.links.get(peer, ()):
            self._close(port, peer)

    def _close(self, port: Port, peer: PeerId) -> None:
        """Close all links to a peer on this side, and notify its process once."""
        for link in port.links.pop(peer, ()):
            link.open_at.discard(port.peer)
            self._break(link)
        self.trace.note(self.clock.now, port.endpoint.name, f"unlinked {pod_of(peer)}")
        port.endpoint.on_link_down(peer)

    # -- chance ----------------------------------------------------------------------------

    def _latency(self, lane: Lane) -> float:
        conditions = self.conditions
        mean = conditions.latency * (conditions.bulk_factor if lane is Lane.BULK else 1.0)
        delay = self._rng.expovariate(1 / mean)
        if conditions.spike_chance and self._rng.random() < conditions.spike_chance:
            delay += self._rng.uniform(0, conditions.spike)
        return delay

    def _link_down_delay(self) -> float:
        delay = self._rng.expovariate(1 / self.conditions.link_down_delay)
        if self._rng.random() < self.conditions.slow_link_down_chance:
            delay += self._rng.uniform(0, self.conditions.slow_link_down_delay)
        return delay

    def _postpone(self, port: Port, action: Callable[..., None], *args: Any) -> bool:
        """True if the process is stopped. The action is then run when it resumes, in the order of arrival."""
        resumes_at = port.endpoint.resumes_at
        if self.clock.now >= resumes_at:
            return False
        self.clock.at(resumes_at, action, *args)
        return True

    def _is_running(self, port: Port) -> bool:
        return self._ports.get(port.peer) is port

    def _name(self, to: Address) -> str:
        return name_of(to.peer)

    def _note_arrival(self, receiver: Port, sender: Port, what: str, item: Item) -> None:
        self.trace.note(
            self.clock.now, receiver.endpoint.name, f"{what} {sender.endpoint.name}", item
        )


def _encode(codec: Codec, item: Item) -> Item:
    try:
        received = codec(item)
    except ValueError as error:
        raise Violation(f"{item} has no frame: {error}") from error
    if received != item:
        raise Violation(f"{item} is read as {received}")
    return received


def _size(item: Item) -> int:
    return len(item.payload) if isinstance(item, Rows) else 0
