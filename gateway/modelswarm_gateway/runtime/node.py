"""The gateway process without its doors: links and directory on one side, the core in the middle, an `Engine` for the
service on the other.

`main.py` makes it and runs its tasks. Everything is on one event loop, so nothing here needs a lock. Decides nothing
about sessions: it carries what the core says to whom it is for.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import astuple

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.link.handshake import lease_fault
from modelswarm.protocol.link.links import Links
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Heartbeat,
    Hello,
    Item,
    Lane,
    ModelFileChunk,
    Role,
    Send,
    reply_address,
)
from modelswarm_gateway.backend.protocol import ModelCard, TokenEvent, TokenStream
from modelswarm_gateway.backend.recovery_events import Faults
from modelswarm_gateway.beats import BeatTimer
from modelswarm_gateway.core.explain import Reasons
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import (
    Broken,
    Effect,
    Ejected,
    Emitted,
    Moved,
    Outranked,
    Refused,
    Rerouted,
    Resumed,
    Unlink,
)
from modelswarm_gateway.core.interface.session_search import Fetched, Whereabouts
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import KeptTurn, TurnRequest
from modelswarm_gateway.core.interface.views import ServerView, SessionView
from modelswarm_gateway.core.servers.variant import is_valid
from modelswarm_gateway.discovery.dialer import Directory, Source
from modelswarm_gateway.errors import ApiError, Code, from_refusal, session_taken_over
from modelswarm_gateway.models.registry import Entry, Library
from modelswarm_gateway.runtime.drains import Drains
from modelswarm_gateway.runtime.session_queries import Questions
from modelswarm_gateway.timeouts import beat_fault, hold_fault

log = logging.getLogger(__name__)


class Node:
    """LinkHandler towards the links, Engine towards the service."""

    def __init__(
        self,
        peer: PeerId,
        incarnation: int,
        source: Source,
        settings: GatewaySettings,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.peer = peer
        self._clock = clock
        self._core = GatewayCore(settings, peer, incarnation, lambda: secrets.randbits(64))
        hello = Hello(
            PROTOCOL_VERSION,
            peer,
            Role.GATEWAY,
            link="",
            lane=Lane.LIVE,
            lease_ms=round(1000 * settings.lease_seconds),
        )
        self._lease_seconds = settings.lease_seconds
        self._silence_seconds = settings.silent_seconds
        self._fence_seconds = settings.fenced_seconds
        self._links = Links(hello, self)
        self._source = source
        self._directory = Directory(source, self._links.dial, clock)
        self._library = Library(
            self._links.send, clock, wall, self._forget_cards, self._core.revision
        )
        self._streams: dict[str, TokenStream] = {}
        self._cards: dict[str, ModelCard] | None = None
        self._beats = BeatTimer(settings.lease_seconds)
        self._looked = self._knows = False
        self.faults = Faults()
        self.drains = Drains(self._core, clock, self._flush, self._directory.may_live)
        self._questions = Questions(self._core, clock, self._flush, self._directory.cut_off)

    def reachable_at(self, target: str) -> None:
        """Where other gateways may pass requests on to: `HTTP,GRPC`. Before the first link."""
        self._links.reachable_at(target)

    # ---- time

    def tick(self) -> None:
        """Every 50 ms. Beats also renew the leases of our sessions (R19)."""
        now = self._clock()
        self._core.tick(now)
        self._flush()
        due = self._beats.due(now, self._core.live)
        if due:
            beat = Heartbeat(sessions=len(self._streams))
            self._links.send([Send(reply_address(peer), Lane.LIVE, beat) for peer in due])

    def look_around(self) -> None:
        """Every 200 ms."""
        self._directory.poll()
        self._looked = True
        self._library.expect(self._source.models())
        self._library.tick()

    def settled(self) -> bool:
        """Whether all servers that are known have been tried, and what they serve can be asked for."""
        return self._directory.settled() and self._library.settled()

    async def shut_down(self) -> None:
        """Ends every session or gives it up, so that nobody need wait for the lease, then the links."""
        self._core.hand_over(self._clock())
        self._flush()
        await self._library.close()
        await self._links.close()

    # ---- LinkHandler

    def linked(self, peer: PeerId, hello: Hello) -> None:
        if hello.role is not Role.SERVER:
            return
        if not is_valid(hello):
            log.error("%s cannot serve what it says of itself: %s", peer, hello)
            return
        log.info("%s is linked: %s %d:%d", peer, hello.model, hello.first, hello.last)
        if (fault := lease_fault(self._lease_seconds, hello)) is not None:
            log.warning("%s", fault)
        if (fault := beat_fault(self._silence_seconds, hello)) is not None:
            log.error("%s", fault)
        if (fault := hold_fault(self._fence_seconds, hello)) is not None:
            log.warning("%s", fault)
        self._beats.join(peer)
        self._directory.linked(peer, hello.model)
        self._core.connected(hello, self._clock())
        self._library.linked(hello)
        self._forget_cards()
        self._flush()

    def unlinked(self, peer: PeerId, reason: str) -> None:
        self._beats.leave(peer)
        self._core.disconnected(peer, self._clock())
        self._library.unlinked(peer)
        self._directory.unlinked(peer, reason)
        self._forget_cards()
        self._flush()

    def received(self, peer: PeerId, items: list[Item]) -> None:
        now = self._clock()
        for item in items:
            if isinstance(item, ModelFileChunk):
                self._core.heard(peer, now)
                self._library.received(peer, item)
            else:
                self._core.receive(peer, item, now)
        self._flush()

    # ---- Engine

    def knows(self) -> bool:
        self._knows = self._knows or (self._looked and self._directory.settled())
        return self._knows

    def cards(self) -> Sequence[ModelCard]:
        return list(self._all_cards().values())

    def card(self, model: str) -> ModelCard | None:
        return self._all_cards().get(model)

    def open(self, model: str, name: str = "", above: int = 0) -> str:
        session = name or f"{self.peer}:{secrets.token_hex(8)}"
        self._core.open(session, model, self._clock(), above if name else None)
        self.faults.opened(session, model)
        return session

    async def find(self, session: str, model: str, opens: bool = False) -> Whereabouts:
        return await self._questions.find(session, model, opens)

    async def adopt(
        self, where: Whereabouts, model: str, check: Callable[[Sequence[int]], None]
    ) -> bool:
        adopted = await self._questions.adopt(where, model, check)
        if adopted:
            log.info("%s is adopted from %s", where.session, where.owner)
            self.faults.opened(where.session, model)
        return adopted

    def kept(self, session: str) -> KeptTurn | None:
        return self._core.kept(session)

    def keep(self, session: str, length: int) -> None:
        self._core.stop_at(session, length, self._clock())
        self._flush()

    def leave(self, session: str) -> None:
        self.faults.over(session, self._streams.pop(session, None), "abandoned")
        self._core.leave(session, self._clock())
        self._flush()

    def turn(self, session: str, request: TurnRequest) -> TokenStream:
        first = self._core.turn(session, request, self._clock())

        def read_to(position: int) -> None:
            if self._streams.get(session) is stream:
                self._core.read_to(session, position, self._clock())
                self._flush()

        def stop_at(length: int) -> None:
            if self._streams.get(session) is stream:
                del self._streams[session]
                self.faults.over(session, stream, "abandoned")
                self._core.stop_at(session, length, self._clock())
                self._flush()

        stream = TokenStream(first, read_to, stop_at)
        self._streams[session] = stream
        self._flush()
        return stream

    def close(self, session: str) -> None:
        self.faults.over(session, self._streams.pop(session, None), "abandoned")
        self._core.close(session, self._clock())
        self._flush()
        self.faults.closed(session)

    def servers(self) -> Sequence[ServerView]:
        return self._core.servers()

    def sessions(self) -> Sequence[SessionView]:
        return self._core.sessions()

    def session(self, session: str) -> SessionView | None:
        return self._core.session(session)

    def hold_seconds(self, model: str) -> float:
        return self._core.hold_seconds(model)

    def reasons(self, model: str) -> Reasons:
        return self._core.reasons(model, self._clock())

    # ---- effects

    def _flush(self) -> None:
        """Carry out what the core decided, in its order."""
        sends: list[Send] = []
        for effect in self._core.drain():
            match effect:
                case Send():
                    sends.append(effect)
                case Emitted():
                    self._emitted(effect)
                case Refused(session=session):
                    self._end(session, from_refusal(effect))
                case Broken(session=session, detail=detail):
                    log.warning("%s could not be saved: %s", session, detail)
                    self._end(session, ApiError(Code.STREAM_BROKEN, detail))
                case Outranked(session=session):
                    log.warning("%s is let go: another gateway has it", session)
                    self._end(session, session_taken_over())
                    self.faults.closed(session)
                case Whereabouts() | Fetched():
                    self._questions.answered(effect)
                case Unlink(peer=peer, reason=reason):
                    self._links.unlink(peer, reason)
                case _:
                    self._happened(effect)
        if sends:
            self._links.send(sends)
            now = self._clock()
            for send in sends:
                self._beats.sent(send.to.peer, now)

    def _happened(self, effect: Effect) -> None:
        """What is only to be told and counted."""
        match effect:
            case Rerouted(session=session, cause=cause, peer=peer):
                log.info("%s looks for its route again: %s (%s)", session, cause, peer)
                self.faults.rerouted(session, self._streams.get(session), cause)
            case Ejected(peer=peer, cause=cause):
                log.warning("%s gets no new sessions for a while: %s", peer, cause)
                self.faults.ejected(effect)
            case Moved():
                log.info("%s moves from %s (%s): %s after %.3f s", *astuple(effect))
                self.faults.moved(effect)
            case Resumed(session=session, seconds=seconds):
                self.faults.resumed(session, self._streams.get(session), seconds)

    def _emitted(self, effect: Emitted) -> None:
        stream = self._streams.get(effect.session)
        if stream is None:
            return
        stream.put(TokenEvent(effect.position, effect.token, effect.finish))
        if stream.ended:
            del self._streams[effect.session]

    def _end(self, session: str, error: ApiError) -> None:
        stream = self._streams.pop(session, None)
        if stream is not None:
            self.faults.over(session, stream, "failed")
            stream.fail(error)

    # ---- cards

    def _forget_cards(self) -> None:
        self._cards = None

    def _all_cards(self) -> dict[str, ModelCard]:
        if self._cards is None:
            self._cards = {entry.name: self._card(entry) for entry in self._library.entries()}
        return self._cards

    def _card(self, entry: Entry) -> ModelCard:
        leading = self._core.revision(entry.name)
        current = leading is None or leading == entry.revision
        missing = self._core.uncovered(entry.name) if entry.servers else range(entry.n_blocks)
        return ModelCard(
            name=entry.name,
            revision=entry.revision,
            n_blocks=entry.n_blocks,
            missing=tuple(missing),
            max_length=self._core.max_length(entry.name),
            text=entry.text if current else None,  # tokens of another revision mean other words
            since=entry.since,
        )
