"""The server's half of the protocol: messages, ticks and step results in; messages and work out.

Driven by the shell (`runtime/node.py`, `runtime/engine.py`) in real time and by the simulator in virtual time. Finds
the hop of each message; the other modules of `core/` change it. Does no I/O, has no clock, knows nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch, Handle, PeerId
from modelswarm.protocol.messages import (
    Close,
    CopyKv,
    DrainState,
    FaultKind,
    FaultReport,
    Fence,
    FindSession,
    Grammar,
    Heartbeat,
    Input,
    Item,
    LogRequest,
    OwnedSessions,
    Role,
    Rows,
    Send,
    StartEpoch,
    Token,
    Window,
)
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.flow import receive, send
from modelswarm_serving.core.flow.flow_control import FlowControl
from modelswarm_serving.core.hops.hop import Fault, Hop, Phase
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.kv.transfer import KvTransfers
from modelswarm_serving.core.parts import CoreParts
from modelswarm_serving.core.scheduler import Scheduler
from modelswarm_serving.core.session_lookup import SessionLookup
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.core.stats import ServerStats
from modelswarm_serving.core.step import Steps
from modelswarm_serving.model.base import ModelShape, Result, Task


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """A hop waits for this grammar to be compiled."""

    session: str
    handle: Handle
    epoch: Epoch
    grammar: Grammar


class ServerCore:
    def __init__(
        self, settings: ServerSettings, shape: ModelShape, random_bits: Callable[[], int]
    ) -> None:
        """`random_bits` returns 64 random bits; handles are made of them."""
        self._settings = settings
        self._shape = shape
        self._now = 0.0
        self._peers = Peers(settings.lease_seconds)
        self._drain_state: DrainState | None = None  # the newest request of any gateway
        self._reconciled: set[PeerId] = set()  # gateways whose OwnedSessions came on this link
        self._outbox = Outbox(settings.address.peer, self._peers)
        self._scheduler = Scheduler(settings.token_budget, settings.pipeline_rows)
        self._replay_log = ReplayLog(shape.row_bytes, settings.replay_bytes)
        max_in_flight = settings.in_flight_bytes // shape.row_bytes
        self._flow_control = FlowControl(self._outbox, settings.row_window, max_in_flight)
        parts = CoreParts(
            settings,
            shape,
            self._peers,
            self._outbox,
            self._scheduler,
            self._flow_control,
            self._replay_log,
        )
        self._transfers = KvTransfers(parts)
        self._fencing = Fencing(parts, random_bits)
        self._session_lookup = SessionLookup(self._fencing.hops, self._peers, self._outbox)
        self._steps = Steps(parts, self._fencing, self._transfers)
        self._grammar_requests: list[GrammarRequest] = []

    # --- links -------------------------------------------------------------------------------

    def on_peer_connected(
        self,
        peer: PeerId,
        role: Role,
        now: float,
        target: str = "",
        lease_seconds: float = 0.0,
        replaces: Collection[PeerId] = (),
    ) -> None:
        """A link is up. A gateway also states its `target`, where others reach it, and its own lease.

        `replaces`: gateways whose processes have ended. Their leases are over at once (R19, leases).
        """
        self._advance_clock(now)
        for ended in replaces:
            if role is Role.GATEWAY and ended != peer:
                self._peers.mark_ended(ended)
        if self._peers.has_lapsed(peer, now):
            self._fencing.on_lease_lapsed(peer)
        self._reconciled.discard(peer)
        self._peers.add_link(peer, role, target, lease_seconds, now)

    def on_peer_lost(self, peer: PeerId, now: float) -> None:
        """A link is lost, with everything on its way there. Hops that use it stop and their gateways are told.

        The sessions of a lost gateway go on.
        """
        self._advance_clock(now)
        self._reconciled.discard(peer)
        self._peers.remove_link(peer, now)
        fault = Fault(FaultKind.LINK_DOWN, "the link broke or could not be dialled")
        for hop in list(self._fencing.hops):
            if hop.is_neighbour(peer):
                self._steps.stop_hop(hop, peer, fault)
            else:
                self._transfers.on_link_lost(hop, peer)

    # --- messages ----------------------------------------------------------------------------

    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        self._advance_clock(now)
        if self._peers.has_ended(peer):
            return  # it was on its way when the process ended; a Fence would take a session back
        if self._peers.has_lapsed(peer, now):
            self._fencing.on_lease_lapsed(peer)
        self._peers.on_message(peer, now)
        self._dispatch(peer, item, now)
        self._deliver_loopback(now)

    def _deliver_loopback(self, now: float) -> None:
        own = self._settings.address.peer
        while self._outbox.loopback:
            self._dispatch(own, self._outbox.loopback.popleft(), now)

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        match item:
            case Rows():
                self._on_rows(peer, item, now)
            case Token():
                self._on_token(peer, item, now)
            case Window():
                self._on_window(peer, item, now)
            case Input():
                self._on_input(peer, item, now)
            case Fence():
                self._fencing.on_fence(peer, item, now)
            case StartEpoch():
                self._on_start_epoch(peer, item, now)
            case CopyKv():
                self._on_copy_kv(peer, item)
            case Close():
                self._fencing.on_close(peer, item, now)
            case OwnedSessions():
                self._on_owned_sessions(peer, item)
            case Heartbeat():
                self._peers.on_heartbeat(peer, item.draining, now)
                self._on_drain_request(peer, item.drain)
            case FindSession() | LogRequest():
                self._session_lookup.on_request(peer, item, now)
            case _:
                pass  # meant for gateways, or answered by the shell

    def _on_owned_sessions(self, peer: PeerId, owned: OwnedSessions) -> None:
        """Reconcile once per link: a later repetition would not list the sessions opened since."""
        if peer not in self._reconciled:
            self._reconciled.add(peer)
            self._fencing.on_owned_sessions(peer, owned)

    def _on_drain_request(self, peer: PeerId, requested: DrainState | None) -> None:
        """Store the drain request of one gateway and repeat it to all, so that every gateway migrates sessions."""
        gateways = self._peers.gateways
        if requested is not None and peer in gateways:
            self._drain_state = requested
            for gateway in gateways:
                self._outbox.send_to_gateway(gateway, self.heartbeat())

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is None or peer != hop.gateway:
            self._reject_unknown(peer, message)
            return
        if message.epoch != hop.epoch or hop.phase is not Phase.FENCED:
            return
        if hop.fence_ack is None:  # no FenceAck was sent: no gateway can have planned with this hop
            return
        fault = hop.start_fault(message) or send.retained_fault(self._replay_log, hop, message)
        if fault is not None:
            hop.refuse_start(message)
            self._outbox.report_fault(hop, "", fault)
            return
        early = hop.early
        hop.start_epoch(message)
        hop.last_used = now
        self._replay_log.truncate(hop.handle, message.start)
        self._fencing.on_started(hop)
        self._scheduler.on_start(hop)
        hop.for_recovery = True
        grammar = hop.turn.sampling.grammar
        if hop.awaits_grammar and grammar is not None:
            self._grammar_requests.append(
                GrammarRequest(hop.session, hop.handle, hop.epoch, grammar)
            )
        if message.standby:
            self._transfers.grant_window(hop)
        elif message.predecessor is not None:
            self._flow_control.grant_window(hop)
        for sender, window in early.windows.items():
            self._on_window(sender, window, now)
        for sender, rows in early.rows:
            self._on_rows(sender, rows, now)
        self._steps.schedule_ready(hop, now)

    def _on_copy_kv(self, peer: PeerId, request: CopyKv) -> None:
        hop = self._fencing.hops.get(request.handle)
        if hop is not None and peer == hop.gateway:
            self._transfers.on_copy_kv(hop, request)

    def _reject_unknown(self, peer: PeerId, message: StartEpoch) -> None:
        """Since its FenceAck the hop was freed, or another gateway has taken it."""
        former = self._fencing.hops.former_owner(message.handle)
        if former is not None and former.gateway == peer:
            report = FaultReport(
                former.gateway_handle, message.epoch, FaultKind.UNKNOWN_HANDLE, detail="no such hop"
            )
            self._outbox.send_to_gateway(peer, report)

    def _hop_in_epoch(self, item: Rows | Token | Window | Input) -> Hop | None:
        """Return the hop of a message of the current epoch.

        None for all others, which are dropped (R1, rows never truncate).
        """
        hop = self._fencing.hops.get(item.handle)
        if hop is None or item.epoch != hop.epoch or hop.phase is Phase.STOPPED:
            return None
        return hop

    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._hop_in_epoch(rows)
        if hop is None or (hop.is_head and not rows.kv_copy):
            return
        if hop.started is None:
            window, row_bytes = self._settings.row_window, self._shape.row_bytes
            receive.buffer_early_rows(hop.early, peer, rows, window, row_bytes)
            return
        predecessor = hop.started.predecessor
        if (
            predecessor is None
            or peer != predecessor.address.peer
            or rows.kv_copy != hop.started.standby
        ):
            return
        if rows.kv_copy:
            self._stop_on_fault(hop, peer, self._transfers.receive_kv(hop, rows))
            return
        fault = receive.receive_rows(hop, rows, self._shape.row_bytes)
        if self._stop_on_fault(hop, peer, fault):
            self._flow_control.grant_window(hop)
            self._steps.schedule_ready(hop, now)

    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        hop = self._hop_in_epoch(token)
        if hop is None or hop.started is None or not hop.is_head or hop.is_tail:
            return
        fault = receive.receive_token(hop, token, self._shape.vocab_size)
        if self._stop_on_fault(hop, peer, fault):
            self._steps.schedule_ready(hop, now)

    def _on_input(self, peer: PeerId, entries: Input, now: float) -> None:
        hop = self._hop_in_epoch(entries)
        if hop is None or peer != hop.gateway or not (hop.has_log or hop.turn.prompt_rows):
            return
        if hop.pending_fence is not None:
            receive.buffer_early_input(hop.early, entries)
            return
        fault = receive.receive_input(hop, entries, self._shape)
        if self._stop_on_fault(hop, peer, fault):
            self._steps.schedule_ready(hop, now)

    def _on_window(self, peer: PeerId, window: Window, now: float) -> None:
        hop = self._hop_in_epoch(window)
        if hop is None:
            return
        if window.kv_copy:
            self._transfers.on_window(hop, peer, window)
        elif hop.is_tail:
            if peer == hop.gateway:
                hop.credit = max(hop.credit, window.limit)
                send.release_token(self._outbox, hop)
        elif hop.started is None:
            receive.buffer_early_window(hop.early, peer, window)
        elif hop.started.successor is not None and peer == hop.started.successor.address.peer:
            hop.window = max(hop.window, window.limit)
            hop.acked = max(hop.acked, window.received)
            fault = send.send_retained(self._outbox, hop, self._replay_log, self._shape.row_bytes)
            if not self._stop_on_fault(hop, "", fault):
                return
            send.flush_live(self._outbox, hop)
        self._steps.schedule_ready(hop, now)

    def _stop_on_fault(self, hop: Hop, peer: PeerId, fault: Fault | None) -> bool:
        if fault is not None:
            self._steps.stop_hop(hop, peer, fault)
        return fault is None

    # --- steps -------------------------------------------------------------------------------

    def plan_step(self, now: float) -> tuple[Task, ...]:
        """Return the tasks of the next step; () when none is ready or a step is still running."""
        self._advance_clock(now)
        return self._steps.plan(now)

    @property
    def has_ready_transfers(self) -> bool:
        """True when a KV transfer waits for a step; the step may have to wait for the transfer rate."""
        return self._transfers.ready_count > 0

    def finish_step(
        self, results: Sequence[Result], now: float, worked: float | None = None
    ) -> None:
        """`worked`: CPU seconds of a step that kept the event loop."""
        self._advance_clock(now)
        self._steps.finish(results, now, worked)
        self._deliver_loopback(now)

    def pause_admissions(self, now: float) -> None:
        """A step found its device full, so no new session is admitted for a while."""
        self._fencing.admission.pause(now)

    def fail_step(self, error: str, now: float, *, is_full: bool = False) -> None:
        """The whole step raised, so none of its rows count. Hops that shared the step are run again, one by one.

        `is_full`: its device had too little memory, so a hop that was alone is run again with fewer rows.
        """
        self._advance_clock(now)
        self._steps.fail(error, now, is_full=is_full)
        self._deliver_loopback(now)

    # --- time, effects, heartbeat, statistics --------------------------------------------------

    def _advance_clock(self, now: float) -> None:
        self._now = now
        self._peers.advance_clock(now)

    def tick(self, now: float) -> None:
        self._advance_clock(now)
        self._fencing.tick(now)

    def sample_stalls(self, now: float, slept: float) -> None:
        """Called after each sleep of `slept` seconds (`stall_estimator.py`); a longer one shows a stall."""
        self._steps.sample_stalls(now, slept)

    def start_draining(self, now: float) -> None:
        """Begin a graceful stop: sessions go on here until their gateways have migrated them."""
        self._advance_clock(now)
        self._fencing.start_draining()

    def is_in_use(self, now: float) -> bool:
        """True while a graceful stop has to wait for sessions."""
        return self._fencing.is_in_use(now)

    def take_grammar_requests(self) -> list[GrammarRequest]:
        """Return the grammars to compile, each for one hop; `on_grammar_ready` takes the answers."""
        requests, self._grammar_requests = self._grammar_requests, []
        return requests

    def on_grammar_ready(self, request: GrammarRequest, fault: str | None, now: float) -> None:
        """The grammar of a hop is compiled, or cannot be: then its session ends."""
        self._advance_clock(now)
        hop = self._fencing.hops.get(request.handle)
        if hop is None or hop.epoch != request.epoch or not hop.awaits_grammar:
            return
        hop.awaits_grammar = False
        if fault is not None:
            self._steps.stop_hop(hop, "", Fault(FaultKind.NO_TOKEN, fault))
        self._steps.schedule_ready(hop, now)
        self._deliver_loopback(now)

    def take_sends(self) -> list[Send]:
        return self._outbox.take_sends()

    def heartbeat(self) -> Heartbeat:
        pages = self._fencing.admission.pages
        return Heartbeat(
            steps=self._fencing.steps,
            oldest_ready_ms=1000 * self._oldest_ready_seconds(),
            step_ms=1000 * self._steps.mean_seconds,
            free_pages=pages.free,
            total_pages=pages.total,
            sessions=len(self._fencing.hops),
            rows=self._steps.rows,
            draining=self._fencing.draining,
            stepping_ms=1000 * self._steps.seconds_running(self._now),
            step_p99_ms=1000 * self._steps.p99_seconds,
            busy_ms=1000 * self._steps.busy_seconds,
            read_bytes=self._steps.read_bytes,
            running=self._running_count(),
            drain=self._drain_state,
        )

    @property
    def has_running_sessions(self) -> bool:
        """True while at least one session runs here."""
        return self._running_count() > 0

    def _running_count(self) -> int:
        return sum(hop.phase is Phase.RUNNING for hop in self._fencing.hops)

    def _oldest_ready_seconds(self) -> float:
        oldest = self._scheduler.oldest_ready_at()
        waits = 0.0 if oldest is None else max(0.0, self._now - oldest)
        return max(waits, self._steps.seconds_running(self._now))

    @property
    def busy_gateways(self) -> set[PeerId]:
        """Gateways due a heartbeat every 100 ms (R21, failure detection): those with a running session here.

        During a drain all linked gateways.
        """
        if self._drain_state is DrainState.DRAIN and self._fencing.hops:
            return set(self._peers.gateways)
        return {hop.gateway for hop in self._fencing.hops if hop.phase is Phase.RUNNING}

    @property
    def max_session_length(self) -> int:
        """Log entries of the longest session; Hello states it, so that no gateway asks for more."""
        return self._fencing.admission.max_session_length

    @property
    def stats(self) -> ServerStats:
        admission = self._fencing.admission
        pages = admission.pages
        return ServerStats(
            sessions=len(self._fencing.hops),
            running=self._running_count(),
            ready=self._scheduler.ready_count
            + self._transfers.ready_count
            + self._fencing.forks.ready_count,
            free_pages=pages.free,
            total_pages=pages.total,
            steps=self._fencing.steps,
            rows=self._steps.rows,
            filled_pages=sum(map(admission.filled_pages, self._fencing.hops)),
            recovery_pages=admission.recovery_pages,
            oldest_ready_seconds=self._oldest_ready_seconds(),
            servers=self._peers.linked_count(Role.SERVER),
            gateways=self._peers.linked_count(Role.GATEWAY),
            reports=dict(self._outbox.reports),
            draining=self._fencing.draining,
            replay_bytes=self._replay_log.bytes,
            replay_limit=self._replay_log.limit,
            replay_evictions=self._replay_log.evictions,
        )

    def handles(self) -> tuple[Handle, ...]:
        """Return the handles of all hops, for tests."""
        return tuple(hop.handle for hop in self._fencing.hops)
