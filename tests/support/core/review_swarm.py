"""A gateway core and server cores on the hash model, joined by hand: every message is delivered at once, in order.

Used by the tests of single findings, which need one exact course of events and no weather.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Item,
    Lane,
    Role,
    Sampling,
    Send,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect, Emitted, Refused, SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape, Result
from modelswarm_serving.model.hash_model import HashModel, reference_tokens

GATEWAY = "gateway/1/a"
VOCABULARY = 97
MODEL = "m"


@dataclass
class Server:
    hello: Hello
    core: ServerCore
    model: HashModel
    broken: bool = False  # every step fails
    lazy: bool = False  # it runs no steps
    stuck: bool = False  # its next step never ends
    frozen: bool = False  # it does nothing and says nothing, and what it is sent waits

    @property
    def peer(self) -> PeerId:
        return self.hello.peer

    def step(self, now: float) -> bool:
        work = () if self.lazy else self.core.plan_step(now)
        if not work or self.stuck:
            return False
        failed = [Result(error="CUDA error: device-side assert triggered")] * len(work)
        self.core.finish_step(failed if self.broken else self.model.step(work), now)
        return True


@dataclass
class Swarm:
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    now: float = 0.0
    servers: dict[PeerId, Server] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        draws = random.Random("gateway")
        self.core = GatewayCore(self.settings, GATEWAY, 1, lambda: draws.getrandbits(64))
        self._queue: deque[tuple[PeerId, PeerId, Item]] = deque()
        self._frozen: list[tuple[PeerId, PeerId, Item]] = []
        self._swallowed: set[tuple[PeerId, PeerId]] = set()
        self._made = 0

    def serve(
        self,
        first: int,
        last: int,
        *,
        n_blocks: int = 4,
        revision: str = "r1",
        dtype: str = "float32",
        row_bytes: int = 8,
        max_length: int = 4096,
        pages: int = 256,
        page_size: int = 4,
        replay_bytes: int = 1 << 20,
        link: bool = True,
    ) -> Server:
        self._made += 1
        name = f"s{self._made}/1/b"
        shape = ModelShape(
            first, last, n_blocks, row_bytes, page_size, pages, max_length, VOCABULARY
        )
        address = Address(name, f"{name}:1")
        draws = random.Random(name)
        core = ServerCore(
            ServerSettings(address, replay_bytes=replay_bytes), shape, lambda: draws.getrandbits(64)
        )
        hello = Hello(
            PROTOCOL_VERSION,
            name,
            Role.SERVER,
            "",
            Lane.LIVE,
            target=address.target,
            model=MODEL,
            revision=revision,
            first=first,
            last=last,
            n_blocks=n_blocks,
            dtype=dtype,
            row_bytes=row_bytes,
            max_length=core.max_session_length,
            total_pages=pages,
            page_size=page_size,
        )
        server = self.servers[name] = Server(hello, core, HashModel(shape))
        for other in self.servers.values():
            if other is not server:
                core.on_peer_connected(other.peer, Role.SERVER, self.now)
                other.core.on_peer_connected(name, Role.SERVER, self.now)
        if link:
            self.link(server)
        return server

    def link(self, server: Server, **lies: object) -> None:
        server.core.on_peer_connected(GATEWAY, Role.GATEWAY, self.now)
        self.core.on_peer_connected(replace(server.hello, **lies), self.now)  # type: ignore[arg-type]
        self.run()

    def unlink(self, server: Server) -> None:
        server.core.on_peer_lost(GATEWAY, self.now)
        self.core.on_peer_lost(server.peer, self.now)
        self.run()

    def kill(self, server: Server) -> None:
        """The process is gone, and everybody hears it."""
        del self.servers[server.peer]
        self.core.on_peer_lost(server.peer, self.now)
        for other in self.servers.values():
            other.core.on_peer_lost(server.peer, self.now)
        self.run()

    def freeze(self, server: Server) -> None:
        """As SIGSTOP does: its links stay up."""
        server.frozen = True

    def thaw(self, server: Server) -> None:
        """As SIGCONT: it goes on with what it has been sent meanwhile."""
        server.frozen = False
        waited, self._frozen = self._frozen, []
        for sender, to, item in waited:
            (self._queue if to == server.peer else self._frozen).append((sender, to, item))
        self.run()

    def swallow(self, sender: Server, receiver: Server) -> None:
        """From now on nothing that one says reaches the other, and nobody is told."""
        self._swallowed.add((sender.peer, receiver.peer))

    def run(self) -> None:
        """Until nothing moves."""
        while True:
            self._collect()
            if self._queue:
                sender, to, item = self._queue.popleft()
                if (sender, to) in self._swallowed:
                    continue
                if to == GATEWAY:
                    self.core.receive(sender, item, self.now)
                elif to in self.servers and self.servers[to].frozen:
                    self._frozen.append((sender, to, item))
                elif to in self.servers:
                    self.servers[to].core.receive(sender, item, self.now)
            else:
                stepped = [s.step(self.now) for s in self.servers.values() if not s.frozen]
                if not any(stepped):
                    return

    def wait(self, seconds: float, tick: float = 0.1) -> None:
        for _ in range(round(seconds / tick)):
            self.now += tick
            for server in self.servers.values():
                server.core.tick(self.now)
                if not server.frozen and (server.peer, GATEWAY) not in self._swallowed:
                    self.core.receive(server.peer, server.core.heartbeat(), self.now)
            self.core.tick(self.now)
            self.run()

    def _collect(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, Send):
                self._queue.append((GATEWAY, effect.to.peer, effect.item))
            else:
                self.effects.append(effect)
        for name, server in self.servers.items():
            self._queue.extend((name, send.to.peer, send.item) for send in server.core.take_sends())

    # ---- a client

    def ask(
        self, session: str, prompt: Iterable[int], new: int | None, sampling: Sampling | None = None
    ) -> None:
        """One turn of a session that is open; `answer` has what came of it."""
        self.effects.clear()
        request = TurnRequest(tuple(prompt), new, sampling or Sampling(), credit_ahead=1 << 40)
        self.core.start_turn(session, request, self.now)
        self.run()

    def answer(self, session: str) -> list[int]:
        mine = (e for e in self.effects if isinstance(e, Emitted) and e.session == session)
        return [e.token for e in mine]

    def troubles(self, session: str) -> list[SessionLost | Refused]:
        mine = (e for e in self.effects if isinstance(e, SessionLost | Refused))
        return [e for e in mine if e.session == session]


def expected(prompt: list[int], new: int, n_blocks: int = 4) -> list[int]:
    return reference_tokens(
        prompt, Sampling(), new, len(prompt) + new, n_blocks=n_blocks, vocabulary=VOCABULARY
    )
