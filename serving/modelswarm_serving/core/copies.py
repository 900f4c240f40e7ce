"""Copies of a hop (R13): the sender's cursor over its replay log, and what a warm hop says of its progress.

Used by `server.py` and `steps.py`. A copy follows the log of the hop before the one that is copied: first the rows that
are kept, then each new one, on bulk and marked to be stored only, as far as the windows of the new hop reach. Whatever
goes wrong with it ends the copy and is reported about the new hop's server; the session does not hear of it.
"""

from __future__ import annotations

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Copy, Lane, Rows, Trouble, Window
from modelswarm_serving.core.intake import EARLY_WINDOWS
from modelswarm_serving.core.outbox import Outbox
from modelswarm_serving.core.outflow import BULK_GROUP_BYTES
from modelswarm_serving.core.replay_log import ReplayLog
from modelswarm_serving.core.session import Cursor, Fault, Hop, Phase

TELL_SECONDS = 0.02  # a warm hop that is behind says no more often how far it is


class Copies:
    def __init__(self, out: Outbox, log: ReplayLog, row_bytes: int) -> None:
        self._out = out
        self._log = log
        self._row_bytes = row_bytes

    def order(self, hop: Hop, copy: Copy) -> None:
        """Begin one, in place of one that runs; without a target only end it. Never to where the successor is: whose
        windows would be whose?"""
        if hop.phase is not Phase.RUNNING or copy.epoch != hop.epoch or hop.is_tail:
            return
        hop.cursor = None if copy.to is None else Cursor(copy.to, copy.start)
        self.advance(hop)

    def window(self, hop: Hop, peer: PeerId, window: Window) -> None:
        """From whoever is not the successor: it may be early, of a copy that is ordered in a moment."""
        limits = hop.copy_windows
        if peer in limits or len(limits) < EARLY_WINDOWS:
            limits[peer] = max(limits.get(peer, 0), window.limit)
            self.advance(hop)

    def advance(self, hop: Hop) -> None:
        """Send what the log has and the new hop's window takes."""
        cursor = hop.cursor
        if cursor is None or hop.phase is not Phase.RUNNING:
            return
        start, end = self._log.run(hop.handle)
        if cursor.next < hop.kv and not (start <= cursor.next and end == hop.kv):
            self._end(hop, Fault(Trouble.GAP, f"rows {cursor.next} to {hop.kv} are not kept here"))
            return
        to, step = cursor.to, max(1, BULK_GROUP_BYTES // self._row_bytes)
        end = min(end, hop.copy_windows.get(to.address.peer, 0))
        while cursor.next < end:
            count = min(step, end - cursor.next)
            rows = self._log.take(hop.handle, cursor.next, cursor.next + count)
            assert rows is not None, "it is within the run"
            item = Rows(to.handle, hop.epoch, cursor.next, count, rows, store_only=True)
            self._out.send(to.address, Lane.BULK, item)
            cursor.next += count

    def lost_link(self, hop: Hop, peer: PeerId) -> None:
        if hop.cursor is not None and hop.cursor.to.address.peer == peer:
            self._end(hop, Fault(Trouble.LINK_DOWN, "the link for a copy broke"))

    def _end(self, hop: Hop, fault: Fault) -> None:
        cursor, hop.cursor = hop.cursor, None
        assert cursor is not None
        self._out.report(hop, cursor.to.address.peer, fault)

    def tell(self, hop: Hop, now: float) -> None:
        """A warm hop has run rows: its gateway learns how far it is."""
        behind = hop.kv < (len(hop.log) if hop.is_head else hop.received)
        if behind and now - hop.told_at < TELL_SECONDS:
            return
        hop.told_at = now
        self._out.to_gateway(hop.gateway, Window(hop.reply, hop.epoch, hop.kv, 0))
