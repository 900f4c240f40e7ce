"""How hops come, are cut, and go: Fence, Close, Live, grants and leases (R2, R3, R8, R12, R19).

Used by `server.py`. Owns the registry and the pages; of a running epoch it knows only how to stop it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelswarm.protocol.identity import NO_HANDLE, Epoch, Handle, PeerId
from modelswarm.protocol.messages import (
    Create,
    Fence,
    Fenced,
    KeptRows,
    Live,
    Refusal,
    Trouble,
    Turn,
)
from modelswarm_serving.core.flow.flow_control import Windows
from modelswarm_serving.core.flow.receive import take_input
from modelswarm_serving.core.hops.hop import Early, Fault, Hop
from modelswarm_serving.core.hops.hop_table import Registry
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.hops.row_buffer import RowInbox
from modelswarm_serving.core.kv.admission import Admission, Range
from modelswarm_serving.core.ownership import Claim, claim
from modelswarm_serving.core.scheduler import Schedule
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape

NO_TURN = Turn(reserve=0, end=0)
IDLE_SECONDS = 5.0  # a session that nothing was done for so long is one that nobody waits for


class Lifecycle:
    def __init__(
        self,
        settings: ServerSettings,
        shape: ModelShape,
        draw: Callable[[], int],
        peers: Peers,
        out: Outbox,
        schedule: Schedule,
        windows: Windows,
        log: ReplayLog,
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._peers = peers
        self._out = out
        self._schedule = schedule
        self._windows = windows
        self._log = log
        self._grants: dict[Hop, float] = {}  # hops that never ran, until when they may wait for Go
        self.hops = Registry(draw)
        self.admission = Admission(shape, settings.repair_fraction)
        self.steps = 0
        self.draining = False

    # --- Fence -------------------------------------------------------------------------------

    def fence(self, peer: PeerId, fence: Fence, now: float) -> None:
        if self._peers.is_server(peer):
            return
        create = fence.create
        hop = self._find(fence)
        if hop is not None:
            self._fence_hop(hop, peer, fence, now)
        elif create is not None:
            self._create(peer, fence, create, now)
        else:
            answer = Fenced(fence.reply, NO_HANDLE, fence.epoch, steps=self.steps, unknown=True)
            self._out.to_gateway(peer, answer)

    def _find(self, fence: Fence) -> Hop | None:
        create = fence.create
        if create is None:
            return self.hops.get(fence.handle)
        return self.hops.at(create.session, create.first, create.last)

    def _fence_hop(self, hop: Hop, peer: PeerId, fence: Fence, now: float) -> None:
        silent = self._peers.silent_for(hop.gateway, now)
        found = claim(hop, peer, fence, silent, self._peers.lease(hop.gateway))
        if found is Claim.OUTRANKED:
            self._refuse(peer, fence, Refusal.OUTRANKED, held=hop.epoch)
            return
        if found is Claim.REPLACED and fence.create is not None:
            self.free(hop)
            self._create(peer, fence, fence.create, now)
            return
        if found is Claim.TAKEN:
            self.hops.taken(hop, peer, fence.reply)
        if fence.epoch < hop.epoch:
            return
        if fence.epoch == hop.epoch:
            if hop.answer is not None:  # asked again, before Go
                hop.reply = fence.reply
                hop.answer = replace(hop.answer, handle=fence.reply)
                self._renew_grant(hop, now)
                self._out.to_gateway(peer, hop.answer)
            return
        self._schedule.stopped(hop)
        self._windows.ended(hop)
        hop.stop_epoch()
        hop.reply, hop.epoch = fence.reply, fence.epoch
        hop.ran = max(hop.ran, _ran(fence))
        self._peers.owns(peer, now)
        hop.touched = now
        hop.pending = _both(hop.pending, fence)
        if not hop.busy:
            self.cut(hop, now)

    def cut(self, hop: Hop, now: float) -> None:
        """Make the pending cut and answer it; called when no step holds the hop."""
        fence, hop.pending = hop.pending, None
        assert fence is not None
        hop.cut(fence.kv_cut, fence.log_cut)
        self._log.cut(hop.handle, hop.kv)
        refusal = None
        if fence.turn is not None:
            hop.repair = fence.create is not None and fence.create.repair
            refusal = self._new_turn(hop, fence.turn, now)
        early, hop.early = hop.early, Early(hop.early.rows, hop.early.row_count, hop.early.windows)
        for entries in early.inputs:
            take_input(hop, entries, self._shape.vocab_size)
        self._renew_grant(hop, now)
        self._answer(hop, refusal)

    def _new_turn(self, hop: Hop, turn: Turn, now: float) -> Refusal | None:
        """R8: if it is refused, the cut and the epoch hold and the old reserve and params stay."""
        refusal = self.admission.never(turn, hop.repair)
        if refusal is None and not self._has_room(hop.range, turn, hop.repair, hop, now):
            refusal = Refusal.NO_PAGES
        if refusal is None:
            self.admission.resize(hop, turn)
        return refusal

    def _answer(self, hop: Hop, refusal: Refusal | None) -> None:
        hop.answer = Fenced(
            handle=hop.reply,
            own=hop.handle,
            epoch=hop.epoch,
            kv=hop.kv,
            log=len(hop.log),
            counters=hop.counters,
            kept=self._kept(hop),
            steps=self.steps,
            refused=refusal,
            free_pages=self.admission.pool.free,
        )
        self._out.to_gateway(hop.gateway, hop.answer)

    def _kept(self, hop: Hop) -> tuple[KeptRows, ...]:
        start, end = self._log.run(hop.handle)
        return (KeptRows(hop.last, start, end),) if start < end else ()

    def _create(self, peer: PeerId, fence: Fence, create: Create, now: float) -> None:
        """Open a hop, or refuse and leave nothing behind."""
        turn = fence.turn or NO_TURN
        refusal = self._create_refusal(create, turn, now)
        if refusal is not None:
            self._refuse(peer, fence, refusal)
            return
        hop = self._new_hop(peer, fence, create)
        hop.touched, hop.repair = now, create.repair
        self.admission.resize(hop, turn)
        self.hops.add(hop)
        self._peers.owns(peer, now)
        self._renew_grant(hop, now)
        self._answer(hop, None)

    def _refuse(self, peer: PeerId, fence: Fence, why: Refusal, held: Epoch | None = None) -> None:
        """Nothing is opened, and nothing that is there is touched."""
        answer = Fenced(
            handle=fence.reply,
            own=NO_HANDLE,
            epoch=fence.epoch,
            steps=self.steps,
            refused=why,
            free_pages=self.admission.pool.free,
            held=held,
        )
        self._out.to_gateway(peer, answer)

    def _create_refusal(self, create: Create, turn: Turn, now: float) -> Refusal | None:
        if self.draining:
            return Refusal.DRAINING
        if self.admission.wrong_blocks(create):
            return Refusal.WRONG_BLOCKS
        refusal = self.admission.never(turn, create.repair)
        who = (create.session, create.first, create.last)
        if refusal is None and not self._has_room(who, turn, create.repair, None, now):
            refusal = Refusal.NO_PAGES
        return refusal

    def _has_room(
        self, who: Range, turn: Turn, repair: bool, wanting: Hop | None, now: float
    ) -> bool:
        """For a new hop, or for a turn of `wanting`. Repairs outrank admissions (R12), and a turn that needs more pages
        than its hop has is one."""
        held = 0 if wanting is None else len(wanting.pages)
        fits = self._make_room(turn, held, repair, wanting, now)
        if not repair:
            return fits and not self.admission.outranked(who[0], turn, held, now)
        if fits:
            self.admission.repair_has_room(who)
        else:
            self.admission.repair_waits(who, turn, held, now)
        return fits

    def _new_hop(self, peer: PeerId, fence: Fence, create: Create) -> Hop:
        return Hop(
            session=create.session,
            first=create.first,
            last=create.last,
            is_head=create.first == 0,
            is_tail=create.last == self._shape.n_blocks,
            handle=self.hops.new_handle(),
            gateway=peer,
            reply=fence.reply,
            epoch=fence.epoch,
            ran=_ran(fence),
            turn=NO_TURN,
            pages=[],
            inbox=RowInbox(self._shape.row_bytes),
        )

    def _make_room(
        self, turn: Turn, held: int, repair: bool, wanting: Hop | None, now: float
    ) -> bool:
        """Is there room, if need be by freeing hops whose lease has expired (R19)?"""
        if self.admission.missing(turn, held, repair) <= 0:
            return True
        expired = [
            hop
            for hop in self.hops
            if not hop.busy
            and hop is not wanting
            and self._peers.gone_for(hop.gateway, now) >= self._peers.lease(hop.gateway)
        ]
        expired.sort(key=lambda hop: self._peers.gone_for(hop.gateway, now), reverse=True)
        for hop in expired:
            self.free(hop)
            if self.admission.missing(turn, held, repair) <= 0:
                return True
        return False

    # --- a graceful stop ---------------------------------------------------------------------

    def leave(self) -> None:
        """No hop is created any more, and every gateway that has a session here is told."""
        self.draining = True
        told: set[PeerId] = set()
        for hop in self.hops:
            if hop.gateway not in told:
                told.add(hop.gateway)
                self._out.report(hop, "", Fault(Trouble.DRAINING, "this server is about to stop"))

    def in_use(self, now: float) -> bool:
        """Does anybody still count on a session here? Sessions at rest and those of lost gateways can be rebuilt."""
        return any(
            hop.busy or now - hop.touched < IDLE_SECONDS
            for hop in self.hops
            if not (hop.finished or hop.warm or self._peers.is_gone(hop.gateway))
        )

    # --- the end of a hop --------------------------------------------------------------------

    def close(self, peer: PeerId, handle: Handle) -> None:
        hop = self.hops.get(handle)
        if hop is not None and hop.gateway == peer:
            self.free(hop)

    def free(self, hop: Hop) -> None:
        """Forget the hop at once; its pages follow when the step that borrowed them retires."""
        self._schedule.stopped(hop)
        self._windows.ended(hop)
        self.hops.remove(hop)
        self._grants.pop(hop, None)
        self._log.drop(hop.handle)
        hop.end_copies()
        if hop.busy:
            hop.freed = True
        else:
            self.admission.release(hop)

    def live(self, peer: PeerId, live: Live) -> None:
        """Free what the gateway no longer knows. It is told so, in case this list was a late one."""
        named = {(entry.handle, entry.session) for entry in live.sessions}
        for hop in self.hops.of([peer]):
            if (hop.handle, hop.session) not in named:
                self._give_up(hop, "not in the gateway's list of live sessions")

    def lapsed(self, gateway: PeerId) -> None:
        """Its lease was over before it spoke again: it is one of those that want its hops, the epoch decides. Else it
        could keep one hop from who has taken the others, and none would have the session."""
        for hop in self.hops.of([gateway]):
            hop.led = False

    def ran(self, hop: Hop) -> None:
        """Go came: from now on only the lease can free the hop."""
        self._grants.pop(hop, None)

    def tick(self, now: float) -> None:
        for hop in [hop for hop, until in self._grants.items() if now >= until]:
            self._give_up(hop, "no Go came in time")
        owners = {hop.gateway for hop in self.hops}
        gone = [
            owner
            for owner in owners
            if self._peers.gone_for(owner, now) >= 2 * self._peers.lease(owner)
        ]
        for hop in self.hops.of(gone) if gone else ():
            if self._peers.awake(now) - hop.wanted >= 2 * self._peers.lease(hop.gateway):
                self.free(hop)
        self._peers.forget({hop.gateway for hop in self.hops} if gone else owners)

    def _give_up(self, hop: Hop, why: str) -> None:
        self._out.report(hop, "", Fault(Trouble.UNKNOWN_HANDLE, why))
        self.free(hop)

    def _renew_grant(self, hop: Hop, now: float) -> None:
        if not hop.ever_ran:
            self._grants[hop] = now + self._settings.grant_seconds


def _ran(fence: Fence) -> Epoch:
    return fence.epoch if fence.ran is None else fence.ran


def _both(old: Fence | None, new: Fence) -> Fence:
    """A cut that was not made yet and the one that follows it, as one."""
    if old is None:
        return new
    return replace(
        new,
        kv_cut=min(old.kv_cut, new.kv_cut),
        log_cut=min(old.log_cut, new.log_cut),
        turn=new.turn or old.turn,
        create=new.create or old.create,
    )
