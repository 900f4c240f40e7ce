"""The gateway's node: joins links and dialer, the core, and the service's session backend.

`app.py` makes it and calls its periodic jobs. Everything runs on one event loop, so nothing here needs a lock. Decides
nothing about sessions: it feeds the core and carries out its effects.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace

from modelswarm.protocol.heartbeat import HeartbeatTimer
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
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.recovery_events import RecoveryEvents
from modelswarm_gateway.backend.token_stream import RowsEvent, TokenEvent, TokenStream
from modelswarm_gateway.core.explain import RouteExplanations
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import (
    CloseLink,
    Effect,
    Ejected,
    Emitted,
    GrammarVersionChanged,
    MigrationEnded,
    NumericsChanged,
    OwnershipLost,
    PromptScored,
    Refused,
    Rerouted,
    Resumed,
    RowsReturned,
    SessionLost,
)
from modelswarm_gateway.core.interface.errors import CoreError, UnknownSession
from modelswarm_gateway.core.interface.row_sizes import BLOCK_ROWS_SINCE, NO_ROWS, RowSizes
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest
from modelswarm_gateway.core.interface.views import ServerView, SessionView
from modelswarm_gateway.core.servers.variant import is_valid, variants_of
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch
from modelswarm_gateway.discovery.dialer import Dialer, ModelSource
from modelswarm_gateway.errors import (
    ApiError,
    Code,
    from_core,
    from_refusal,
    hide_identities,
    session_taken_over,
)
from modelswarm_gateway.models.registry import ModelEntry, ModelRegistry
from modelswarm_gateway.runtime.core_driver import CoreDriver
from modelswarm_gateway.runtime.drains import Drains
from modelswarm_gateway.runtime.peer_checks import heartbeat_fault, hold_fault
from modelswarm_gateway.runtime.session_queries import SessionQueries
from modelswarm_gateway.runtime.waiting_forks import WaitingForks, WaitingTurn

log = logging.getLogger(__name__)


class Node:
    """Implements LinkHandler for the links and SessionBackend for the service."""

    def __init__(
        self,
        peer: PeerId,
        incarnation: int,
        source: ModelSource,
        settings: GatewaySettings,
        clock: Callable[[], float],
        wall: Callable[[], float],
        replaces: Sequence[PeerId] = (),
    ) -> None:
        """`replaces`: gateways whose processes have ended; servers then end their leases."""
        self.peer = peer
        self._clock, self._wall = clock, wall
        self._core = GatewayCore(settings, peer, incarnation, lambda: secrets.randbits(64))
        hello = Hello(
            PROTOCOL_VERSION,
            peer,
            Role.GATEWAY,
            link="",
            lane=Lane.LIVE,
            lease_ms=round(1000 * settings.lease_seconds),
            replaces=tuple(replaces),
        )
        self._lease_seconds = settings.lease_seconds
        self._suspect_after_seconds = settings.suspect_after_seconds
        self._fence_timeout_seconds = settings.fence_timeout_seconds
        self._links = Links(hello, self)
        self._source = source
        self._dialer = Dialer(source, self._links.dial, clock)
        self._models = ModelRegistry(
            self._links.send, clock, wall, self._on_models_changed, self._core.active_revision
        )
        self._unusable: dict[PeerId, str] = {}  # servers that are linked and not used, and why
        self._streams: dict[str, TokenStream] = {}
        self._waiting_forks = WaitingForks()
        self._cards: dict[str, ModelCard] | None = None
        self._cards_of = 0  # changes of variants that the cards know
        self._heartbeats = HeartbeatTimer.for_gateway(settings.lease_seconds)
        self._has_polled = self._discovery_complete = False
        self.recovery_events = RecoveryEvents()
        self._driver = CoreDriver(self._core, clock, self._flush)
        self.drains = Drains(self._driver, self._dialer.may_be_running)
        self._session_queries = SessionQueries(self._driver, self._dialer.unreachable_servers)

    def set_advertised_targets(self, target: str) -> None:
        """Set the addresses to which other gateways forward requests: `HTTP,GRPC`. Call it before the first link."""
        self._links.set_target(target)

    # ---- time

    def tick(self) -> None:
        """Advance the core and send due heartbeats, which also renew our leases (R19, leases). Call it every 50 ms."""
        now = self._clock()
        self._core.tick(now)
        self._flush()
        due = self._heartbeats.take_due(now, self._core.serving_peers)
        if due:
            heartbeat = Heartbeat(sessions=len(self._streams))
            self._links.send([Send(reply_address(peer), Lane.LIVE, heartbeat) for peer in due])

    def discover_servers(self) -> None:
        """Dial new servers and update the expected models. Call it every 200 ms."""
        self._dialer.dial_due()
        self._has_polled = True
        self._models.set_expected(self._source.expected_models())
        self._models.tick()

    def is_settled(self) -> bool:
        """Return True when all known servers have told their models and the tokenizers of their models are loaded."""
        return self._dialer.is_settled() and self._models.is_settled()

    async def shut_down(self) -> None:
        """End or release every session, so that other gateways need not wait for the lease, then close the links."""
        self._driver.call(self._core.relinquish_sessions)
        await self._models.close()
        await self._links.close()

    # ---- LinkHandler

    def on_link_up(self, peer: PeerId, hello: Hello) -> None:
        if hello.role is not Role.SERVER:
            return
        if not is_valid(hello):
            log.error("ignored server %s: its Hello is not valid: %s", peer, hello)
            self._unusable[peer] = f"its Hello is not valid: {hello}"
            return
        log.info("linked to %s: %s, blocks %d:%d", peer, hello.model, hello.first, hello.last)
        if (fault := lease_fault(self._lease_seconds, hello)) is not None:
            log.warning("%s", fault)
        if (fault := heartbeat_fault(self._suspect_after_seconds, hello)) is not None:
            log.error("%s", fault)
        if (fault := hold_fault(self._fence_timeout_seconds, hello)) is not None:
            log.warning("%s", fault)
        self._heartbeats.on_peer_connected(peer)
        self._dialer.on_peer_connected(peer, variants_of(hello))
        self._core.on_peer_connected(hello, self._clock())
        self._models.on_peer_connected(hello)
        self._forget_cards()
        self._flush()

    def on_link_down(self, peer: PeerId, reason: str) -> None:
        self._unusable.pop(peer, None)
        self._heartbeats.on_peer_lost(peer)
        if self._core.on_peer_lost(peer, self._clock()):  # else a dial has failed
            self._models.on_peer_lost(peer)
            self._forget_cards()
        self._dialer.on_peer_lost(peer, reason)
        self._flush()

    def on_items(self, peer: PeerId, items: list[Item]) -> None:
        now = self._clock()
        for item in items:
            if isinstance(item, ModelFileChunk):
                self._core.on_message(peer, now)
                self._models.on_file_chunk(peer, item)
            else:
                self._core.receive(peer, item, now)
        self._flush()

    # ---- SessionBackend

    def is_discovery_complete(self) -> bool:
        is_listed = self._has_polled and self._source.is_listed()
        if not self._discovery_complete and is_listed and self._dialer.is_settled():
            # Without a list of models, servers that load are not known at all until the first one is.
            has_models = self._source.expected_models() is not None
            is_first_there = self._dialer.has_endpoints or bool(self.model_cards())
            self._discovery_complete = has_models or is_first_there
        return self._discovery_complete

    def model_cards(self) -> Sequence[ModelCard]:
        return list(self._cards_by_name().values())

    def model_card(self, model: str) -> ModelCard | None:
        return self._cards_by_name().get(model)

    def open_session(self, model: str, name: str = "", epoch_floor: int = 0) -> str:
        session = name or f"{self.peer}:{secrets.token_hex(8)}"
        above = lowest_epoch(epoch_floor, self._wall()) if name else None
        self._core.open_session(session, model, self._clock(), above)
        self.recovery_events.session_opened(session, model)
        return session

    def raise_epoch(self, session: str, epoch_floor: int) -> None:
        self._core.raise_epoch(session, lowest_epoch(epoch_floor, self._wall()))

    async def find_session(self, session: str, model: str, claims: bool = False) -> SessionLocation:
        return await self._session_queries.find_session(session, model, claims)

    async def take_over(
        self, where: SessionLocation, model: str, check: Callable[[ParkedTurn], object]
    ) -> bool:
        counter = lowest_epoch(where.epoch.counter, self._wall())  # an older log may be found
        where = replace(where, epoch=where.epoch._replace(counter=counter))
        taken_over = await self._session_queries.take_over(where, model, check)
        if taken_over:
            log.info("took over session %s from %s", where.session, where.owner)
            self.recovery_events.session_opened(where.session, model)
        return taken_over

    def parked_turn(self, session: str) -> ParkedTurn | None:
        return self._core.parked_turn(session)

    def opaque_bytes(self) -> int:
        return self._core.opaque_bytes()

    def truncate_log(self, session: str, length: int) -> None:
        self._driver.call(self._core.truncate_turn, session, length)

    def park_session(self, session: str) -> None:
        self._waiting_forks.on_begun(session)  # no token will come; the KV of its log is there
        self.recovery_events.finish(session, self._streams.pop(session, None), "abandoned")
        self._driver.call(self._core.cancel_turn, session)

    def start_turn(self, session: str, request: TurnRequest) -> TokenStream:
        parent = self._streams.get(request.parent)
        waits = parent is not None and not parent.has_begun
        waits = waits or self._waiting_forks.must_wait(request)
        if not waits:
            self._core.start_turn(session, request, self._clock())

        def read_to(position: int) -> None:
            if self._streams.get(session) is stream:
                self._driver.call(self._core.on_read, session, position)

        def stop_at(length: int) -> None:
            if self._streams.get(session, stream) is not stream:
                return  # another turn runs
            # The servers may have finished the turn before its tokens were read.
            self.recovery_events.finish(session, self._streams.pop(session, None), "abandoned")
            with suppress(UnknownSession):  # closed since, or lost: there is no log to truncate
                self._driver.call(self._core.truncate_turn, session, length)

        stream = TokenStream(read_to, stop_at)
        self._streams[session] = stream
        if waits:
            self._waiting_forks.add_turn(WaitingTurn(session, request, stream))
        self._flush()
        return stream

    def _start_due_forks(self) -> bool:
        """Start the turns of forks whose parents have begun. Return True if there were any."""
        due = self._waiting_forks.take_due()
        for turn in due:
            if self._streams.get(turn.session) is not turn.stream:
                continue  # closed since
            try:
                self._core.start_turn(turn.session, turn.request, self._clock())
            except CoreError as error:
                self._fail_stream(turn.session, from_core(error, "prompt"))
        return bool(due)

    def close_session(self, session: str) -> None:
        for turn in self._waiting_forks.on_ended(session):
            error = ApiError(Code.STREAM_BROKEN, "the first answer to this prompt was closed")
            self._fail_stream(turn.session, error)
        self.recovery_events.finish(session, self._streams.pop(session, None), "abandoned")
        self._driver.call(self._core.close_session, session)
        self.recovery_events.session_closed(session)

    def servers(self) -> Sequence[ServerView]:
        return self._core.server_views()

    def servers_of(self, model: str) -> Sequence[ServerView]:
        peers = {hello.peer for hello in self._core.hellos_of(model)}
        return [view for view in self._core.server_views() if view.peer in peers]

    def unlinked_servers(self) -> Mapping[PeerId, str]:
        return {**self._dialer.unlinked_servers(), **self._unusable}

    def sessions(self) -> Sequence[SessionView]:
        return self._core.session_views()

    def session(self, session: str) -> SessionView | None:
        return self._core.find_view(session)

    def hold_limit(self, model: str) -> float:
        return self._core.hold_limit_seconds(model)

    def explain_routes(self, model: str) -> RouteExplanations:
        return self._core.explain_routes(model, self._clock())

    # ---- effects

    def _flush(self) -> None:
        """Carry out the core's effects, in order; messages to servers go last, in one batch."""
        sends: list[Send] = []
        for effect in self._core.take_effects():
            match effect:
                case Send():
                    sends.append(effect)
                case Emitted() | PromptScored() | RowsReturned():
                    self._deliver_token(effect)
                case Refused(session=session):
                    self._end_stream(session, from_refusal(effect))
                    self._waiting_forks.on_refused(session)  # its reader may try again
                case SessionLost(session=session, detail=detail, repeats=repeats):
                    log.warning("session %s failed: %s", session, detail)
                    error = ApiError(Code.STREAM_BROKEN, hide_identities(detail), repeats=repeats)
                    self._fail_stream(session, error)
                case OwnershipLost(session=session):
                    log.warning("released session %s: another gateway owns it", session)
                    stream = self._streams.get(session)
                    self.recovery_events.finish(session, stream, "abandoned")
                    self._fail_stream(session, session_taken_over())
                    self.recovery_events.session_closed(session)
                case SessionLocation() | FetchedLog():
                    self._session_queries.on_answer(effect)
                case CloseLink(peer=peer, reason=reason):
                    self._links.unlink(peer, reason)
                case _:
                    self._report_event(effect)
        if sends:
            self._links.send(sends)
            now = self._clock()
            for send in sends:
                self._heartbeats.on_sent(send.to.peer, now)
        if self._start_due_forks():
            self._flush()

    def _report_event(self, effect: Effect) -> None:
        """Log and count an effect that needs no action."""
        match effect:
            case Rerouted(session=session, cause=cause, peer=peer):
                log.info("re-routing session %s: %s at %s", session, cause, peer)
                self.recovery_events.record_reroute(session, self._streams.get(session), cause)
            case Ejected(peer=peer, cause=cause):
                log.warning("ejected %s from new routes: %s", peer, cause)
                self.recovery_events.record_ejection(effect)
            case GrammarVersionChanged(session=session, peer=peer, before=before, now=now):
                log.warning(
                    "session %s goes on at %s with the grammar library %s instead of %s",
                    *(session, peer, now, before),
                )
                self.recovery_events.record_grammar_version(session)
            case NumericsChanged(session=session, peer=peer, before=before, now=now):
                log.warning(
                    "session %s goes on at %s in numerics class %s instead of %s",
                    *(session, peer, now or "unknown", before),
                )
                self.recovery_events.record_numerics(session)
            case MigrationEnded():
                log.info("migration of session %s off %s (%s): %s after %.3f s", *astuple(effect))
                self.recovery_events.record_migration(effect)
            case Resumed(session=session, seconds=seconds):
                self.recovery_events.record_resumption(session, self._streams.get(session), seconds)

    def _deliver_token(self, effect: Emitted | PromptScored | RowsReturned) -> None:
        stream = self._streams.get(effect.session)
        if stream is None:
            return
        if isinstance(effect, PromptScored):
            stream.prompt_logprobs += effect.entries
            return
        if isinstance(effect, RowsReturned):
            stream.add_rows(RowsEvent(effect.start, effect.payload))
            return
        event = TokenEvent(effect.position, effect.token, effect.finish, effect.logprob, effect.top)
        stream.add_event(event)
        self._waiting_forks.on_begun(effect.session)
        if stream.has_ended:
            del self._streams[effect.session]

    def _end_stream(self, session: str, error: ApiError) -> None:
        stream = self._streams.pop(session, None)
        if stream is not None:
            self.recovery_events.finish(session, stream, "failed")
            stream.fail(error)

    def _fail_stream(self, session: str, error: ApiError) -> None:
        self._end_stream(session, error)
        for turn in self._waiting_forks.on_ended(session):
            self._fail_stream(turn.session, error)

    # ---- cards

    def _on_models_changed(self) -> None:
        readable: dict[str, frozenset[str]] = {}
        for entry in self._models.entries():
            for name in (entry.name, *entry.adapters):  # two models may have one of that name
                readable[name] = readable.get(name, frozenset()).union(entry.tokenizers())
        for name, revisions in readable.items():
            self._core.set_readable(name, revisions)
        self._forget_cards()

    def _forget_cards(self) -> None:
        self._cards = None

    def _cards_by_name(self) -> dict[str, ModelCard]:
        changes = self._core.variant_changes()
        if self._cards is None or self._cards_of != changes:
            self._cards_of = changes
            entries = self._models.entries()
            adapters = {
                name: self._build_card(entry, name)
                for entry in entries
                for name in sorted(entry.adapters)
                if self._runs_adapter(entry, name)
            }
            self._cards = {entry.name: self._build_card(entry, entry.name) for entry in entries}
            self._cards |= {n: card for n, card in adapters.items() if n not in self._cards}
        return self._cards

    def _runs_adapter(self, entry: ModelEntry, name: str) -> bool:
        """Return whether turns of that name run on this model: another one may have an adapter of that name."""
        hellos = self._core.hellos_of(name)
        return not hellos or hellos[0].model == entry.name

    def _build_card(self, entry: ModelEntry, name: str) -> ModelCard:
        """Return the card of a model, or of one of its adapters."""
        active = self._core.active_revision(name)
        # Token ids of another revision stand for other texts.
        tokenizer = entry.tokenizer if active is None else entry.tokenizers().get(active)
        hellos = self._core.hellos_of(name)
        missing = self._core.uncovered_blocks(name) if hellos else range(entry.n_blocks)
        tails = [hello for hello in hellos if hello.last == hello.n_blocks]
        return ModelCard(
            name=name,
            revision=entry.revision if tokenizer is None or active is None else active,
            n_blocks=entry.n_blocks,
            missing_blocks=tuple(missing),
            max_length=self._core.max_length(name),
            tokenizer=tokenizer,
            known_since=entry.known_since,
            files_phase=entry.phase,
            files_problem=entry.files_problem,
            files_wait=entry.describe_fetch(),
            grammar_versions=frozenset(tail.grammar for tail in tails),
            rows=min(map(RowSizes.of, tails), default=NO_ROWS),
            boundary_rows=min(map(RowSizes.at_boundary, hellos), default=NO_ROWS),
            takes_block_rows=bool(hellos)
            and min(hello.version for hello in hellos) >= BLOCK_ROWS_SINCE,
            parent="" if name == entry.name else entry.name,
        )
