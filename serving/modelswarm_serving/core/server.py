"""The server's half of the protocol: messages, ticks and step results in; messages and work out.

Driven by the shell (`node.py`, `engine.py`) in real time and by the simulator in virtual time. Does no I/O, has no
clock and knows nothing of torch. Here messages find their hop; what they do to it is in the other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import Handle, PeerId
from modelswarm.protocol.messages import (
    Beat,
    Close,
    Copy,
    Fence,
    Find,
    Go,
    Input,
    Item,
    Live,
    LogRequest,
    Report,
    Role,
    Rows,
    Send,
    Token,
    Trouble,
    Window,
    Wish,
)
from modelswarm_serving.core.fencing import Lifecycle
from modelswarm_serving.core.flow import receive, send
from modelswarm_serving.core.flow.flow_control import Windows
from modelswarm_serving.core.hops.hop import Fault, Hop, Phase
from modelswarm_serving.core.hops.hop_table import FreedHop
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.kv.transfer import Copies
from modelswarm_serving.core.scheduler import Schedule
from modelswarm_serving.core.session_lookup import Finding
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.core.stats import ServerStats
from modelswarm_serving.core.step import Steps
from modelswarm_serving.model.base import ModelShape, Result, Task


class ServerCore:
    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        """`draw` gives 64 random bits: handles are made of them."""
        self._settings = settings
        self._shape = shape
        self._now = 0.0
        self._peers = Peers(settings.lease_seconds)
        self._wish: Wish | None = None  # the last one of any gateway
        self._listed: set[PeerId] = set()  # gateways that have said on this link what they have
        self._out = Outbox(settings.address.peer, self._peers)
        self._schedule = Schedule(settings.token_budget)
        self._log = ReplayLog(shape.row_bytes, settings.replay_bytes)
        self._copies = Copies(shape, self._out, self._log, settings.copy_rate)
        coming = settings.coming_bytes // shape.row_bytes
        self._windows = Windows(self._out, settings.row_window, coming)
        self._life = Lifecycle(
            settings,
            shape,
            draw,
            self._peers,
            self._out,
            self._schedule,
            self._windows,
            self._log,
        )
        self._finding = Finding(self._life.hops, self._peers, self._out)
        self._steps = Steps(
            shape,
            self._life,
            self._out,
            self._schedule,
            self._windows,
            self._log,
            self._copies,
        )

    # --- links -------------------------------------------------------------------------------

    def connected(
        self, peer: PeerId, role: Role, now: float, target: str = "", lease_seconds: float = 0.0
    ) -> None:
        """Of a gateway: `target`, where others reach it, and the lease that it was started with."""
        self._look(now)
        if self._peers.lapsed(peer, now):
            self._life.lapsed(peer)
        self._listed.discard(peer)
        self._peers.connected(peer, role, target, lease_seconds, now)

    def disconnected(self, peer: PeerId, now: float) -> None:
        """What was under way on that link is lost: its gateways learn it; the sessions of a gateway go on."""
        self._look(now)
        self._listed.discard(peer)
        self._peers.disconnected(peer, now)
        fault = Fault(Trouble.LINK_DOWN, "the link broke or could not be dialled")
        for hop in list(self._life.hops):
            if hop.talks_to(peer):
                self._steps.stop(hop, peer, fault)
            else:
                self._copies.lost_link(hop, peer)

    # --- messages ----------------------------------------------------------------------------

    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        self._look(now)
        if self._peers.lapsed(peer, now):
            self._life.lapsed(peer)
        self._peers.heard(peer, now)
        self._dispatch(peer, item, now)
        self._loop_back(now)

    def _loop_back(self, now: float) -> None:
        own = self._settings.address.peer
        while self._out.to_self:
            self._dispatch(own, self._out.to_self.popleft(), now)

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
                self._life.fence(peer, item, now)
            case Go():
                self._on_go(peer, item, now)
            case Copy():
                self._on_copy(peer, item)
            case Close():
                self._life.close(peer, item.handle)
            case Live():
                self._on_live(peer, item)
            case Beat():
                self._peers.beat(peer, item.draining, now)
                self._on_wish(peer, item.wish)
            case Find() | LogRequest():
                self._finding.asked(peer, item, now)
            case _:
                pass  # for gateways, or answered by the shell

    def _on_live(self, peer: PeerId, live: Live) -> None:
        """Once on each link: repeated, it would not know of what has been opened since."""
        if peer not in self._listed:
            self._listed.add(peer)
            self._life.live(peer, live)

    def _on_wish(self, peer: PeerId, wish: Wish | None) -> None:
        """Whether sessions are to leave: said to one gateway, it goes for all of them."""
        gateways = self._peers.gateways
        if wish is not None and peer in gateways:
            self._wish = wish
            for gateway in gateways:
                self._out.to_gateway(gateway, self.beat())

    def _on_go(self, peer: PeerId, go: Go, now: float) -> None:
        hop = self._life.hops.get(go.handle)
        if hop is None:
            self._unknown(peer, go)
            return
        if peer != hop.gateway:
            self._lost(peer, go)
            return
        if go.epoch != hop.epoch or hop.phase is not Phase.FENCED:
            return
        if hop.pending is not None:  # not answered yet: no gateway can have planned with it
            return
        fault = hop.go_fault(go) or send.kept_fault(self._log, hop, go)
        if fault is not None:
            hop.refuse(go)
            self._out.report(hop, "", fault)
            return
        early = hop.early
        hop.run(go)
        hop.touched = now
        self._log.cut(hop.handle, go.start)
        self._life.ran(hop)
        self._schedule.started(hop)
        hop.repair = True
        if go.warm:
            self._copies.grant(hop)
        elif go.predecessor is not None:
            self._windows.grant(hop)
        for sender, window in early.windows.items():
            self._on_window(sender, window, now)
        for sender, rows in early.rows:
            self._on_rows(sender, rows, now)
        self._steps.wake(hop, now)

    def _on_copy(self, peer: PeerId, copy: Copy) -> None:
        hop = self._life.hops.get(copy.handle)
        if hop is not None and peer == hop.gateway:
            self._copies.order(hop, copy)

    def _unknown(self, peer: PeerId, go: Go) -> None:
        """A hop that this server gave up between its answer and this Go, or another gateway took and closed."""
        self._tell(self._life.hops.freed(go.handle), peer, go)
        self._lost(peer, go)

    def _lost(self, peer: PeerId, go: Go) -> None:
        """Another gateway took the hop between this one's Fence and its Go."""
        self._tell(self._life.hops.lost(go.handle), peer, go)

    def _tell(self, freed: FreedHop | None, peer: PeerId, go: Go) -> None:
        if freed is not None and freed.gateway == peer:
            report = Report(freed.reply, go.epoch, Trouble.UNKNOWN_HANDLE, detail="no such hop")
            self._out.to_gateway(peer, report)

    def _current(self, item: Rows | Token | Window | Input) -> Hop | None:
        """The hop of a message of its present epoch; all others are dropped (R1)."""
        hop = self._life.hops.get(item.handle)
        if hop is None or item.epoch != hop.epoch or hop.phase is Phase.STOPPED:
            return None
        return hop

    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._current(rows)
        if hop is None or (hop.is_head and not rows.store_only):
            return
        if hop.go is None:
            window, row_bytes = self._settings.row_window, self._shape.row_bytes
            receive.keep_rows(hop.early, peer, rows, window, row_bytes)
            return
        before = hop.go.predecessor
        if before is None or peer != before.address.peer or rows.store_only != hop.go.warm:
            return
        if rows.store_only:
            self._went_well(hop, peer, self._copies.take(hop, rows))
            return
        fault = receive.take_rows(hop, rows, self._shape.row_bytes)
        if self._went_well(hop, peer, fault):
            self._windows.grant(hop)
            self._steps.wake(hop, now)

    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        hop = self._current(token)
        if hop is None or hop.go is None or not hop.is_head or hop.is_tail:
            return
        fault = receive.take_token(hop, token, self._shape.vocab_size)
        if self._went_well(hop, peer, fault):
            self._steps.wake(hop, now)

    def _on_input(self, peer: PeerId, entries: Input, now: float) -> None:
        hop = self._current(entries)
        if hop is None or peer != hop.gateway or not (hop.is_head or hop.is_tail):
            return
        if hop.pending is not None:
            receive.keep_input(hop.early, entries)
            return
        fault = receive.take_input(hop, entries, self._shape.vocab_size)
        if self._went_well(hop, peer, fault):
            self._steps.wake(hop, now)

    def _on_window(self, peer: PeerId, window: Window, now: float) -> None:
        hop = self._current(window)
        if hop is None:
            return
        if window.copy:
            self._copies.window(hop, peer, window)
        elif hop.is_tail:
            if peer == hop.gateway:
                hop.credit = max(hop.credit, window.limit)
                send.release(self._out, hop)
        elif hop.go is None:
            receive.keep_window(hop.early, peer, window)
        elif hop.go.successor is not None and peer == hop.go.successor.address.peer:
            hop.window = max(hop.window, window.limit)
            hop.acked = max(hop.acked, window.received)
            gone = send.send_kept(self._out, hop, self._log, self._shape.row_bytes)
            if not self._went_well(hop, "", gone):
                return
            send.flush_live(self._out, hop)
        self._steps.wake(hop, now)

    def _went_well(self, hop: Hop, peer: PeerId, fault: Fault | None) -> bool:
        if fault is not None:
            self._steps.stop(hop, peer, fault)
        return fault is None

    # --- steps -------------------------------------------------------------------------------

    def plan_step(self, now: float) -> tuple[Task, ...]:
        """Tasks for the model; () when nothing is ready or a step is still out."""
        self._look(now)
        return self._steps.plan(now)

    @property
    def copies_wait(self) -> bool:
        """There is something of a copy to plan, perhaps after a pause."""
        return self._copies.waiting > 0

    def finish_step(self, results: Sequence[Result], now: float) -> None:
        self._look(now)
        self._steps.finish(results, now)
        self._loop_back(now)

    def fail_step(self, error: str, now: float) -> None:
        """The whole step raised: none of its rows count; a session that was not alone in it is tried again."""
        self._look(now)
        self._steps.fail(error, now)
        self._loop_back(now)

    # --- time, effects, what others may know ---------------------------------------------------

    def _look(self, now: float) -> None:
        self._now = now
        self._peers.look(now)

    def tick(self, now: float) -> None:
        self._look(now)
        self._life.tick(now)

    def pulse(self, now: float, slept: float) -> None:
        """After each short sleep of so many seconds (`stalls.py`); one that took longer was a stall."""
        self._steps.pulse(now, slept)

    def leave(self, now: float) -> None:
        """A graceful stop has begun: sessions here go on until their gateways have moved them."""
        self._look(now)
        self._life.leave()

    def in_use(self, now: float) -> bool:
        """Whether a graceful stop has to wait for sessions."""
        return self._life.in_use(now)

    def drain(self) -> list[Send]:
        return self._out.drain()

    def beat(self) -> Beat:
        pool = self._life.admission.pool
        return Beat(
            steps=self._life.steps,
            oldest_ready_ms=1000 * self._oldest_seconds(),
            step_ms=1000 * self._steps.mean_seconds,
            free_pages=pool.free,
            total_pages=pool.total,
            sessions=len(self._life.hops),
            rows=self._steps.rows,
            draining=self._life.draining,
            stepping_ms=1000 * self._steps.running_for(self._now),
            step_p99_ms=1000 * self._steps.p99_seconds,
            busy_ms=1000 * self._steps.busy_seconds,
            running=self._running(),
            wish=self._wish,
        )

    @property
    def runs(self) -> bool:
        """Whether a session runs here."""
        return self._running() > 0

    def _running(self) -> int:
        return sum(hop.phase is Phase.RUNNING for hop in self._life.hops)

    def _oldest_seconds(self) -> float:
        oldest = self._schedule.oldest()
        waits = 0.0 if oldest is None else max(0.0, self._now - oldest)
        return max(waits, self._steps.running_for(self._now))

    @property
    def busy_gateways(self) -> set[PeerId]:
        """Those with a session that runs here, and all while sessions are to leave; they hear often (R21)."""
        if self._wish is Wish.LEAVE and self._life.hops:
            return set(self._peers.gateways)
        return {hop.gateway for hop in self._life.hops if hop.phase is Phase.RUNNING}

    @property
    def longest_session(self) -> int:
        """Entries; what Hello says, so that a gateway never asks for more."""
        return self._life.admission.longest

    @property
    def stats(self) -> ServerStats:
        admission = self._life.admission
        pool = admission.pool
        return ServerStats(
            sessions=len(self._life.hops),
            running=self._running(),
            ready=self._schedule.waiting + self._copies.waiting,
            free_pages=pool.free,
            total_pages=pool.total,
            steps=self._life.steps,
            rows=self._steps.rows,
            step_seconds=self._steps.mean_seconds,
            filled_pages=sum(map(admission.filled, self._life.hops)),
            repair_pages=admission.kept,
            oldest_seconds=self._oldest_seconds(),
            servers=self._peers.count(Role.SERVER),
            gateways=self._peers.count(Role.GATEWAY),
            reports=dict(self._out.reports),
            draining=self._life.draining,
            replay_bytes=self._log.bytes,
            replay_limit=self._log.limit,
            replay_dropped=self._log.dropped,
        )

    def handles(self) -> tuple[Handle, ...]:
        """The hops there are, for tests and `status`."""
        return tuple(hop.handle for hop in self._life.hops)
