"""KV transfers for migrations (R13, migration): copies the KV of a running hop to a standby hop on another server.

Used by `server.py` and `step.py`. The sender has a cursor per target. It follows the hop's own KV: first the existing
positions, then each new one, as far as the target's windows reach. The output row in the replay log goes along with
each position, so that the standby hop can replay it like the hop it replaces.
Reads and writes run in short steps of their own, in turn with steps of rows. Nothing is computed in them, so rows are
hardly delayed, and a transfer that lacks one position does not wait for rows.
A fault ends the transfer and is reported about its target; the session goes on. Knows no cutover: the gateway decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import CopyKv, FaultKind, Lane, Rows, Window
from modelswarm_serving.core.flow.receive import MAX_EARLY_WINDOWS
from modelswarm_serving.core.hops.hop import Fault, Hop, Phase, ReceivedKv, TransferCursor
from modelswarm_serving.core.parts import CoreParts
from modelswarm_serving.core.settings import TRANSFER_WINDOW_BYTES
from modelswarm_serving.model.base import KvRead, KvWrite, Result

GROUP_BYTES = 128 << 10
"""Bytes of one read or write, unless a single position is larger; less than a frame with all headers."""
STEP_BYTES = 1 << 20
"""Bytes of all reads in one step, or of all writes: about half a millisecond of copying in memory."""
MIN_READ_FACTOR = 2
"""A step may read at least this many times the new KV, whatever the rate. Otherwise the transfer of a large model would
never catch up. A step may write as many times the mean of what is received per step."""
RECEIVED_WEIGHT = 1 / 8
"""Weight of the newest step in the mean of received bytes; low, so that a burst is spread over steps."""
PROGRESS_SECONDS = 0.02
"""Minimum time between two progress messages of a transfer that is behind."""

_Task = tuple[Hop, TransferCursor, KvRead] | tuple[Hop, ReceivedKv, KvWrite]


class KvTransfers:
    def __init__(self, parts: CoreParts) -> None:
        self._shape = parts.shape
        self._outbox = parts.outbox
        self._replay_log = parts.replay_log
        self._bytes_per_second = parts.settings.transfer_rate
        self._read_allowance = 0.0  # bytes
        self._planned_at = 0.0
        self._received_bytes = 0  # since the last step, still to be written
        self._mean_received_bytes = 0.0  # running mean per step
        self._ready: dict[Hop, None] = {}  # hops with KV to read or to write, in turn
        self._running: list[_Task] = []

    # ---- the sending hop

    def on_copy_kv(self, hop: Hop, request: CopyKv) -> None:
        """Start a transfer; a request without a target ends all transfers of the hop."""
        if hop.phase is not Phase.RUNNING or request.epoch != hop.epoch or hop.is_standby:
            return
        if request.to is None:
            hop.transfers.clear()
            hop.transfer_windows.clear()
        elif hop.first <= request.first < request.last <= hop.last:
            self._discard_stale_window(hop, request.to.address.peer, request.start)
            cursor = TransferCursor(
                request.to, request.start, (request.first, request.last), hop.kv
            )
            hop.transfers[request.to.handle] = cursor
            self.schedule_reads(hop)

    def on_window(self, hop: Hop, peer: PeerId, window: Window) -> None:
        """Store the window of a target; it may arrive before the CopyKv that starts the transfer."""
        windows = hop.transfer_windows
        old = windows.get(peer)
        if old is None and len(windows) >= MAX_EARLY_WINDOWS:
            return
        if old is None or window.limit > old.limit or not _has_transfer_to(hop, peer):
            windows[peer] = window
            self.schedule_reads(hop)

    def _discard_stale_window(self, hop: Hop, peer: PeerId, start: int) -> None:
        """Drop the last window of an ended transfer to `peer`. A new one has received nothing beyond its start."""
        window = hop.transfer_windows.get(peer)
        if window is not None and window.received != start and not _has_transfer_to(hop, peer):
            del hop.transfer_windows[peer]

    def schedule_reads(self, hop: Hop) -> None:
        """Queue the hop if it has KV to read; called for new KV and for new windows."""
        if any(self._readable(hop, cursor) for cursor in hop.transfers.values()):
            self._ready.setdefault(hop)

    def _readable(self, hop: Hop, cursor: TransferCursor) -> int:
        """Count the positions that may be read and sent now."""
        if hop.phase is not Phase.RUNNING:
            return 0
        window = hop.transfer_windows.get(cursor.target.address.peer)
        return 0 if window is None else max(0, min(hop.kv, window.limit) - cursor.next_position)

    def on_link_lost(self, hop: Hop, peer: PeerId) -> None:
        for cursor in list(hop.transfers.values()):
            if cursor.target.address.peer == peer:
                self._abort(
                    hop, cursor, Fault(FaultKind.LINK_DOWN, "the link of a KV transfer broke")
                )
        hop.transfer_windows.pop(peer, None)

    def _abort(self, hop: Hop, cursor: TransferCursor, fault: Fault) -> None:
        if hop.transfers.get(cursor.target.handle) is cursor:
            del hop.transfers[cursor.target.handle]
            if not _has_transfer_to(hop, cursor.target.address.peer):
                hop.transfer_windows.pop(cursor.target.address.peer, None)
            self._outbox.report_fault(hop, cursor.target.address.peer, fault)

    # ---- the receiving hop

    def receive_kv(self, hop: Hop, rows: Rows) -> Fault | None:
        """Accept KV for a standby hop; it waits for a step to be written."""
        end, size = rows.first + rows.count, len(rows.payload)
        each = size // max(1, rows.count)
        row_part = each - self._kv_bytes(hop.first, hop.last)
        if row_part not in (0, self._shape.row_bytes) or size != rows.count * each:
            return Fault(
                FaultKind.FAILED, f"{rows.count} positions of a KV transfer in {size} bytes"
            )
        if end <= hop.received:
            return None
        if rows.first > hop.received:
            return Fault(FaultKind.GAP, f"position {rows.first} came, {hop.received} was expected")
        if end > hop.turn.reserved_positions:
            return Fault(
                FaultKind.FAILED,
                f"a KV transfer of {end} positions, {hop.turn.reserved_positions} reserved",
            )
        skip = hop.received - rows.first
        kv, output_rows = self._split_rows(hop, memoryview(rows.payload)[skip * each :], each)
        hop.received_kv.append(ReceivedKv(hop.received, rows.count - skip, kv, output_rows))
        hop.received = end
        self._received_bytes += (rows.count - skip) * self._position_bytes(hop.first, hop.last)
        self.schedule_writes(hop)
        return None

    def schedule_writes(self, hop: Hop) -> None:
        """Queue a standby hop that has KV to write."""
        if hop.received_kv and hop.phase is Phase.RUNNING:
            self._ready.setdefault(hop)

    def grant_window(self, hop: Hop) -> None:
        """Grant the sending hop its next positions, in halves of the window."""
        started = hop.started
        assert started is not None and started.predecessor is not None
        each = self._position_bytes(hop.first, hop.last)
        window = max(2, TRANSFER_WINDOW_BYTES // each)
        limit = min(hop.kv + window, hop.turn.reserved_positions)
        if limit <= hop.granted or hop.granted - hop.kv > window // 2:
            return
        hop.granted = limit
        to = started.predecessor
        window_message = Window(to.handle, started.epoch, hop.received, limit, kv_copy=True)
        self._outbox.send(to.address, Lane.LIVE, window_message)

    def _report_progress(self, hop: Hop, now: float) -> None:
        """Tell the gateway how many positions have been written."""
        if hop.kv < hop.received and now - hop.progress_sent_at < PROGRESS_SECONDS:
            return
        hop.progress_sent_at = now
        self._outbox.send_to_gateway(hop.gateway, Window(hop.gateway_handle, hop.epoch, hop.kv, 0))

    # ---- steps

    @property
    def ready_count(self) -> int:
        """Hops with KV to read or to write."""
        return len(self._ready)

    @property
    def running_count(self) -> int:
        """Tasks in the running step."""
        return len(self._running)

    def plan(self, now: float, decoding: bool) -> list[KvRead | KvWrite]:
        """Return the reads and writes of the next step, hop by hop in turn; `decoding`: sessions decode here."""
        reads = self._read_budget(now, decoding)
        self._mean_received_bytes += RECEIVED_WEIGHT * (
            self._received_bytes - self._mean_received_bytes
        )
        self._received_bytes = 0
        writes = max(STEP_BYTES, MIN_READ_FACTOR * self._mean_received_bytes)
        for hop in sorted(self._ready, key=self._is_far_behind):
            if hop.is_standby:
                writes -= self._add_tasks(hop, self._next_write, writes)
                self.schedule_writes(hop)
            else:
                taken = self._add_tasks(hop, self._next_read, reads)
                reads, self._read_allowance = reads - taken, self._read_allowance - taken
                self.schedule_reads(hop)
        return [task[2] for task in self._running]

    def _add_tasks(self, hop: Hop, next_task: Callable[[Hop], _Task | None], room: float) -> int:
        """Add tasks of a hop until `room` is used up and return their bytes. The hop goes to the end of the queue."""
        if room <= 0:
            return 0
        del self._ready[hop]
        taken = 0
        while taken < room and (task := next_task(hop)) is not None:
            self._running.append(task)
            taken += task[2].count * self._position_bytes(*task[2].blocks)
        return taken

    def _read_budget(self, now: float, decoding: bool) -> float:
        """Return the bytes that may be read in this step."""
        earned, self._planned_at = self._bytes_per_second * (now - self._planned_at), now
        least = MIN_READ_FACTOR * self._new_bytes()
        if decoding and self._bytes_per_second > 0:
            room = self._read_allowance + max(earned, least)
            self._read_allowance = min(room, max(STEP_BYTES, least))
        else:
            self._read_allowance = STEP_BYTES
        return self._read_allowance

    def _new_bytes(self) -> int:
        """Count the bytes of one position for each transfer whose hop has new KV. Longer runs of new positions, such as
        prompts, wait their turn."""
        new = 0
        for hop in self._ready:
            for cursor in hop.transfers.values():
                if hop.kv > cursor.seen_kv:
                    new += self._position_bytes(*cursor.blocks)
                cursor.seen_kv = hop.kv
        return new

    def _is_far_behind(self, hop: Hop) -> bool:
        """True if more than a group is missing. Hops that lack less come first: their sessions may wait for the last
        position. They take no more than the new KV, which is half of what may be read."""
        if hop.is_standby:
            return len(hop.received_kv) > 1
        return any(
            self._readable(hop, each) * self._position_bytes(*each.blocks) > GROUP_BYTES
            for each in hop.transfers.values()
        )

    def _next_read(self, hop: Hop) -> _Task | None:
        behind = [each for each in hop.transfers.values() if self._readable(hop, each)]
        if not behind:
            return None
        cursor = min(behind, key=lambda each: each.next_position)
        most = max(1, GROUP_BYTES // self._position_bytes(*cursor.blocks))
        count = min(self._readable(hop, cursor), most)
        first, cursor.next_position = cursor.next_position, cursor.next_position + count
        return hop, cursor, KvRead(tuple(hop.pages), first, count, cursor.blocks)

    def _next_write(self, hop: Hop) -> _Task | None:
        if hop.phase is not Phase.RUNNING or not hop.received_kv:
            return None
        copied = hop.received_kv.popleft()
        hop.in_step = True  # truncation has to wait, as for rows
        blocks = (hop.first, hop.last)
        return hop, copied, KvWrite(hop.pages, copied.first, copied.count, blocks, copied.kv)

    def finish(self, results: Sequence[Result], now: float) -> list[Hop]:
        """Send what was read, record what was written. Return the hops that the step held, to be released."""
        running, self._running = self._running, []
        held: dict[Hop, None] = {}
        for task, result in zip(running, results, strict=True):
            if isinstance(task[2], KvRead):
                assert isinstance(task[1], TransferCursor)
                self._on_read(task[0], task[1], task[2], result)
            elif isinstance(task[1], ReceivedKv):
                held[task[0]] = None
                self._on_written(task[0], task[1], result, now)
        return list(held)

    def _on_read(self, hop: Hop, cursor: TransferCursor, read: KvRead, result: Result) -> None:
        if hop.transfers.get(cursor.target.handle) is not cursor:
            return  # ended meanwhile
        kv = b"" if result.rows is None else result.rows
        if result.error is not None or len(kv) != read.count * self._kv_bytes(*cursor.blocks):
            why = result.error or "the model read a wrong number of bytes"
            self._abort(hop, cursor, Fault(FaultKind.FAILED, why))
            return
        payload = self._join_rows(hop, read, kv)
        to = cursor.target
        item = Rows(to.handle, hop.epoch, read.first, read.count, payload, kv_copy=True)
        self._outbox.send(to.address, Lane.BULK, item)

    def _on_written(self, hop: Hop, copied: ReceivedKv, result: Result, now: float) -> None:
        if hop.is_freed:
            return
        if result.error is not None:
            if hop.phase is Phase.RUNNING:
                hop.phase = Phase.STOPPED
                self._outbox.report_fault(hop, "", Fault(FaultKind.FAILED, result.error))
            return
        if copied.first != hop.kv:
            return  # an earlier write has failed
        # Also after the end of the epoch: the KV is right, and a pending Fence truncates it if need be.
        hop.kv = copied.first + copied.count
        hop.last_used = now
        if copied.output_rows:
            self._replay_log.append(hop.handle, copied.first, copied.output_rows)
        if hop.phase is Phase.RUNNING:
            self.grant_window(hop)
            self._report_progress(hop, now)

    # ---- layout of a group

    def _kv_bytes(self, first: int, last: int) -> int:
        """Return the KV bytes of one position."""
        return (last - first) * self._shape.kv_bytes

    def _position_bytes(self, first: int, last: int) -> int:
        """Return the bytes of one position with its row; budgets count the row whether it is retained or not."""
        return self._kv_bytes(first, last) + self._shape.row_bytes

    def _join_rows(self, hop: Hop, read: KvRead, kv: bytes | memoryview) -> bytes | memoryview:
        """Add the retained output rows to the KV; a part that ends inside the span has none."""
        if read.blocks[1] != hop.last:
            return kv
        rows = self._replay_log.read_rows(hop.handle, read.first, read.first + read.count)
        if rows is None:
            return kv
        kv_bytes, row_bytes = self._kv_bytes(*read.blocks), self._shape.row_bytes
        parts: list[bytes | memoryview] = []
        for at in range(read.count):
            parts.append(kv[at * kv_bytes : (at + 1) * kv_bytes])
            parts.append(rows[at * row_bytes : (at + 1) * row_bytes])
        return b"".join(parts)

    def _split_rows(
        self, hop: Hop, payload: memoryview, each: int
    ) -> tuple[bytes | memoryview, bytes]:
        """Return KV and rows of a group of positions of `each` bytes; rows are empty if the group has none."""
        kv_bytes = self._kv_bytes(hop.first, hop.last)
        if each == kv_bytes:
            return payload, b""
        starts = range(0, len(payload), each)
        kv = b"".join([payload[at : at + kv_bytes] for at in starts])
        rows = b"".join([payload[at + kv_bytes : at + each] for at in starts])
        return kv, rows


def _has_transfer_to(hop: Hop, peer: PeerId) -> bool:
    return any(cursor.target.address.peer == peer for cursor in hop.transfers.values())
