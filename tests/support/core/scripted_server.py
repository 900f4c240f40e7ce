"""Servers that do only what a test tells them, under a real gateway core: they grant every Fence, and nothing else.

For tests of the gateway's messages and their order. `Script` is a swarm of such servers; `two_spans` starts a session
with two candidates for its tail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from support.core.actor import Actor
from support.core.gateway import Swarm
from support.core.server import MODEL
from typing_extensions import override

from modelswarm.protocol.identity import NO_HANDLE, Address, Handle, PeerId, name_of
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    FaultKind,
    FaultReport,
    Fence,
    FenceAck,
    Heartbeat,
    Hello,
    Item,
    Lane,
    Refusal,
    Role,
    Send,
    Token,
    Window,
)
from modelswarm_gateway.core.interface.effects import MigrationEnded, Rerouted
from modelswarm_gateway.core.interface.settings import GatewaySettings

PROMPT = tuple(range(1, 21))
AHEAD = 3  # tokens: a session of `two_spans` is quiescent at 24 log entries
TICK = 0.05  # seconds; sessions that cut over together become quiescent within one


@dataclass
class Opened:
    """A hop that a server has granted."""

    session: str
    first: int
    last: int
    own: Handle
    reply: Handle
    kv: int = 0


@dataclass(eq=False)
class ScriptedServer(Actor):
    handles: Iterator[Handle]
    refusing: Refusal | None = None  # answer to creates
    silent: bool = False  # answers no Fence
    hops: list[Opened] = field(default_factory=list)
    answers: list[Send] = field(default_factory=list)

    @override
    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        if isinstance(item, Fence) and not self.silent:
            self.answers.append(Send(Address(sender, ""), Lane.LIVE, self.answer(item)))

    @override
    def take_sends(self) -> list[Send]:
        sends, self.answers = self.answers, []
        return sends

    @override
    def heartbeat(self) -> Heartbeat:
        return Heartbeat()

    def answer(self, fence: Fence) -> FenceAck:
        create, reply = fence.create, fence.gateway_handle
        if create is None:
            [hop] = [hop for hop in self.hops if hop.own == fence.handle]
            hop.kv = min(hop.kv, fence.kv_cut)
        elif self.refusing is not None:
            return FenceAck(reply, NO_HANDLE, fence.epoch, refusal=self.refusing)
        else:
            span = create.session, create.first, create.last
            self.hops = [hop for hop in self.hops if (hop.session, hop.first, hop.last) != span]
            hop = Opened(*span, own=next(self.handles), reply=reply)
            self.hops.append(hop)
        hop.reply = reply
        return FenceAck(reply, hop.own, fence.epoch, kv=hop.kv)


def server_hello(name: str, first: int, last: int, n_blocks: int = 4, hold_ms: int = 0) -> Hello:
    return Hello(
        version=PROTOCOL_VERSION,
        peer=f"{name}/1/0",
        role=Role.SERVER,
        link="",
        lane=Lane.LIVE,
        target=f"{name}:1",
        model=MODEL,
        first=first,
        last=last,
        n_blocks=n_blocks,
        max_length=4096,
        hold_ms=hold_ms,
    )


@dataclass
class Script(Swarm):
    @override
    def __post_init__(self) -> None:
        self.tick_seconds = TICK
        self.draw = itertools.count(1).__next__
        # tokens are sent only by `token`
        self.settings = replace(self.settings, token_timeout_seconds=math.inf)
        super().__post_init__()
        self._handles = itertools.count(1000)

    def add_server(self, name: str, first: int, last: int, hold_ms: int = 0) -> PeerId:
        """Link a server. A server that was linked before keeps its hops."""
        hello = server_hello(name, first, last, hold_ms=hold_ms)
        old = self.actors.get(hello.peer)
        server = old if isinstance(old, ScriptedServer) else ScriptedServer(hello, self._handles)
        server.hello = hello
        self.join(server)
        self.run()
        return server.peer

    # ---- actions of servers

    def server(self, peer: PeerId) -> ScriptedServer:
        server = self.actors[peer]
        assert isinstance(server, ScriptedServer)
        return server

    def hop(self, peer: PeerId, session: str | None = None) -> Opened:
        """Return the only hop there, of one session or of all."""
        [found] = [hop for hop in self.server(peer).hops if session in (None, hop.session)]
        return found

    def send(self, peer: PeerId, item: Item) -> None:
        self.put(peer, self.gateway.peer, item)
        self.run()

    def grant(self, peer: PeerId) -> None:
        """Answer the last Fence that a silent server ignored."""
        [*_, fence] = self.sent_to(peer, Fence)
        self.send(peer, self.server(peer).answer(fence))

    def token(self, session: str, token: int = 7) -> None:
        """Send a token from the tail; all hops have run all positions before it."""
        view = self.gateway.view(session)
        for leg in view.route:
            span = session, leg.first, leg.last
            [hop] = [
                hop
                for hop in self.server(leg.peer).hops
                if (hop.session, hop.first, hop.last) == span
            ]
            hop.kv = view.length
        self.send(leg.peer, Token(hop.reply, view.epoch, view.length, token))

    def copied(self, session: str, peer: PeerId, kv: int) -> None:
        """Report that the standby hop there has `kv` positions."""
        hop = self.hop(peer, session)
        hop.kv = kv
        self.send(peer, Window(hop.reply, self.gateway.view(session).epoch, kv, 0))

    def reports(self, session: str, peer: PeerId, trouble: FaultKind, other: PeerId = "") -> None:
        epoch = self.gateway.view(session).epoch
        self.send(peer, FaultReport(self.hop(peer).reply, epoch, trouble, other))

    # ---- actions of a client, and state

    def start_turn(self, session: str, prompt: Sequence[int], ahead: int = 64) -> None:
        self.gateway.start(session, prompt, 1000, ahead)

    def length(self, session: str) -> int:
        return self.gateway.view(session).length

    def names(self, session: str) -> list[str]:
        """Return the names of the servers of the route."""
        return [name_of(peer) for peer in self.gateway.route(session)]


def two_spans(settings: GatewaySettings | None = None) -> tuple[Script, PeerId, PeerId]:
    """Return a swarm with head `a` and tails `b` and `c`; one session runs over a and the first tail."""
    script = Script(settings=settings or GatewaySettings())
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT, AHEAD)
    script.token("s")
    new = script.add_server("c", 2, 4)
    assert script.names("s") == ["a", "b"]
    script.record.clear()
    script.effects.clear()
    return script, old, new


def outcomes(script: Script) -> list[str]:
    return [effect.outcome for effect in script.gateway.all(MigrationEnded)]


def reroutes(script: Script) -> list[str]:
    return [effect.cause for effect in script.gateway.all(Rerouted)]


def leave(script: Script, peer: PeerId) -> None:
    script.core.migrations.drain(peer, "drain", script.now)
    script.run()
