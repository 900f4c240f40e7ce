"""A gateway core whose servers are played by hand: they grant every Fence, and do nothing else unless a test says so.

For tests of what the gateway says and when. `swarm` of `review_swarm.py` has real servers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from modelswarm.protocol.identity import NO_HANDLE, Epoch, Handle, PeerId, name_of
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
    RetainedRows,
    Role,
    Sampling,
    Send,
    Token,
    Window,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest

MODEL = "m"
T = TypeVar("T", bound=Item)


@dataclass
class Opened:
    """A hop that a server has granted."""

    peer: PeerId
    own: Handle
    reply: Handle
    session: str
    kv: int = 0


@dataclass
class Script:
    settings: GatewaySettings = field(default_factory=GatewaySettings)
    n_blocks: int = 4
    now: float = 0.0
    refusing: dict[PeerId, Refusal] = field(default_factory=dict)  # of creates
    silent: set[PeerId] = field(default_factory=set)  # answer no Fence
    sent: list[tuple[PeerId, Item]] = field(default_factory=list)  # since `sent` was cleared
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        patient = replace(
            self.settings, token_timeout_seconds=math.inf
        )  # tokens come when a test says so
        self.core = GatewayCore(patient, "g/1/0", 1, itertools.count(1).__next__)
        self._handles = itertools.count(1000)
        self.hops: dict[tuple[str, PeerId, int, int], Opened] = {}
        self.alive: set[PeerId] = set()  # say so

    def serve(self, name: str, first: int, last: int, hold_ms: int = 0) -> PeerId:
        peer = f"{name}/1/0"
        self.alive.add(peer)
        self.core.on_peer_connected(
            Hello(
                version=PROTOCOL_VERSION,
                peer=peer,
                role=Role.SERVER,
                link="",
                lane=Lane.LIVE,
                target=f"{name}:1",
                model=MODEL,
                first=first,
                last=last,
                n_blocks=self.n_blocks,
                max_length=4096,
                hold_ms=hold_ms,
            ),
            self.now,
        )
        self.run()
        return peer

    # ---- the servers' part

    def run(self) -> None:
        """Until the gateway has nothing more to say; creates and cuts are granted."""
        while effects := self.core.take_effects():
            for effect in effects:
                if not isinstance(effect, Send):
                    self.effects.append(effect)
                    continue
                self.sent.append((effect.to.peer, effect.item))
                if isinstance(effect.item, Fence) and effect.to.peer not in self.silent:
                    self.core.receive(
                        effect.to.peer, self._answer(effect.to.peer, effect.item), self.now
                    )

    def _answer(self, peer: PeerId, fence: Fence) -> FenceAck:
        if fence.create is not None:
            if peer in self.refusing:
                return FenceAck(
                    fence.gateway_handle, NO_HANDLE, fence.epoch, refusal=self.refusing[peer]
                )
            name = fence.create.session
            key = (name, peer, fence.create.first, fence.create.last)
            self.hops[key] = Opened(peer, next(self._handles), fence.gateway_handle, name)
            hop = self.hops[key]
        else:
            hop = next(hop for hop in self.hops.values() if hop.own == fence.handle)
            hop.kv = min(hop.kv, fence.kv_cut)
        hop.reply = fence.gateway_handle
        return FenceAck(hop.reply, hop.own, fence.epoch, kv=hop.kv, retained=self.kept(hop))

    def grant(self, peer: PeerId) -> None:
        """It answers the last Fence now that it was silent to."""
        [*_, fence] = self.told(peer, Fence)
        self.says(peer, self._answer(peer, fence))

    def kept(self, hop: Opened) -> tuple[RetainedRows, ...]:
        return ()

    def hop(self, peer: PeerId, session: str | None = None) -> Opened:
        """The only one there, of that session or of all."""
        [found] = [
            hop for hop in self.hops.values() if hop.peer == peer and session in (None, hop.session)
        ]
        return found

    def says(self, peer: PeerId, item: Item) -> None:
        self.core.receive(peer, item, self.now)
        self.run()

    def token(self, session: str, token: int = 7) -> None:
        """The tail of its route has picked one; everybody has run all before it."""
        view = self.view(session)
        for at in view:
            self.hops[session, *at].kv = self.length(session)
        tail = self.hops[session, *view[-1]]
        self.says(tail.peer, Token(tail.reply, self.epoch(session), self.length(session), token))

    def copied(self, session: str, peer: PeerId, kv: int) -> None:
        """The warm hop there has run so many rows."""
        hop = self.hop(peer, session)
        hop.kv = kv
        self.says(peer, Window(hop.reply, self.epoch(session), kv, 0))

    def reports(self, session: str, peer: PeerId, trouble: FaultKind, other: PeerId = "") -> None:
        self.says(peer, FaultReport(self.hop(peer).reply, self.epoch(session), trouble, other))

    def wait(self, seconds: float, tick: float = 0.05) -> None:
        for _ in range(round(seconds / tick)):
            self.now += tick
            for peer in sorted(self.alive):
                self.core.receive(peer, Heartbeat(), self.now)
            self.core.tick(self.now)
            self.run()

    # ---- a client's part, and what there is

    def ask(
        self, session: str, prompt: Sequence[int], new: int = 1000, credit_ahead: int = 64
    ) -> None:
        if self.core.find_view(session) is None:
            self.core.open_session(session, MODEL, self.now)
        self.core.start_turn(
            session,
            TurnRequest(tuple(prompt), new, Sampling(), credit_ahead=credit_ahead),
            self.now,
        )
        self.run()

    def epoch(self, session: str) -> Epoch:
        view = self.core.find_view(session)
        assert view is not None
        return view.epoch

    def length(self, session: str) -> int:
        view = self.core.find_view(session)
        assert view is not None
        return view.length

    def view(self, session: str) -> list[tuple[PeerId, int, int]]:
        """Its route."""
        view = self.core.find_view(session)
        assert view is not None
        return [(hop.peer, hop.first, hop.last) for hop in view.route]

    def route(self, session: str) -> list[str]:
        """Names of its servers."""
        return [name_of(peer) for peer, _, _ in self.view(session)]

    def told(self, peer: PeerId, kind: type[T]) -> list[T]:
        """What that server was sent."""
        return [item for to, item in self.sent if to == peer and isinstance(item, kind)]
