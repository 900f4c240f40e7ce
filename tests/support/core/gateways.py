"""Several gateway cores over the same server cores on the hash model, joined by hand.

Used by the tests of gateway loss. Messages keep their order per pair; with a seed, pairs and steps take turns at
random. Time moves only by `wait`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from support.core.review_swarm import MODEL, VOCABULARY, Server

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Item,
    Lane,
    Role,
    Sampling,
    Send,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect, Emitted
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.hash_model import HashModel

LEASE = 10.0


@dataclass
class Gateway:
    """One of them, as its node would drive it."""

    name: PeerId
    core: GatewayCore
    effects: list[Effect] = field(default_factory=list)

    def last(self, kind: type[Effect]) -> Effect:
        return [effect for effect in self.effects if isinstance(effect, kind)][-1]

    def tokens(self, session: str) -> list[int]:
        mine = (e for e in self.effects if isinstance(e, Emitted) and e.session == session)
        return [e.token for e in mine]


@dataclass
class Gateways:
    seed: int | None = None
    lease: float = LEASE
    n_blocks: int = 4
    now: float = 0.0
    gateways: dict[PeerId, Gateway] = field(default_factory=dict)
    servers: dict[PeerId, Server] = field(default_factory=dict)
    frozen: set[PeerId] = field(default_factory=set)  # gateways that stand still
    lanes: dict[tuple[PeerId, PeerId], deque[Item]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def serve(self, first: int, last: int) -> Server:
        name = f"s{len(self.servers)}/1/b"
        shape = ModelShape(first, last, self.n_blocks, 8, 4, 256, 4096, VOCABULARY)
        address = Address(name, f"{name}:1")
        draws = random.Random(name)
        core = ServerCore(
            ServerSettings(address, lease_seconds=self.lease), shape, lambda: draws.getrandbits(64)
        )
        hello = Hello(
            PROTOCOL_VERSION,
            name,
            Role.SERVER,
            "",
            Lane.LIVE,
            target=address.target,
            model=MODEL,
            revision="r1",
            first=first,
            last=last,
            n_blocks=self.n_blocks,
            dtype="float32",
            row_bytes=8,
            max_length=core.max_session_length,
            total_pages=256,
            page_size=4,
        )
        server = self.servers[name] = Server(hello, core, HashModel(shape))
        for other in self.servers.values():
            if other is not server:
                core.on_peer_connected(other.peer, Role.SERVER, self.now)
                other.core.on_peer_connected(name, Role.SERVER, self.now)
        return server

    def gateway(self, number: int, lease: float | None = None) -> Gateway:
        """The higher its number, the higher its epochs of the same counter."""
        lease = self.lease if lease is None else lease
        name = f"gateway{number}/{number}/a"
        draws = random.Random(name)
        settings = GatewaySettings(lease_seconds=lease)
        core = GatewayCore(settings, name, number, lambda: draws.getrandbits(64))
        made = self.gateways[name] = Gateway(name, core)
        for server in self.servers.values():
            server.core.on_peer_connected(name, Role.GATEWAY, self.now, f"{name}:8000", lease)
            core.on_peer_connected(server.hello, self.now)
        self.run()
        return made

    def kill(self, gateway: Gateway) -> None:
        """The process is gone, its links with it."""
        del self.gateways[gateway.name]
        for key in [key for key in self.lanes if gateway.name in key]:
            del self.lanes[key]
        for server in self.servers.values():
            server.core.on_peer_lost(gateway.name, self.now)
        self.run()

    def cut(self, gateway: Gateway, server: PeerId) -> None:
        """Their link breaks, and does not come back."""
        for key in ((gateway.name, server), (server, gateway.name)):
            self.lanes.pop(key, None)
        self.servers[server].core.on_peer_lost(gateway.name, self.now)
        gateway.core.on_peer_lost(server, self.now)
        self.run()

    def lose(self, server: PeerId) -> None:
        """The server is gone, its links with it."""
        del self.servers[server]
        for key in [key for key in self.lanes if server in key]:
            del self.lanes[key]
        for gateway in self.gateways.values():
            gateway.core.on_peer_lost(server, self.now)
        for other in self.servers.values():
            other.core.on_peer_lost(server, self.now)
        self.run()

    def deliver_all(self, sender: PeerId, to: PeerId) -> None:
        """All that is on its way between the two now."""
        while self.lanes.get((sender, to)):
            self._deliver((sender, to))

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until nothing moves, or `until` holds."""
        while until is None or not until():
            self.collect()
            ready = [k for k, lane in self.lanes.items() if lane and k[1] not in self.frozen]
            if ready and (self.seed is None or self._random.random() < 0.8):
                self._deliver(ready[0] if self.seed is None else self._random.choice(ready))
            elif sum(server.step(self.now) for server in self.servers.values()) == 0 and not ready:
                return

    def _deliver(self, key: tuple[PeerId, PeerId]) -> None:
        sender, to = key
        item = self.lanes[key].popleft()
        if to in self.gateways:
            self.gateways[to].core.receive(sender, item, self.now)
        elif to in self.servers:
            self.servers[to].core.receive(sender, item, self.now)

    def wait(self, seconds: float, tick: float = 0.1) -> None:
        for _ in range(round(seconds / tick)):
            self.now += tick
            for name, gateway in self.gateways.items():
                if name not in self.frozen:
                    gateway.core.tick(self.now)
                    for peer in self.servers:
                        self.lanes.setdefault((name, peer), deque()).append(Heartbeat())
            for server in self.servers.values():
                server.core.tick(self.now)
            self.run()

    def collect(self) -> None:
        for name, gateway in self.gateways.items():
            if name in self.frozen:
                continue
            for effect in gateway.core.take_effects():
                if isinstance(effect, Send):
                    self.lanes.setdefault((name, effect.to.peer), deque()).append(effect.item)
                else:
                    gateway.effects.append(effect)
        for name, server in self.servers.items():
            for send in server.core.take_sends():
                self.lanes.setdefault((name, send.to.peer), deque()).append(send.item)

    # ---- what a node does

    def open(
        self, gateway: Gateway, session: str, prompt: Iterable[int], new: int, ahead: int
    ) -> None:
        """A turn that stops when it is `ahead` tokens beyond its reader."""
        gateway.core.open_session(session, MODEL, self.now, above=0)
        self.turn(gateway, session, prompt, new, ahead)

    def turn(
        self, gateway: Gateway, session: str, log: Iterable[int], new: int, ahead: int
    ) -> None:
        request = TurnRequest(tuple(log), new, Sampling(), credit_ahead=ahead)
        gateway.core.start_turn(session, request, self.now)

    def find(self, gateway: Gateway, session: str, opens: bool = False) -> SessionLocation:
        gateway.core.find_session(session, MODEL, self.now, claims=opens)
        self.run()
        found = gateway.last(SessionLocation)
        assert isinstance(found, SessionLocation)
        return found

    def fetch(self, gateway: Gateway, where: SessionLocation) -> FetchedLog:
        gateway.core.fetch_log(where.session, where.log_holders[0], self.now)
        self.run()
        fetched = gateway.last(FetchedLog)
        assert isinstance(fetched, FetchedLog)
        return fetched
