"""Copies of a hop (R13): the KV of a hop that serves is read, sent and written beside the route, while it serves.

Used by `server.py` and `steps.py`. The sender has a cursor for each target: it follows the hop's own KV, first what is
there, then each new position, as far as the target's windows reach. With each position goes the output row that the
replay log keeps, so that the copy can answer for it like the hop it replaces. Reads and writes have steps of
their own, short ones in turn with those of rows: nothing is computed, rows that somebody waits for hardly wait, and a
copy that lacks one position does not wait for them.
Whatever goes wrong with a copy ends it and is reported about its target; the session does not hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Copy, Lane, Rows, Trouble, Window
from modelswarm_serving.core.flow.receive import EARLY_WINDOWS
from modelswarm_serving.core.hops.hop import Copied, Cursor, Fault, Hop, Phase
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.replay_log import ReplayLog
from modelswarm_serving.core.settings import COPY_WINDOW_BYTES
from modelswarm_serving.model.base import KvRead, KvWrite, ModelShape, Result

GROUP_BYTES = 128 << 10
"""Of one read or write, when a position is not larger; less than a frame, whatever its heads take."""
STEP_BYTES = 1 << 20
"""Of all reads in one step, or of all writes: about half a millisecond of copying in memory."""
CATCH_UP = 2
"""Times what becomes new is read at least, whatever the rate: or a copy of a large model would never get there. As many
times what comes in a step, on average, may be written."""
COMING_WEIGHT = 1 / 8  # of what came since the last step: a burst waits its turn
TELL_SECONDS = 0.02  # a copy that is behind says no more often how far it is

_Task = tuple[Hop, Cursor, KvRead] | tuple[Hop, Copied, KvWrite]


class Copies:
    def __init__(self, shape: ModelShape, out: Outbox, log: ReplayLog, rate: int) -> None:
        self._shape = shape
        self._out = out
        self._log = log
        self._rate = rate
        self._may_read = 0.0  # bytes
        self._looked = 0.0
        self._came = 0  # bytes to be written, since the last step
        self._coming = 0.0  # ... and the running mean of that
        self._waiting: dict[Hop, None] = {}  # those with something to read or to write, in turn
        self._running: list[_Task] = []

    # ---- the hop that is copied

    def order(self, hop: Hop, copy: Copy) -> None:
        """Begin one, or without a target end all."""
        if hop.phase is not Phase.RUNNING or copy.epoch != hop.epoch or hop.warm:
            return
        if copy.to is None:
            hop.cursors.clear()
            hop.copy_windows.clear()
        elif hop.first <= copy.first < copy.last <= hop.last:
            self._forget(hop, copy.to.address.peer, copy.start)
            cursor = Cursor(copy.to, copy.start, (copy.first, copy.last), hop.kv)
            hop.cursors[copy.to.handle] = cursor
            self.advance(hop)

    def window(self, hop: Hop, peer: PeerId, window: Window) -> None:
        """From a copy; it may be early, of one that is ordered in a moment."""
        windows = hop.copy_windows
        old = windows.get(peer)
        if old is None and len(windows) >= EARLY_WINDOWS:
            return
        if old is None or window.limit > old.limit or not _copied_to(hop, peer):
            windows[peer] = window
            self.advance(hop)

    def _forget(self, hop: Hop, peer: PeerId, start: int) -> None:
        """What a copy there that has ended said last, perhaps after its end; of the one that begins now no more has
        come than where it starts."""
        window = hop.copy_windows.get(peer)
        if window is not None and window.received != start and not _copied_to(hop, peer):
            del hop.copy_windows[peer]

    def advance(self, hop: Hop) -> None:
        """It has new KV, or there is more room for it elsewhere."""
        if any(self._left(hop, cursor) for cursor in hop.cursors.values()):
            self._waiting.setdefault(hop)

    def _left(self, hop: Hop, cursor: Cursor) -> int:
        """Positions that may be read and sent now."""
        if hop.phase is not Phase.RUNNING:
            return 0
        window = hop.copy_windows.get(cursor.to.address.peer)
        return 0 if window is None else max(0, min(hop.kv, window.limit) - cursor.next)

    def lost_link(self, hop: Hop, peer: PeerId) -> None:
        for cursor in list(hop.cursors.values()):
            if cursor.to.address.peer == peer:
                self._drop(hop, cursor, Fault(Trouble.LINK_DOWN, "the link for a copy broke"))
        hop.copy_windows.pop(peer, None)

    def _drop(self, hop: Hop, cursor: Cursor, fault: Fault) -> None:
        if hop.cursors.get(cursor.to.handle) is cursor:
            del hop.cursors[cursor.to.handle]
            if not _copied_to(hop, cursor.to.address.peer):
                hop.copy_windows.pop(cursor.to.address.peer, None)
            self._out.report(hop, cursor.to.address.peer, fault)

    # ---- the copy

    def take(self, hop: Hop, rows: Rows) -> Fault | None:
        """KV for a warm hop: it waits for a step."""
        end, size = rows.first + rows.count, len(rows.payload)
        each = size // max(1, rows.count)
        kept = each - self._kv_bytes(hop.first, hop.last)
        if kept not in (0, self._shape.row_bytes) or size != rows.count * each:
            return Fault(Trouble.FAILED, f"{rows.count} positions of a copy in {size} bytes")
        if end <= hop.received:
            return None
        if rows.first > hop.received:
            return Fault(Trouble.GAP, f"position {rows.first} came, {hop.received} was expected")
        if end > hop.turn.reserve:
            return Fault(Trouble.FAILED, f"a copy of {end} positions, {hop.turn.reserve} reserved")
        skip = hop.received - rows.first
        kv, kept_rows = self._apart(hop, memoryview(rows.payload)[skip * each :], each)
        hop.copied.append(Copied(hop.received, rows.count - skip, kv, kept_rows))
        hop.received = end
        self._came += (rows.count - skip) * self._bytes(hop.first, hop.last)
        self.wake(hop)
        return None

    def wake(self, hop: Hop) -> None:
        """A warm hop may have something to write."""
        if hop.copied and hop.phase is Phase.RUNNING:
            self._waiting.setdefault(hop)

    def grant(self, hop: Hop) -> None:
        """Tell the hop that is copied how far it may send, in halves of the window."""
        go = hop.go
        assert go is not None and go.predecessor is not None
        each = self._bytes(hop.first, hop.last)
        window = max(2, COPY_WINDOW_BYTES // each)
        limit = min(hop.kv + window, hop.turn.reserve)
        if limit <= hop.granted or hop.granted - hop.kv > window // 2:
            return
        hop.granted = limit
        to = go.predecessor
        told = Window(to.handle, go.epoch, hop.received, limit, copy=True)
        self._out.send(to.address, Lane.LIVE, told)

    def _tell(self, hop: Hop, now: float) -> None:
        """Its gateway learns how far it is."""
        if hop.kv < hop.received and now - hop.told_at < TELL_SECONDS:
            return
        hop.told_at = now
        self._out.to_gateway(hop.gateway, Window(hop.reply, hop.epoch, hop.kv, 0))

    # ---- steps

    @property
    def waiting(self) -> int:
        """Hops with something to read or to write."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Tasks in the step that is out."""
        return len(self._running)

    def plan(self, now: float, decoding: bool) -> list[KvRead | KvWrite]:
        """Some bytes for the next step, hop by hop in turn."""
        reads = self._room(now, decoding)
        self._coming += COMING_WEIGHT * (self._came - self._coming)
        self._came = 0
        writes = max(STEP_BYTES, CATCH_UP * self._coming)
        for hop in sorted(self._waiting, key=self._lacks_much):
            if hop.warm:
                writes -= self._take(hop, self._write, writes)
                self.wake(hop)
            else:
                taken = self._take(hop, self._read, reads)
                reads, self._may_read = reads - taken, self._may_read - taken
                self.advance(hop)
        return [task[2] for task in self._running]

    def _take(self, hop: Hop, one: Callable[[Hop], _Task | None], room: float) -> int:
        """Tasks of a hop until the room is used up; the bytes they take. It waits for its next turn at the end."""
        if room <= 0:
            return 0
        del self._waiting[hop]
        taken = 0
        while taken < room and (task := one(hop)) is not None:
            self._running.append(task)
            taken += task[2].count * self._bytes(*task[2].blocks)
        return taken

    def _room(self, now: float, decoding: bool) -> float:
        """Bytes that may be read in this step."""
        earned, self._looked = self._rate * (now - self._looked), now
        least = CATCH_UP * self._new_bytes()
        if decoding and self._rate > 0:
            room = self._may_read + max(earned, least)
            self._may_read = min(room, max(STEP_BYTES, least))
        else:
            self._may_read = STEP_BYTES
        return self._may_read

    def _new_bytes(self) -> int:
        """Of one position of each hop that has new ones, for each of its copies: prompts, and what came while a copy
        took nothing, wait their turn."""
        new = 0
        for hop in self._waiting:
            for cursor in hop.cursors.values():
                if hop.kv > cursor.seen:
                    new += self._bytes(*cursor.blocks)
                cursor.seen = hop.kv
        return new

    def _lacks_much(self, hop: Hop) -> bool:
        """More than a group. Others come first: a session may rest until its last position is copied. They take no more
        than what is new, which is half of what may be read."""
        if hop.warm:
            return len(hop.copied) > 1
        return any(
            self._left(hop, each) * self._bytes(*each.blocks) > GROUP_BYTES
            for each in hop.cursors.values()
        )

    def _read(self, hop: Hop) -> _Task | None:
        behind = [each for each in hop.cursors.values() if self._left(hop, each)]
        if not behind:
            return None
        cursor = min(behind, key=lambda each: each.next)
        most = max(1, GROUP_BYTES // self._bytes(*cursor.blocks))
        count = min(self._left(hop, cursor), most)
        first, cursor.next = cursor.next, cursor.next + count
        return hop, cursor, KvRead(hop.pages, first, count, cursor.blocks)

    def _write(self, hop: Hop) -> _Task | None:
        if hop.phase is not Phase.RUNNING or not hop.copied:
            return None
        copied = hop.copied.popleft()
        hop.busy = True  # a cut has to wait, as for rows
        blocks = (hop.first, hop.last)
        return hop, copied, KvWrite(hop.pages, copied.first, copied.count, blocks, copied.kv)

    def finish(self, results: Sequence[Result], now: float) -> list[Hop]:
        """Sends what was read, counts what was written. Gives the hops that were held by it, to be released."""
        running, self._running = self._running, []
        held: dict[Hop, None] = {}
        for task, result in zip(running, results, strict=True):
            if isinstance(task[2], KvRead):
                assert isinstance(task[1], Cursor)
                self._was_read(task[0], task[1], task[2], result)
            elif isinstance(task[1], Copied):
                held[task[0]] = None
                self._was_written(task[0], task[1], result, now)
        return list(held)

    def _was_read(self, hop: Hop, cursor: Cursor, read: KvRead, result: Result) -> None:
        if hop.cursors.get(cursor.to.handle) is not cursor:
            return  # called off meanwhile
        kv = b"" if result.rows is None else result.rows
        if result.error is not None or len(kv) != read.count * self._kv_bytes(*cursor.blocks):
            why = result.error or "the model read another number of bytes than it was asked for"
            self._drop(hop, cursor, Fault(Trouble.FAILED, why))
            return
        payload = self._together(hop, read, kv)
        to = cursor.to
        item = Rows(to.handle, hop.epoch, read.first, read.count, payload, store_only=True)
        self._out.send(to.address, Lane.BULK, item)

    def _was_written(self, hop: Hop, copied: Copied, result: Result, now: float) -> None:
        if hop.freed:
            return
        if result.error is not None:
            if hop.phase is Phase.RUNNING:
                hop.phase = Phase.STOPPED
                self._out.report(hop, "", Fault(Trouble.FAILED, result.error))
            return
        if copied.first != hop.kv:
            return  # what comes before it has failed
        # also for an epoch that has ended: it was right, a pending cut takes what must go
        hop.kv = copied.first + copied.count
        hop.touched = now
        if copied.rows:
            self._log.append(hop.handle, copied.first, copied.rows)
        if hop.phase is Phase.RUNNING:
            self.grant(hop)
            self._tell(hop, now)

    # ---- what a group looks like

    def _kv_bytes(self, first: int, last: int) -> int:
        """Of one position."""
        return (last - first) * self._shape.kv_bytes

    def _bytes(self, first: int, last: int) -> int:
        """Of one position, with its row: what is counted, whether the row is still kept or not."""
        return self._kv_bytes(first, last) + self._shape.row_bytes

    def _together(self, hop: Hop, read: KvRead, kv: bytes | memoryview) -> bytes | memoryview:
        """With the rows at its end that this hop still keeps; a part that ends elsewhere has none."""
        if read.blocks[1] != hop.last:
            return kv
        rows = self._log.take(hop.handle, read.first, read.first + read.count)
        if rows is None:
            return kv
        kv_bytes, row_bytes = self._kv_bytes(*read.blocks), self._shape.row_bytes
        parts: list[bytes | memoryview] = []
        for at in range(read.count):
            parts.append(kv[at * kv_bytes : (at + 1) * kv_bytes])
            parts.append(rows[at * row_bytes : (at + 1) * row_bytes])
        return b"".join(parts)

    def _apart(self, hop: Hop, payload: memoryview, each: int) -> tuple[bytes | memoryview, bytes]:
        """KV and rows of a group of positions of `each` bytes; no rows if it has none."""
        kv_bytes = self._kv_bytes(hop.first, hop.last)
        if each == kv_bytes:
            return payload, b""
        starts = range(0, len(payload), each)
        kv = b"".join([payload[at : at + kv_bytes] for at in starts])
        rows = b"".join([payload[at + kv_bytes : at + each] for at in starts])
        return kv, rows


def _copied_to(hop: Hop, peer: PeerId) -> bool:
    return any(cursor.to.address.peer == peer for cursor in hop.cursors.values())
