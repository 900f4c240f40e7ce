"""The in-memory network of the core tests: sans-I/O processes, FIFO lanes between them, one virtual clock.

A test attaches actors, and moves the clock with `wait` or `tick`. Without a seed, lanes deliver before steps are made,
the lane that has waited longest first. With a seed, deliveries and steps interleave at random. Links can be cut. Items
can be held, dropped, put, and inspected. Unlike the simulator's network, it adds no delays and no faults of its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, Unpack

from support.core.actor import Actor
from support.core.server import Options, Server, make_server

from modelswarm.protocol.heartbeat import BUSY_SECONDS
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Item, Lane, Role, Send

LaneKey: TypeAlias = tuple[PeerId, PeerId, Lane]  # sender, receiver, lane
A = TypeVar("A", bound=Actor)
T = TypeVar("T", bound=Item)


@dataclass
class Network:
    seed: int | None = None
    options: Options = field(default_factory=Options)  # defaults of every server
    now: float = 0.0
    tick_seconds: float = 0.1  # step of `wait`
    actors: dict[PeerId, Actor] = field(default_factory=dict)
    links: dict[tuple[PeerId, PeerId], None] = field(default_factory=dict)  # both directions
    lanes: dict[LaneKey, deque[Item]] = field(default_factory=dict)  # items in transit
    held: set[LaneKey] = field(default_factory=set)  # lanes on which `run` delivers nothing
    dropped: set[tuple[PeerId, PeerId]] = field(default_factory=set)  # (sender, receiver)
    record: list[tuple[PeerId, Send]] = field(default_factory=list)  # everything that cores sent

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._served = 0

    # ---- processes and links

    @property
    def servers(self) -> dict[PeerId, Server]:
        return {peer: each for peer, each in self.actors.items() if isinstance(each, Server)}

    def serve(
        self,
        first: int,
        last: int,
        hello: Mapping[str, object] | None = None,
        **options: Unpack[Options],
    ) -> Server:
        """Attach a new server of the blocks [first, last)."""
        chosen: Options = {**self.options, **options}
        self._served += 1
        return self.join(make_server(f"s{self._served - 1}", first, last, hello, **chosen))

    def join(self, actor: A) -> A:
        """Attach an actor, and link it to all others; two gateways are not linked."""
        self.actors[actor.peer] = actor
        for other in list(self.actors.values()):
            if other is not actor and Role.SERVER in (actor.hello.role, other.hello.role):
                self.link(other.peer, actor.peer)
        return actor

    def link(self, one: PeerId, other: PeerId) -> None:
        for peer, far in ((one, other), (other, one)):
            self.links[peer, far] = None
            self.actors[peer].connect(self.actors[far].hello, self.now)
        self.collect()

    def cut_link(self, one: PeerId, other: PeerId) -> None:
        """Lose the items in transit between the two, and tell both."""
        for peer, far in ((one, other), (other, one)):
            self.links.pop((peer, far), None)
            for lane in Lane:
                self.lanes.pop((peer, far, lane), None)
            if peer in self.actors:
                self.actors[peer].disconnect(far, self.now)
        self.collect()

    def kill(self, peer: PeerId) -> None:
        """End a process. Its links are cut."""
        del self.actors[peer]
        for far in self.peers_of(peer):
            self.cut_link(peer, far)

    def remove(self, peer: PeerId) -> None:
        """End a process without telling the others. Later items to it are lost."""
        del self.actors[peer]

    def drop(self, sender: PeerId, receiver: PeerId) -> None:
        """Lose all further items from sender to receiver. Neither is told."""
        self.dropped.add((sender, receiver))

    def peers_of(self, peer: PeerId) -> list[PeerId]:
        return [far for near, far in self.links if near == peer]

    # ---- items

    def put(self, sender: PeerId, to: PeerId, item: Item, lane: Lane = Lane.LIVE) -> None:
        if (sender, to) not in self.dropped:
            self.lanes.setdefault((sender, to, lane), deque()).append(item)

    def collect(self) -> None:
        """Put the items that cores want to send on the lanes."""
        for actor in list(self.actors.values()):
            self._collect_from(actor)

    def _collect_from(self, actor: Actor) -> None:
        if actor.frozen:
            return
        for send in actor.take_sends():
            self.record.append((actor.peer, send))
            self.put(actor.peer, send.to.peer, send.item, send.lane)

    def deliver(self, key: LaneKey) -> None:
        """Deliver the first item of a lane."""
        sender, to, _ = key
        items = self.lanes[key]
        item = items.popleft()
        if not items:
            del self.lanes[key]
        if actor := self.actors.get(to):
            actor.receive(sender, item, self.now)
            self._collect_from(actor)

    def deliver_all(self, sender: PeerId | None = None, to: PeerId | None = None) -> None:
        """Deliver until no item is in transit, only from `sender` or to `to` if given. No step is made."""
        self.collect()
        while keys := [
            key for key in self._ready_lanes() if sender in (None, key[0]) and to in (None, key[1])
        ]:
            self.deliver(keys[0])

    def sent(self, kind: type[Item], sender: PeerId | None = None) -> list[Send]:
        return [
            send
            for name, send in self.record
            if isinstance(send.item, kind) and sender in (None, name)
        ]

    def sent_to(self, peer: PeerId, kind: type[T]) -> list[T]:
        """Return the items of a kind that were sent to one process."""
        return [
            send.item
            for _, send in self.record
            if send.to.peer == peer and isinstance(send.item, kind)
        ]

    # ---- time

    def run(self, events: int = 1_000_000, until: Callable[[], bool] = lambda: False) -> None:
        """Deliver and step until the network is idle, or `until` holds, at most `events` times."""
        self.collect()
        for _ in range(events):
            if until() or not self._move():
                return

    def _move(self) -> bool:
        """Make one delivery, or begin or end one step. Return False if there is none."""
        moves: list[LaneKey | Actor] = [*self._ready_lanes()]
        moves += [actor for actor in self.actors.values() if not actor.frozen]
        while moves:
            chosen = moves.pop(0 if self.seed is None else self.random.randrange(len(moves)))
            if not isinstance(chosen, Actor):
                self.deliver(chosen)
                return True
            if chosen.step(self.now):
                self._collect_from(chosen)
                return True
        return False

    def _ready_lanes(self) -> list[LaneKey]:
        return [
            key
            for key, items in self.lanes.items()
            if items
            and key not in self.held
            and not (key[1] in self.actors and self.actors[key[1]].frozen)
        ]

    def tick(self, seconds: float, every: float = 2 * BUSY_SECONDS) -> None:
        """Let time pass for every process. Nothing is delivered and no step is made."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + every)
            self._tick_actors()

    def wait(self, seconds: float, tick: float | None = None) -> None:
        """Let time pass, with heartbeats over all links at each tick."""
        tick = tick or self.tick_seconds
        for _ in range(round(seconds / tick)):
            self.now += tick
            self._tick_actors()
            self._send_heartbeats()
            self.run()

    def _send_heartbeats(self) -> None:
        for peer, far in list(self.links):
            actor, other = self.actors.get(peer), self.actors.get(far)
            if not actor or not other or actor.frozen or actor.hello.role == other.hello.role:
                continue
            if heartbeat := actor.heartbeat():
                self.put(peer, far, heartbeat)

    def _tick_actors(self) -> None:
        for actor in list(self.actors.values()):
            if not actor.frozen:
                actor.tick(self.now)
                self._collect_from(actor)
