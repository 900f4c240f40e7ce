"""Creates, truncates and frees hops: Fence, Close, OwnedSessions, leases.

Rules: R2 (fencing), R3 (lowest cuts), R8 (parked), R12 (admission) and R19 (leases).

Used by `server.py`. Owns the hop table and the pages. Knows of a running epoch only how to stop it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from modelswarm.protocol.identity import NO_EPOCH, NO_GATEWAY, NO_HANDLE, Epoch, PeerId
from modelswarm.protocol.messages import (
    Close,
    Create,
    FaultKind,
    Fence,
    FenceAck,
    OwnedSessions,
    Refusal,
    RetainedRows,
    Turn,
)
from modelswarm_serving.core.flow.receive import receive_input
from modelswarm_serving.core.hops.hop import NO_LIMIT, EarlyMessages, Fault, Hop
from modelswarm_serving.core.hops.hop_table import HopTable
from modelswarm_serving.core.hops.row_buffer import RowBuffer
from modelswarm_serving.core.kv.admission import Admission, HopKey
from modelswarm_serving.core.kv.forks import KvForks
from modelswarm_serving.core.ownership import Ownership, decide_ownership
from modelswarm_serving.core.parts import CoreParts

EMPTY_TURN = Turn(reserved_positions=0, end=0)
IDLE_SECONDS = 5.0
"""A graceful stop does not wait for a session without messages or steps for this many seconds."""


class Fencing:
    def __init__(self, parts: CoreParts, random_bits: Callable[[], int]) -> None:
        self._settings = parts.settings
        self._shape = parts.shape
        self._peers = parts.peers
        self._outbox = parts.outbox
        self._scheduler = parts.scheduler
        self._flow_control = parts.flow_control
        self._replay_log = parts.replay_log
        self._start_deadlines: dict[Hop, float] = {}  # hops that never ran: freed then
        self.hops = HopTable(random_bits)
        self.admission = Admission(parts.shape, parts.settings.recovery_fraction)
        self.forks = KvForks(parts, lambda hop: self._acknowledge(hop, None))
        self.steps = 0
        self.draining = False

    # --- Fence -------------------------------------------------------------------------------

    def on_fence(self, peer: PeerId, fence: Fence, now: float) -> None:
        if self._peers.is_server(peer):
            return
        create = fence.create
        hop = self._find_hop(peer, fence)
        if hop is not None:
            self._fence_hop(hop, peer, fence, now)
        elif create is not None:
            self._create_hop(peer, fence, create, now)
        else:
            answer = FenceAck(
                fence.gateway_handle, NO_HANDLE, fence.epoch, steps=self.steps, unknown=True
            )
            self._outbox.send_to_gateway(peer, answer)

    def _find_hop(self, peer: PeerId, fence: Fence) -> Hop | None:
        """Return the hop. Only its owner finds it by its handle; other gateways must create theirs (R20, takeover)."""
        create = fence.create
        if create is None:
            hop = self.hops.get(fence.handle)
            return None if hop is None or hop.gateway != peer else hop
        return self.hops.get_by_key(create.session, create.first, create.last)

    def _fence_hop(self, hop: Hop, peer: PeerId, fence: Fence, now: float) -> None:
        silent, lease = (
            self._peers.silent_seconds(hop.gateway, now),
            self._peers.lease_seconds(hop.gateway),
        )
        ownership = decide_ownership(
            hop, peer, fence, silent < lease, self._peers.is_linked(hop.gateway)
        )
        if ownership is Ownership.STALE_EPOCH:
            self._refuse(peer, fence, Refusal.STALE_EPOCH, hop.rank)
            return
        if ownership is not Ownership.OWNER and (waiting := self._unanswered_fence(hop)):
            rank = (fence.last_started or NO_EPOCH, fence.epoch)
            self._refuse(hop.gateway, waiting, Refusal.STALE_EPOCH, rank)
        if ownership is Ownership.REPLACED and fence.create is not None:
            self.free_hop(hop)
            self._create_hop(peer, fence, fence.create, now)
            return
        if ownership is Ownership.TAKEN_OVER:
            self._set_owner(hop, peer)
        if fence.epoch < hop.epoch:
            return
        if fence.epoch == hop.epoch:
            if hop.fence_ack is not None:  # the same Fence again, before StartEpoch
                hop.gateway_handle = fence.gateway_handle
                hop.fence_ack = replace(hop.fence_ack, handle=fence.gateway_handle)
                self._renew_grant(hop, now)
                self._outbox.send_to_gateway(peer, hop.fence_ack)
            return
        self._stop_hop(hop)
        hop.gateway_handle, hop.epoch = fence.gateway_handle, fence.epoch
        hop.newest_run_epoch = max(hop.newest_run_epoch, fence.last_started or NO_EPOCH)
        self._peers.start_lease(peer, now)
        hop.last_used = now
        hop.pending_fence = _merge_fences(hop.pending_fence, fence)
        if not hop.in_step:
            self.apply_pending_fence(hop, now)

    def _unanswered_fence(self, hop: Hop) -> Fence | None:
        """Return the Fence that waits for the end of a step, or the create that waits for its copy; None otherwise."""
        if hop.pending_fence is None and self.forks.is_filling(hop):
            return Fence(hop.handle, hop.gateway_handle, hop.epoch, 0, 0)
        return hop.pending_fence

    def _stop_hop(self, hop: Hop) -> None:
        self.forks.on_stopped(hop)
        self._scheduler.remove_hop(hop)
        self._flow_control.remove_hop(hop)
        hop.stop_epoch()

    def _set_owner(self, hop: Hop, gateway: PeerId) -> None:
        former = hop.handle
        self.hops.set_owner(hop, gateway)
        self._replay_log.rename(former, hop.handle)

    def apply_pending_fence(self, hop: Hop, now: float) -> None:
        """Truncate the hop as its pending Fence says and acknowledge; called when no step holds the hop."""
        fence, hop.pending_fence = hop.pending_fence, None
        assert fence is not None
        kept = _common_positions(hop, fence.turn)
        hop.truncate(min(fence.kv_cut, kept.kv), min(fence.log_cut, kept.log))
        self._replay_log.truncate(hop.handle, hop.kv)
        refusal = None
        if fence.turn is not None:
            hop.for_recovery = fence.create is not None and fence.create.for_recovery
            refusal = self._admit_turn(hop, fence.turn, now)
        early, hop.early = (
            hop.early,
            EarlyMessages(hop.early.rows, hop.early.row_count, hop.early.windows),
        )
        for entries in early.inputs:
            receive_input(hop, entries, self._shape)
        self._renew_grant(hop, now)
        self._acknowledge(hop, refusal, paused=self._is_paused(hop.for_recovery, now))

    def _admit_turn(self, hop: Hop, turn: Turn, now: float) -> Refusal | None:
        """Give the hop the pages of a new turn, or return a refusal.

        R8 (parked): after a refusal truncation and epoch stand; the old reserve and parameters stay. The gateway then
        sends a turn without positions to all hops.
        """
        if not turn.reserved_positions:
            self.admission.resize_hop(hop, replace(hop.turn, reserved_positions=hop.kv))
            return None
        refusal = self._refusal_when_empty(turn, hop.for_recovery)
        if refusal is None and not self._has_room(hop.key, turn, hop.for_recovery, hop, now):
            refusal = Refusal.NO_PAGES
        if refusal is None:
            self.admission.resize_hop(hop, turn)
        return refusal

    def _acknowledge(self, hop: Hop, refusal: Refusal | None, *, paused: bool = False) -> None:
        hop.fence_ack = FenceAck(
            handle=hop.gateway_handle,
            server_handle=hop.handle,
            epoch=hop.epoch,
            kv=hop.kv,
            log=len(hop.log),
            counters=hop.counters,
            retained=self._retained_rows(hop),
            steps=self.steps,
            refusal=refusal,
            free_pages=self.admission.pages.free,
            paused=paused and refusal is Refusal.NO_PAGES,
        )
        self._outbox.send_to_gateway(hop.gateway, hop.fence_ack)

    def _retained_rows(self, hop: Hop) -> tuple[RetainedRows, ...]:
        start, end = self._replay_log.retained_range(hop.handle)
        return (RetainedRows(hop.last, start, end),) if start < end else ()

    def _create_hop(self, peer: PeerId, fence: Fence, create: Create, now: float) -> None:
        """Create a hop, or refuse and change nothing."""
        turn = fence.turn or EMPTY_TURN
        refusal = self._create_refusal(create, turn, now)
        if refusal is not None:
            paused = self._is_paused(create.for_recovery, now)
            self._refuse(peer, fence, refusal, paused=paused)
            return
        hop = self._new_hop(peer, fence, create)
        hop.last_used, hop.for_recovery = now, create.for_recovery
        self.admission.resize_hop(hop, turn)
        self.hops.add(hop)
        self._peers.start_lease(peer, now)
        self._renew_grant(hop, now)
        source = create.parent
        parent = None if source is None else self.hops.get(source.handle)
        if source is None or not self.forks.start(hop, parent, source, now):
            self._acknowledge(hop, None)

    def _refuse(
        self,
        peer: PeerId,
        fence: Fence,
        refusal: Refusal,
        owner_rank: tuple[Epoch | None, Epoch | None] = (None, None),
        *,
        paused: bool = False,
    ) -> None:
        """Refuse a Fence; no hop is created or changed."""
        answer = FenceAck(
            handle=fence.gateway_handle,
            server_handle=NO_HANDLE,
            epoch=fence.epoch,
            steps=self.steps,
            refusal=refusal,
            free_pages=self.admission.pages.free,
            owner_epoch=owner_rank[1],
            owner_last_started=owner_rank[0],
            paused=paused and refusal is Refusal.NO_PAGES,
        )
        self._outbox.send_to_gateway(peer, answer)

    def _create_refusal(self, create: Create, turn: Turn, now: float) -> Refusal | None:
        if self.draining:
            return Refusal.DRAINING
        if self.admission.has_wrong_blocks(create):
            return Refusal.WRONG_BLOCKS
        refusal = self._refusal_when_empty(turn, create.for_recovery)
        who = (create.session, create.first, create.last)
        if refusal is None and not self._has_room(who, turn, create.for_recovery, None, now):
            refusal = Refusal.NO_PAGES
        return refusal

    def _refusal_when_empty(self, turn: Turn, for_recovery: bool) -> Refusal | None:
        """Return the refusal of a turn that this server could not serve even if it were empty; else None."""
        if turn.adapter is not None and turn.adapter not in self._settings.adapters:
            return Refusal.NO_ADAPTER
        return self.admission.refusal_when_empty(turn, for_recovery)

    def _has_room(
        self, key: HopKey, turn: Turn, for_recovery: bool, existing: Hop | None, now: float
    ) -> bool:
        """True if a new hop, or a turn of the `existing` hop, gets its pages.

        Recoveries precede new work (R12, admission). A turn that needs more pages than its hop has is new work, too.
        """
        held = 0 if existing is None else len(existing.pages)
        if self._is_paused(for_recovery, now) and self.admission.needs_pages(turn, held):
            return False
        fits = self._make_room(turn, held, for_recovery, existing, now)
        if not for_recovery:
            return fits and not self.admission.conflicts_with_recovery(key[0], turn, held, now)
        if fits:
            self.admission.cancel_reservation(key)
        else:
            self.admission.reserve_for_recovery(key, turn, held, now)
        return fits

    def _is_paused(self, for_recovery: bool, now: float) -> bool:
        return not for_recovery and self.admission.is_paused(now)

    def _new_hop(self, peer: PeerId, fence: Fence, create: Create) -> Hop:
        blocks = None if fence.turn is None else fence.turn.blocks
        return Hop(
            session=create.session,
            first=create.first,
            last=create.last,
            is_head=create.first == (blocks.first if blocks else 0),
            is_tail=create.last == (blocks.last if blocks else self._shape.n_blocks),
            has_range=blocks is not None,
            handle=self.hops.new_handle(),
            gateway=peer,
            gateway_handle=fence.gateway_handle,
            epoch=fence.epoch,
            newest_run_epoch=fence.last_started or NO_EPOCH,
            turn=EMPTY_TURN,
            pages=[],
            row_buffer=RowBuffer(self._shape.row_bytes),
        )

    def _make_room(
        self, turn: Turn, held: int, for_recovery: bool, existing: Hop | None, now: float
    ) -> bool:
        """True if the turn fits, if necessary after freeing hops whose lease has expired (R19, leases).

        A frozen gateway may keep its link. One that gave up its hops leaves them to a takeover for a lease.
        """
        if self.admission.missing_pages(turn, held, for_recovery) <= 0:
            return True
        expired = [
            hop
            for hop in self.hops
            if not hop.in_step and hop is not existing and self._is_left(hop, now)
        ]
        expired.sort(key=lambda hop: self._peers.unheard_seconds(hop.gateway, now), reverse=True)
        for hop in expired:
            self._report_and_free(hop, "its gateway was silent for a lease, and pages are short")
            if self.admission.missing_pages(turn, held, for_recovery) <= 0:
                return True
        return False

    def _is_left(self, hop: Hop, now: float) -> bool:
        """True if the lease of the hop's gateway is over, and one more since its log was requested (R20, takeover)."""
        silent = self._peers.unheard_seconds(hop.gateway, now)
        kept = self._peers.elapsed(now) - hop.kept_since
        return min(silent, kept) >= self._peers.lease_seconds(hop.gateway)

    # --- a graceful stop ---------------------------------------------------------------------

    def start_draining(self) -> None:
        """Refuse new hops from now on and tell every gateway that has a session here."""
        self.draining = True
        reported: set[PeerId] = set()
        for hop in self.hops:
            if hop.gateway not in reported:
                reported.add(hop.gateway)
                self._outbox.report_fault(
                    hop, "", Fault(FaultKind.DRAINING, "this server is about to stop")
                )

    def is_in_use(self, now: float) -> bool:
        """True while a session needs this server. Idle sessions and those of lost gateways can be rebuilt elsewhere."""
        return any(
            hop.in_step or now - hop.last_used < IDLE_SECONDS
            for hop in self.hops
            if not (hop.finished or hop.is_standby or self._peers.is_gone(hop.gateway))
        )

    # --- the end of a hop --------------------------------------------------------------------

    def on_close(self, peer: PeerId, close: Close, now: float) -> None:
        """Free a hop. One that its owner relinquishes keeps KV and log for a takeover, as after an expired lease."""
        hop = self.hops.get(close.handle)
        if hop is None or hop.gateway != peer:
            return
        if not (close.relinquished and hop.was_started):
            self.free_hop(hop)
            return
        self._stop_hop(hop)
        self._set_owner(hop, NO_GATEWAY)
        self._peers.on_relinquished(now)
        hop.kept_since = self._peers.elapsed(now)

    def free_hop(self, hop: Hop) -> None:
        """Remove the hop at once; its pages are released when the step that borrowed them ends."""
        self.forks.on_stopped(hop)
        self._scheduler.remove_hop(hop)
        self._flow_control.remove_hop(hop)
        self.hops.remove(hop)
        self._start_deadlines.pop(hop, None)
        self._replay_log.drop(hop.handle)
        hop.end_transfers()
        if hop.in_step:
            hop.is_freed = True
        else:
            self.admission.release_hop(hop)

    def on_owned_sessions(self, peer: PeerId, owned: OwnedSessions) -> None:
        """Free the hops that the gateway does not list, and report each one, in case the list was out of date."""
        named = {(entry.handle, entry.session) for entry in owned.sessions}
        for hop in self.hops.owned_by([peer]):
            if (hop.handle, hop.session) not in named:
                self._report_and_free(hop, "not in the gateway's list of owned sessions")

    def on_lease_lapsed(self, gateway: PeerId) -> None:
        """The gateway's lease expired before it reconnected, so it loses its priority.

        Its hops go to the gateway with the higher epoch. Otherwise two gateways could each keep a part of a session.
        """
        for hop in self.hops.owned_by([gateway]):
            hop.started_by_owner = False

    def on_started(self, hop: Hop) -> None:
        """StartEpoch came: from now on only the lease can free the hop."""
        self._start_deadlines.pop(hop, None)

    def tick(self, now: float) -> None:
        # A log has no more rows than its pages have positions, and the replay log has the memory of a row for each.
        self._replay_log.reserve(sum(hop.opaque_bytes for hop in self.hops))
        self.forks.end_overdue(now)
        for hop in [hop for hop, until in self._start_deadlines.items() if now >= until]:
            self._report_and_free(hop, "no StartEpoch came in time")
        owners = {hop.gateway for hop in self.hops}
        lost = [
            owner
            for owner in owners
            if self._peers.gone_seconds(owner, now) >= 2 * self._peers.lease_seconds(owner)
        ]
        for hop in self.hops.owned_by(lost) if lost else ():
            if self._peers.elapsed(now) - hop.kept_since >= 2 * self._peers.lease_seconds(
                hop.gateway
            ):
                self.free_hop(hop)
        self._peers.keep_owners({hop.gateway for hop in self.hops} if lost else owners)

    def _report_and_free(self, hop: Hop, detail: str) -> None:
        self._outbox.report_fault(hop, "", Fault(FaultKind.UNKNOWN_HANDLE, detail))
        self.free_hop(hop)

    def _renew_grant(self, hop: Hop, now: float) -> None:
        if not hop.was_started:
            self._start_deadlines[hop] = now + self._settings.grant_seconds


def _merge_fences(old: Fence | None, new: Fence) -> Fence:
    """Return one Fence for a Fence that is still pending and the next one: the lower limits of both."""
    if old is None:
        return new
    return replace(
        new,
        kv_cut=min(old.kv_cut, new.kv_cut),
        log_cut=min(old.log_cut, new.log_cut),
        turn=new.turn or old.turn,
        create=new.create or old.create,
    )


class _Kept(NamedTuple):
    kv: int
    log: int


def _common_positions(hop: Hop, turn: Turn | None) -> _Kept:
    """Return the positions of the hop that may be those of the turn, too. None and no positions: all (R8, parked).

    KV of another adapter is other numbers, and so is KV with rows of blocks where the turn has none (R14, opaque rows).
    No gateway changes the adapter of a session; one of an older version does not know such rows.
    """
    kv = log = NO_LIMIT
    if turn is not None and turn.reserved_positions:
        if turn.prompt_rows != hop.turn.prompt_rows:
            kv = log = min(turn.prompt_rows, hop.turn.prompt_rows)
        if turn.adapter != hop.turn.adapter:
            kv = 0
    return _Kept(kv, log)
