"""A real gateway core as an actor of the in-memory network, with the calls of its node and its clients."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, Unpack

from support.core.actor import Actor
from support.core.network import Network
from support.core.server import MODEL, Options, Server
from typing_extensions import override

from modelswarm.protocol.identity import PeerId
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
from modelswarm_gateway.core.interface.effects import (
    Effect,
    Emitted,
    Refused,
    RowsReturned,
    SessionLost,
)
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.core.interface.views import SessionView

FOREVER = 1 << 40
LEASE = 10.0  # seconds
ROW_BYTES = 8  # of the hash model
TWICE = ((0, 2), (0, 2), (2, 4), (2, 4))  # two servers for each of two spans
E = TypeVar("E", bound=Effect)


@dataclass(eq=False)
class Gateway(Actor):
    network: Network
    core: GatewayCore
    effects: list[Effect] = field(default_factory=list)  # all effects but sends
    opened: set[str] = field(default_factory=set)  # sessions; a lost session is not opened again
    sampling: Sampling = field(default_factory=Sampling)  # of the turns that begin

    @override
    def connect(self, hello: Hello, now: float) -> None:
        self.core.on_peer_connected(hello, now)

    @override
    def disconnect(self, peer: PeerId, now: float) -> None:
        self.core.on_peer_lost(peer, now)

    @override
    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        self.core.receive(sender, item, now)

    @override
    def take_sends(self) -> list[Send]:
        new = self.core.take_effects()
        self.effects += [effect for effect in new if not isinstance(effect, Send)]
        return [effect for effect in new if isinstance(effect, Send)]

    @override
    def tick(self, now: float) -> None:
        self.core.tick(now)

    @override
    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    # ---- calls of the node and of clients

    def begin(
        self,
        session: str,
        log: Iterable[int],
        new: int | None,
        ahead: int = FOREVER,
        above: int | None = None,
        parent: str = "",
    ) -> None:
        """Start a turn that stops when it is `ahead` tokens beyond its reader. The first turn opens its session.

        `above`: the highest epoch counter of that name at other gateways; None: the session has no name. `parent`: the
        session that a first turn forks from.
        """
        if session not in self.opened and self.core.find_view(session) is None:
            self.core.open_session(session, MODEL, self.network.now, above)
        self.opened.add(session)
        request = TurnRequest(
            tuple(log), new, self.sampling, credit_ahead=ahead, parent=parent, row_bytes=ROW_BYTES
        )
        self.core.start_turn(session, request, self.network.now)

    def start(
        self,
        session: str,
        log: Iterable[int],
        new: int | None,
        ahead: int = FOREVER,
        above: int | None = None,
        parent: str = "",
    ) -> None:
        """Start a turn, and run until the network is idle."""
        self.begin(session, log, new, ahead, above, parent)
        self.network.run()

    def clear_and_start(self, session: str, log: Iterable[int], new: int | None) -> None:
        """Forget all effects, and start a turn."""
        self.effects.clear()
        self.start(session, log, new)

    def read(self, session: str, position: int = FOREVER) -> None:
        """Tell the core that the client has read up to `position`, and run until the network is idle."""
        self.core.on_read(session, position, self.network.now)
        self.network.run()

    def find(self, session: str, opens: bool = False) -> SessionLocation:
        self.core.find_session(session, MODEL, self.network.now, claims=opens)
        self.network.run()
        return self.last(SessionLocation)

    def fetch(self, where: SessionLocation) -> FetchedLog:
        self.core.fetch_log(where.session, where.log_holders[0], self.network.now)
        self.network.run()
        return self.last(FetchedLog)

    def adopt(self, where: SessionLocation) -> list[int]:
        """Take a session over; return its log."""
        log = self.fetch(where)
        self.core.take_over(where, MODEL, log, self.network.now)
        return list(log.tokens)

    # ---- effects

    def all(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def rows(self, session: str) -> list[tuple[int, int]]:
        """Return the positions and the values of the returned rows."""
        return [
            (each.start + at, row)
            for each in self.all(RowsReturned)
            if each.session == session
            for at, (row,) in enumerate(struct.iter_unpack("<Q", each.payload))
        ]

    def last(self, kind: type[E]) -> E:
        return self.all(kind)[-1]

    def tokens(self, session: str) -> list[int]:
        return [each.token for each in self.all(Emitted) if each.session == session]

    def troubles(self, session: str) -> list[SessionLost | Refused]:
        mine = (e for e in self.effects if isinstance(e, SessionLost | Refused))
        return [effect for effect in mine if effect.session == session]

    def view(self, session: str) -> SessionView:
        view = self.core.find_view(session)
        assert view is not None
        return view

    def route(self, session: str) -> list[PeerId]:
        return [hop.peer for hop in self.view(session).route]


def add_gateway(
    network: Network,
    number: int = 1,
    settings: GatewaySettings | None = None,
    draw: Callable[[], int] | None = None,
    replaces: tuple[PeerId, ...] = (),
) -> Gateway:
    """Attach a gateway. At equal epoch counters, the higher `number` has the higher epoch. `draw`: 64 random bits.

    `replaces`: gateways whose processes have ended.

    Without settings, its lease is that of the network's servers.
    """
    lease = network.options.get("lease_seconds", GatewaySettings().lease_seconds)
    settings = settings or GatewaySettings(lease_seconds=lease)
    peer = f"gateway{number}/{number}/a"
    draws = random.Random(peer)
    core = GatewayCore(settings, peer, number, draw or (lambda: draws.getrandbits(64)))
    hello = Hello(
        PROTOCOL_VERSION,
        peer,
        Role.GATEWAY,
        "",
        Lane.LIVE,
        target=f"{peer}:8000",
        lease_ms=round(1000 * settings.lease_seconds),
        replaces=replaces,
    )
    return network.join(Gateway(hello, network, core))


def takeover_network(seed: int | None = None) -> Network:
    """Return a network without processes, with leases of `LEASE`."""
    return Network(seed, Options(lease_seconds=LEASE))


@dataclass
class Swarm(Network):
    """Servers and one gateway. `serve` and `kill` run until the network is idle."""

    settings: GatewaySettings = field(default_factory=GatewaySettings, kw_only=True)
    draw: Callable[[], int] | None = field(default=None, kw_only=True)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.gateway = add_gateway(self, 1, self.settings, self.draw)

    @property
    def core(self) -> GatewayCore:
        return self.gateway.core

    @property
    def effects(self) -> list[Effect]:
        return self.gateway.effects

    def disturb(self, rng: random.Random, kill: float = 0.2, undrain: float = 1.0) -> None:
        """Drain a server of session "a" or not, replace any server or not, and end drains.

        `kill`, `undrain`: probabilities, of a replacement and of the end of each drain.
        """
        route = self.gateway.route("a")  # empty once the turn has ended on drained servers
        if route and rng.random() < 0.2:
            self.core.migrations.drain(rng.choice(route), "drain", self.now)
        if rng.random() < kill:
            victim = rng.choice(list(self.servers.values()))
            self.kill(victim.peer)
            self.serve(victim.hello.first, victim.hello.last)
        for peer in list(self.core._registry.drains.peers):
            if undrain >= 1 or rng.random() < undrain:
                self.core.migrations.undrain(peer, "drain", self.now)

    @override
    def serve(
        self,
        first: int,
        last: int,
        hello: Mapping[str, object] | None = None,
        **options: Unpack[Options],
    ) -> Server:
        server = super().serve(first, last, hello, **options)
        self.run()
        return server

    @override
    def kill(self, peer: PeerId) -> None:
        super().kill(peer)
        self.run()

    def route(self, session: str) -> list[Server]:
        """Return the servers of a session."""
        return [self.servers[peer] for peer in self.gateway.route(session)]


def swarm_of(*spans: tuple[int, int], **options: Unpack[Options]) -> Swarm:
    swarm = Swarm()
    for first, last in spans:
        swarm.serve(first, last, **options)
    return swarm
