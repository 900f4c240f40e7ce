"""Planted bugs in opaque rows (R14): one of an input is lost, stale or misplaced, one of an answer is repeated or lost.

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, Item, Rows, StartEpoch
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.hop_messages import HopMessages
from modelswarm_gateway.core.sessions.session import Hop as GatewayHop
from modelswarm_gateway.core.sessions.session import Session
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.server import ServerCore


class LogsUnwantedTokens(ServerCore):
    """R14 (opaque rows): a turn that only returns rows leaves a token in the logs, if its gateway is lost then."""

    @override
    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        if isinstance(item, Fence) and item.turn is not None:
            item = replace(item, turn=replace(item.turn, only_rows=False))
        super().receive(peer, item, now)


class StaleRows(Hop):
    """A hop that truncates its log and keeps the rows of the entries that it drops."""

    __slots__ = ()

    @override
    def _truncate_log(self, length: int) -> None:
        del self.log[length:]


class KeepsStaleRows(ServerCore):
    """R3 (lowest cuts): a row of a discarded entry takes the place of the token that is there later."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None:
            hop.__class__ = StaleRows
        super()._on_start_epoch(peer, message, now)


class TakesRowsOverShifted(Recovery):
    """R20 (takeover): the rows of a log that another gateway left are in the wrong order."""

    @override
    def take_over(self, session: Session, where: SessionLocation, log: FetchedLog) -> None:
        rows = list(log.opaque.values())
        shifted = dict(zip(log.opaque, rows[1:] + rows[:1], strict=True))
        super().take_over(session, where, replace(log, opaque=shifted))


class RepeatsRows(GatewayCore):
    """R14 (opaque rows): rows that the tail computes again are returned again."""

    @override
    def _on_rows(self, peer: PeerId, item: Rows, now: float) -> None:
        session = self._session_of_tail(peer, item)
        if session is not None and item.first < session.next_row:
            session.next_row = item.first
        super()._on_rows(peer, item, now)


class SkipsRows(Recovery):
    """R6 (replay): the first row that is missing after a fault counts as returned."""

    @override
    def enter_loop(self, session: Session, now: float) -> None:
        if session.returns_rows and session.fault_at is not None:
            session.next_row = min(session.next_row + 1, session.length)
        super().enter_loop(session, now)


class ReplaysRowsOfOtherBlocks(HopMessages):
    """R6 (replay): after a fault a hop between head and tail gets the rows of the blocks before its own."""

    @override
    def _send_block_rows(self, session: Session, hop: GatewayHop, start: int) -> None:
        shift = session.fault_at is not None
        hop.first, hop.last = hop.first - shift, hop.last - shift
        super()._send_block_rows(session, hop, start)
        hop.first, hop.last = hop.first + shift, hop.last + shift
