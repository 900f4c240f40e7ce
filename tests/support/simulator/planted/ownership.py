"""Planted bugs in ownership (R20, takeover) and in reservations (I6, admission).

Those in ownership put back holes that the protocol once had, between two gateways.

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from support.simulator.planted.swap import swap_class
from typing_extensions import override

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import Fence, Refusal, Turn
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Hop as GatewayHop
from modelswarm_gateway.core.sessions.session import Session
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.hops.hop import NO_LIMIT, Hop, TransferCursor
from modelswarm_serving.core.hops.hop_table import FormerOwner, HopTable
from modelswarm_serving.core.kv.admission import Admission
from modelswarm_serving.core.kv.transfer import KvTransfers, _Task
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import KvRead, ModelShape

# -- at the servers ----------------------------------------------------------------------------


class KeepsHandles(HopTable):
    """A taken hop keeps its handle."""

    @override
    def set_owner(self, hop: Hop, gateway: PeerId) -> None:
        self._former[hop.handle] = FormerOwner(hop.gateway, hop.gateway_handle)
        hop.gateway, hop.started_by_owner = gateway, False


class FencesHopsOfOthers(Fencing):
    """B1a and B1c: a Fence by handle takes a hop that another gateway has had since, with its turn and its KV."""

    @override
    def _find_hop(self, peer: PeerId, fence: Fence) -> Hop | None:
        return (
            self.hops.get(fence.handle) if fence.create is None else super()._find_hop(peer, fence)
        )

    @override
    def _fence_hop(self, hop: Hop, peer: PeerId, fence: Fence, now: float) -> None:
        if fence.create is None and peer != hop.gateway:
            silent = self._peers.silent_seconds(hop.gateway, now)
            is_free = silent >= self._peers.lease_seconds(hop.gateway) or not hop.started_by_owner
            if not is_free or fence.epoch <= hop.epoch:
                self._refuse(peer, fence, Refusal.STALE_EPOCH, hop.rank)
                return
            self.hops.set_owner(hop, peer)
        super()._fence_hop(hop, peer, fence, now)


class SharesHandles(ServerCore):
    """B1a and B1c: a handle does not belong to one owner."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        swap_class(self._fencing, FencesHopsOfOthers)
        swap_class(self._fencing.hops, KeepsHandles)


class KeepsUnrunLogs(Fencing):
    """B6: a hop that is taken keeps log entries that have not run, such as the prompt of a turn that never started."""

    @override
    def apply_pending_fence(self, hop: Hop, now: float) -> None:
        hop.ran_log = NO_LIMIT
        super().apply_pending_fence(hop, now)


class SilentAboutPendingFences(Fencing):
    """B5: a Fence that waits for a step is not answered when another gateway takes the hop."""

    _fencing_peer: PeerId = ""

    @override
    def on_fence(self, peer: PeerId, fence: Fence, now: float) -> None:
        self._fencing_peer = peer
        super().on_fence(peer, fence, now)

    @override
    def _refuse(
        self,
        peer: PeerId,
        fence: Fence,
        refusal: Refusal,
        owner_rank: tuple[Epoch | None, Epoch | None] = (None, None),
        *,
        paused: bool = False,
    ) -> None:
        if peer == self._fencing_peer:
            super()._refuse(peer, fence, refusal, owner_rank, paused=paused)


class SharesPagesWithReads(KvTransfers):
    """B4: a KV read shares the list of pages with its hop, which a Fence cuts while the step runs."""

    @override
    def _next_read(self, hop: Hop) -> _Task | None:
        task = super()._next_read(hop)
        if task is None or not isinstance(task[2], KvRead):
            return task
        assert isinstance(task[1], TransferCursor)
        return task[0], task[1], replace(task[2], pages=hop.pages)


# -- at the gateways ---------------------------------------------------------------------------


class KeepsGrantsOfRefusedTurns(Recovery):
    """B2: a refused turn keeps what other hops have granted."""

    @override
    def park(self, session: Session, *, refused: bool = False) -> None:
        super().park(session)


class GoesOnAfterHolds(OwnershipCheck):
    """B7: a session that was held for longer than a lease goes on without asking for its owner."""

    @override
    def require(self, session: Session, due_at: float, since: float = math.inf) -> None:
        if since == math.inf:
            super().require(session, due_at)

    @override
    def on_link_lost(self, session: Session, now: float) -> None:
        if not session.is_in_turn:
            super().on_link_lost(session, now)


class ForgetsCutOffs(OwnershipCheck):
    """R20 (takeover): a session that no linked server had for a while is used without a search."""

    @override
    def on_link_lost(self, session: Session, now: float) -> None:
        super().on_link_lost(session, now)
        if session.query is not None:
            session.query.is_cut_off = False


class GoesOnWithoutLinks(OwnershipCheck):
    """R19 (leases): after a hold the servers that have no link yet are not waited for."""

    @override
    def require(self, session: Session, due_at: float, since: float = math.inf) -> None:
        super().require(session, due_at)


# -- reservations ------------------------------------------------------------------------------


class GivesPagesOfTurns(Admission):
    """A hop gets the pages of its turn, and not of all positions that its session has reserved."""

    @override
    def _pages_of_turn(self, turn: Turn) -> int:
        needed = min(turn.reserved_positions, turn.end - 1)
        return super()._pages_of_turn(replace(turn, reserved_positions=needed))


class IgnoresHeldPages(Admission):
    """A turn needs free pages, although its hop has them already."""

    @override
    def missing_pages(self, turn: Turn, held_pages: int, for_recovery: bool) -> int:
        return super().missing_pages(turn, 0, for_recovery)


class ReleasesReservations(Recovery):
    """A refused turn gives back what its session has reserved."""

    @override
    def park(self, session: Session, *, refused: bool = False) -> None:
        turn = session.turn
        session.turn = replace(turn, session_length=0)
        super().park(session, refused=refused)
        session.turn = turn


class TakesOverWithoutReservation(Recovery):
    """A session that is taken over has reserved nothing but the positions of its turns."""

    @override
    def take_over(self, session: Session, where: SessionLocation, log: FetchedLog) -> None:
        assert log.turn is not None
        turn = replace(log.turn, session_length=0)
        super().take_over(session, where, replace(log, turn=turn))


class MigratesWithoutReservation(Recovery):
    """A hop beside the route has the room of the turn only."""

    @override
    def open_copy_target(self, session: Session, hop: GatewayHop) -> None:
        turn = session.turn
        session.turn = replace(turn, reserved_positions=turn.end - 1)
        super().open_copy_target(session, hop)
        session.turn = turn


class KeepsReplacedHops(Recovery):
    """A hop that was replaced is closed with its session, and not when another one has its log."""

    @override
    def close_lost_hops(self, session: Session) -> None:
        return
