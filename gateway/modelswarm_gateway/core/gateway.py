"""The gateway's half of the protocol: sessions, links and protocol items in; items for servers and tokens out.

Sans-I/O: `runtime/node.py` calls it and executes `take_effects()`; the simulator does the same in virtual time. Every
call takes `now` in seconds of one monotonic clock. Nothing here blocks or sleeps, and no message of a server raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import (
    FaultKind,
    FaultReport,
    FenceAck,
    Finish,
    Heartbeat,
    Hello,
    Item,
    Lane,
    LogChunk,
    PromptLogprobs,
    Rows,
    Send,
    SessionInfo,
    Token,
    Window,
    reply_address,
)
from modelswarm_gateway.core.detection.monitor import HealthMonitor
from modelswarm_gateway.core.explain import RouteExplanations, explain_routes
from modelswarm_gateway.core.interface.effects import Effect, Refused, Resumed, emitted_group
from modelswarm_gateway.core.interface.errors import CoreError, SessionBusy, UnknownSession
from modelswarm_gateway.core.interface.session_search import FetchedLog, LogHolder, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import (
    ParkedTurn,
    RefusalReason,
    TokenLogprobs,
    TurnRequest,
)
from modelswarm_gateway.core.interface.views import ServerView, SessionView
from modelswarm_gateway.core.migration.drain_requests import DrainRequests
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.migration.rebalancer import Rebalancer
from modelswarm_gateway.core.recovery.held_sessions import retry_held, wake_held
from modelswarm_gateway.core.recovery.hold_limit import HoldLimits
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import serves
from modelswarm_gateway.core.sessions.epoch_counters import EpochCounters, without_absurd_epochs
from modelswarm_gateway.core.sessions.prompt_scores import needs_scores, take_scores
from modelswarm_gateway.core.sessions.returned_rows import take_rows
from modelswarm_gateway.core.sessions.session import Session, SessionState
from modelswarm_gateway.core.sessions.turn_start import begin_turn, fit_turn
from modelswarm_gateway.core.snapshots import owned_sessions, server_view, session_view
from modelswarm_gateway.core.takeover.session_search import SessionSearch


class GatewayCore:
    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        """`incarnation` orders gateways in epochs; `draw` returns 64 random bits."""
        self._incarnation = incarnation
        self._now = 0.0  # time of the last tick, for views
        self._effects: list[Effect] = []
        self._sessions: dict[str, Session] = {}
        self._registry = ServerRegistry(settings.link_failure_seconds, draw, self._effects.append)
        self.set_readable = self._registry.set_readable
        self.variant_changes = self._registry.variant_changes
        self._hold_limits = HoldLimits(settings)
        self._ownership_check = OwnershipCheck(settings, peer, self._registry, self._effects.append)
        self._recovery = Recovery(
            settings,
            self._registry,
            self._hold_limits,
            self._ownership_check,
            draw,
            self._effects.append,
            self._remove_session,
        )
        self.migrations = Migrations(
            settings, self._registry, self._recovery, self._sessions, self._effects.append
        )
        self.drain_requests = DrainRequests(self.migrations, self._effects.append)
        self._rebalancer = Rebalancer(
            settings.rebalance_after_seconds, self._registry, self._sessions, self.migrations
        )
        self._health_monitor = HealthMonitor(
            settings,
            peer,
            self._registry,
            self._hold_limits,
            self._recovery,
            self.migrations,
            self._ownership_check,
        )
        self._session_search = SessionSearch(settings, peer, self._effects.append)
        self._ended_counters = EpochCounters()

    def take_effects(self) -> list[Effect]:
        """Take the effects since the last call, in order."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    # ---- links

    def on_peer_connected(self, hello: Hello, now: float) -> None:
        """Register a server whose link is up. It is told which hops to keep; held sessions of its model try again."""
        self._check_stall(now)
        if not self._registry.register(hello, now):
            return
        self._hold_limits.record_hello(hello)
        self.drain_requests.on_reconnected(hello.peer)
        self._health_monitor.add_peer(hello.peer, hello.heartbeat_ms / 1000, now)
        owned = owned_sessions(self._sessions.values(), hello.peer)
        self._effects.append(Send(reply_address(hello.peer), Lane.LIVE, owned))
        served = [each for each in self._sessions.values() if serves(hello, each.model)]
        for session in served:
            self._ownership_check.ask_again(session, hello.peer)
        wake_held(served, now)
        retry_held(self._recovery, served, now)

    def on_peer_lost(self, peer: PeerId, now: float) -> bool:
        """Remove a server whose link broke, and recover the sessions with a hop there. False: it had no link."""
        if not self._registry.is_connected(peer):
            return False
        self._check_stall(now)
        self._registry.deregister(peer, now)
        self._recovery.hops.forget_peer(peer)
        self._session_search.forget_peer(peer, now)
        for session in list(self._sessions.values()):
            if any(hop.peer == peer for hop in session.owned_hops):
                self._ownership_check.on_link_lost(session, now)
            has_hop = any(hop.peer == peer for hop in session.hops)
            if has_hop and session.state is not SessionState.HELD:
                self._recovery.on_fault(session, "link_down", peer, now)
        self._health_monitor.remove_peer(peer, now)
        return True

    def on_message(self, peer: PeerId, now: float) -> None:
        """Record that a server sent a message of any kind: it is running."""
        self._check_stall(now)
        self._health_monitor.on_message(peer, now)

    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        """Handle one protocol item of a server."""
        self.on_message(peer, now)
        if isinstance(item, Token):
            self._on_token(peer, item, now)
        elif isinstance(item, PromptLogprobs):
            self._on_prompt_logprobs(peer, item, now)
        elif isinstance(item, Rows):
            self._on_rows(peer, item, now)
        elif isinstance(item, FenceAck):
            self._on_fence_ack(peer, item, now)
        elif isinstance(item, FaultReport):
            self._on_report(peer, item, now)
        elif isinstance(item, Heartbeat):
            self._registry.on_heartbeat(peer, item, now)
            self.drain_requests.on_heartbeat(peer, item.drain, now)
        elif isinstance(item, Window):
            self.migrations.on_window(peer, item, now)
        elif isinstance(item, SessionInfo):
            self._on_session_info(peer, item, now)
        elif isinstance(item, LogChunk):
            self._session_search.on_log_chunk(peer, item, now)

    # ---- calls of the API

    def open_session(self, session: str, model: str, now: float, above: int | None = None) -> None:
        """Open an empty session; its first turn plans the route.

        `session` must never have been used before, unless `above` is the highest epoch counter of that name elsewhere.
        """
        if session in self._sessions:
            raise SessionBusy(f"session {session} is open already")
        counter = 0 if above is None else max(above, self._ended_counters.counter_of(session))
        self._sessions[session] = Session(
            session,
            model,
            Epoch(counter, self._incarnation),
            found_epoch=Epoch(counter + 1, 0),
            is_named=above is not None,
        )

    def raise_epoch(self, session: str, above: int) -> None:
        """Let a kept session go on above an epoch counter, as one that is opened: it outranks what ran before."""
        s = self._session(session)
        s.epoch = Epoch(max(s.epoch.counter, above), self._incarnation)

    def find_session(
        self,
        session: str,
        model: str,
        now: float,
        disconnected: Collection[PeerId] = (),
        *,
        claims: bool = False,
    ) -> None:
        """Ask all servers of the model what they know of a session that is not here. Emits a SessionLocation later.

        `disconnected`: known servers that cannot be asked because they have no link. `claims`: the session is opened or
        taken over here next, unless another gateway owns it or claimed it first.
        """
        servers = [s.hello.peer for s in self._registry if serves(s.hello, model)]
        self._session_search.start_search(session, servers, disconnected, claims, now)

    def fetch_log(self, session: str, holder: LogHolder, now: float) -> None:
        """Request a log copy. Emits a FetchedLog later."""
        self._session_search.fetch_log(session, holder, now)

    def take_over(self, where: SessionLocation, model: str, log: FetchedLog, now: float) -> None:
        """Open the session that another gateway left. OwnershipLost is emitted later if a third gateway was faster."""
        if log.turn is None or not log.tokens:
            raise CoreError(f"there is no log of {where.session}")
        self.open_session(where.session, model, now, above=where.epoch.counter)
        self._recovery.take_over(self._sessions[where.session], where, log)

    def start_turn(self, session: str, request: TurnRequest, now: float) -> int:
        """Continue from the longest common prefix of the log and `request.tokens`; return the first new position."""
        s = self._session(session)
        if s.is_in_turn:
            raise SessionBusy(f"session {session} is still answering")
        if not request.tokens:
            raise CoreError("the prompt is empty: at least one token is needed")
        parent = self._sessions.get(request.parent)
        variant = self._recovery.variant_of_turn(s, s if request.is_resumed else parent)
        limit, length = self._registry.max_length(s.model, variant), len(request.tokens)
        if limit == 0 and request.is_resumed and s.variant is not None:
            limit = s.turn.end  # held: the servers it ran on may reconnect
        if limit == 0:
            detail = f"no server of {s.model} is linked"
            self._effects.append(
                Refused(session, RefusalReason.NO_SERVERS, detail, retry_after=1.0)
            )
            return length
        limit = fit_turn(s, request, limit)
        if variant is not None and s.variant != variant:
            self._recovery.change_variant(s, variant)
        begin_turn(s, request, limit, now, parent)
        self._ownership_check.before_turn(s)
        self._recovery.enter_loop(s, now)
        return length

    def truncate_turn(self, session: str, length: int, now: float) -> None:
        """End the turn at a stop string (R17, sampling): the log keeps its first `length` entries."""
        s = self._session(session)
        if not 0 < length <= s.length:
            raise CoreError(f"session {session} has {s.length} entries: cannot keep {length}")
        s.truncate_log(length)
        self._recovery.park(s)

    def cancel_turn(self, session: str, now: float) -> None:
        """End the turn because its client disconnected. The log stays, so that a later turn can continue it."""
        s = self._session(session)
        if s.is_in_turn and s.has_run:
            self._recovery.park(s)
        elif s.is_in_turn:
            self._recovery.close_hops(s)
            s.state = SessionState.PARKED

    def parked_turn(self, session: str) -> ParkedTurn | None:
        """Return the session's log and its last turn; None if the session is unknown or empty."""
        s = self._sessions.get(session)
        if s is None or not s.log:
            return None
        return ParkedTurn(tuple(s.log), s.turn, dict(s.logprobs), s.tokenizer)

    def on_read(self, session: str, position: int, now: float) -> None:
        """Record that the client has read the entries below `position`.

        The tail gets more credit when the increase is worth a message (R7, credit).
        """
        s = self._session(session)
        s.read_position = max(s.read_position, position)
        self._recovery.hop_messages.grant_credit(s)

    def close_session(self, session: str, now: float) -> None:
        """Drop the session and free its KV on all servers; sessions held for lack of room try again at once."""
        s = self._sessions.pop(session, None)
        if s is None:
            return
        self._record_epoch(s)
        self._recovery.close_hops(s)
        s.state = SessionState.PARKED
        wake_held(self._sessions.values(), now, RefusalReason.NO_ROOM)  # there may be room now

    def relinquish_sessions(self, now: float) -> None:
        """Give up all sessions because this gateway is shutting down. The last call.

        Another gateway may take over the named sessions at once; all others are closed.
        """
        for session in list(self._sessions.values()):
            if session.is_named and session.log:
                self.cancel_turn(session.name, now)
            else:
                self.close_session(session.name, now)
        for server in self._registry:
            goodbye = Heartbeat(draining=True)
            self._effects.append(Send(reply_address(server.hello.peer), Lane.LIVE, goodbye))

    def tick(self, now: float) -> None:
        """Apply all deadlines: searches, failure detection, held sessions, migrations. Call about every 50 ms."""
        self._check_stall(now)
        self._now = now
        self._session_search.expire(now)
        sessions = list(self._sessions.values())
        self._health_monitor.detect_faults(sessions, now)
        retry_held(self._recovery, sessions, now)
        for session in sessions:
            self._recovery.send_fences(session, now)
            if session.is_parkable(now):
                self._recovery.park(session)
        self.migrations.advance(now)
        self._rebalancer.rebalance(now)

    def _check_stall(self, now: float) -> None:
        self._health_monitor.after_stall(self._sessions.values(), now)

    @property
    def serving_peers(self) -> Collection[PeerId]:
        """Servers on running routes: they need frequent heartbeats (R21, failure detection)."""
        return self._health_monitor.serving

    # ---- messages of servers

    def _session_of_tail(self, peer: PeerId, item: Token | PromptLogprobs | Rows) -> Session | None:
        """Return the running session whose tail sent the item in the present epoch."""
        found = self._recovery.hops.by_handle.get(item.handle)
        if found is None:
            return None
        s, hop = found
        runs = s.state is SessionState.RUNNING and item.epoch == s.epoch
        return s if runs and hop is s.hops[-1] and hop.peer == peer else None

    def _on_prompt_logprobs(self, peer: PeerId, item: PromptLogprobs, now: float) -> None:
        s = self._session_of_tail(peer, item)
        if s is None or not needs_scores(s):
            return
        if item.start > s.scored:
            self._recovery.on_fault(s, "gap", peer, now)
        elif (found := take_scores(s, item)) is not None:
            self._record_progress(s, now)
            self._effects.append(found)

    def _on_rows(self, peer: PeerId, item: Rows, now: float) -> None:
        s = self._session_of_tail(peer, item)
        if s is None or not s.returns_rows:
            return
        if item.first > s.next_row or len(item.payload) != item.count * s.row_bytes:
            self._recovery.on_fault(s, "gap", peer, now)
        elif (found := take_rows(s, item)) is not None:
            self._record_progress(s, now)
            self._effects.append(found)

    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        s = self._session_of_tail(peer, token)
        if s is None:
            return  # R4 (freeze): stale
        hop = s.hops[-1]
        if token.position < s.length:
            return  # R1 (rows never truncate): already received
        lacks_rows = s.returns_rows and s.next_row < token.position
        if token.position > s.length or needs_scores(s) or lacks_rows:
            self._recovery.on_fault(s, "gap", peer, now)
            return
        if s.turn.only_rows:  # an older tail samples a token behind the last row
            token = replace(token, token=-1, logprob=0.0, finish=Finish.LENGTH)
        if token.token >= 0:
            s.append_group(token.group)
            if s.keeps_logprobs:
                s.logprobs[token.position] = TokenLogprobs(token.logprob, token.top)
        s.newest_run_epoch, hop.log = s.epoch, s.length
        if s.lost_hops:
            self._recovery.close_lost_hops(s)
        self._record_progress(s, now)
        self._registry.on_token((hop.peer for hop in s.hops), now)
        if s.turn.only_rows:
            self._recovery.park(s)  # and logs it
        elif token.finish is not Finish.NONE:
            s.state, s.ended_at = SessionState.PARKED, now
        self._effects += emitted_group(s.name, token)
        self.migrations.on_token(s, now)

    def _record_progress(self, s: Session, now: float) -> None:
        if (since := s.record_progress()) is not None:
            self._effects.append(Resumed(s.name, now - since))

    def _on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        self._registry.health.step_times(peer).record_fence_ack(answer, now)
        found = self._recovery.hops.by_handle.get(answer.handle)
        if found is not None and answer.unknown:
            self._ownership_check.ask_again(found[0])
        self._recovery.on_fence_ack(peer, answer, now)
        self.migrations.on_fence_ack(peer, answer, now)

    def _on_report(self, peer: PeerId, report: FaultReport, now: float) -> None:
        found = self._recovery.hops.by_handle.get(report.handle)
        if (
            found is None
            or found[1].peer != peer
            or self.migrations.handle_report(peer, report, now)
        ):
            return
        session, _hop = found
        is_on_route = session.state in (SessionState.RUNNING, SessionState.FENCING)
        if report.epoch != session.epoch or not is_on_route:
            return
        if report.kind is FaultKind.NO_TOKEN:  # every server would find none
            self._recovery.fail_by_report(session, peer, report)
            return
        if report.kind in (FaultKind.FAILED, FaultKind.NOT_FINITE):
            session.model_failures += 1
            by_rows = session.opaque and report.kind is FaultKind.NOT_FINITE  # the client's
            if session.model_failures > 1 or by_rows:
                self._recovery.fail_by_report(session, peer, report)
                return
            self._registry.on_step_failed(peer, now)
            session.excluded.add(peer)  # another server of these blocks may not fail
        elif report.peer:
            self._registry.on_link_failed(peer, report.peer, report.generation, now)
        self._recovery.on_fault(session, report.kind.value, report.peer or peer, now)

    def _on_session_info(self, peer: PeerId, found: SessionInfo, now: float) -> None:
        found = without_absurd_epochs(found)
        session = self._sessions.get(found.session)
        if session is not None:
            was_waiting = self._ownership_check.is_waiting(session, now)
            if self._ownership_check.is_lost(session, peer, found):
                outranked = (found.last_started or NO_EPOCH, found.epoch) > session.rank
                self._recovery.relinquish(session, keeps_log=outranked)
            elif (
                was_waiting
                and session.state is SessionState.HELD
                and not self._ownership_check.is_waiting(session, now)
            ):
                self._recovery.enter_loop(session, now)
            else:
                self._recovery.send_fences(session, now)
        self._session_search.on_session_info(peer, found, now)

    # ---- look-up, removal and views

    def _session(self, session: str) -> Session:
        if (found := self._sessions.get(session)) is None:
            raise UnknownSession(f"there is no session {session}")
        return found

    def _remove_session(self, session: Session) -> None:
        self._sessions.pop(session.name, None)
        self._record_epoch(session)

    def _record_epoch(self, session: Session) -> None:
        """Keep its epoch counter: the next session of that name starts above it."""
        if session.is_named:
            self._ended_counters.record_end(session.name, session.epoch.counter)

    def server_views(self) -> list[ServerView]:
        return [server_view(server, self._registry, self._now) for server in self._registry]

    def session_views(self) -> list[SessionView]:
        return [session_view(session, self._registry) for session in self._sessions.values()]

    def opaque_bytes(self) -> int:
        """Return the bytes of the rows of all logs."""
        return sum(s.opaque_bytes for s in self._sessions.values() if s.opaque)

    def explain_routes(self, model: str, now: float) -> RouteExplanations:
        """Explain the cost of each server of `model` and the route of each session; "" means all models."""
        return explain_routes(self._registry, self._sessions.values(), model, now)

    def find_view(self, name: str) -> SessionView | None:
        found = self._sessions.get(name)
        return None if found is None else session_view(found, self._registry)

    def uncovered_blocks(self, model: str) -> list[int]:
        """Return the blocks of `model` that no connected server holds; `/ready` reports them."""
        return self._registry.uncovered_blocks(model)

    def max_length(self, model: str) -> int:
        """Return the most positions a session of `model` may have; 0 if none of its servers is connected."""
        return self._registry.max_length(model)

    def hellos_of(self, model: str) -> list[Hello]:
        """Return the Hellos of the model's servers, as they are on one variant."""
        return self._registry.hellos_of(model)

    def hold_limit_seconds(self, model: str) -> float:
        """Return the hold limit of its sessions in seconds; 0: they are not held."""
        return self._hold_limits.limit_seconds(model)

    def active_revision(self, model: str) -> str | None:
        """Return the revision that turns of `model` run on; None if none of its servers is connected."""
        variant = self._registry.active_variant(model)
        return None if variant is None else variant.revision
