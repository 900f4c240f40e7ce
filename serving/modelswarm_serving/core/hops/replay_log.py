"""The replay log (R6): output rows of hops by position, retained within one budget of host memory.

Used by `server.py` and the modules beside it, which name hops by their handle. The rows of a hop are one run of
positions [start, end). When memory is short, the least recently used run is evicted as a whole. Retains the buffers
that were sent, without a copy. Knows nothing of epochs, links or models.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from modelswarm.placement.replay_memory import GROUP_OVERHEAD
from modelswarm.protocol.identity import Handle

Rows = bytes | memoryview


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive groups of rows, each as one step produced it."""

    firsts: list[int] = field(default_factory=list)
    groups: list[Rows] = field(default_factory=list)
    charged: list[int] = field(default_factory=list)  # bytes that the group keeps alive
    end: int = 0
    bytes: int = 0

    def add(self, first: int, count: int, rows: Rows, cost: int) -> None:
        self.firsts.append(first)
        self.groups.append(rows)
        self.charged.append(cost)
        self.end = first + count
        self.bytes += cost

    def pop(self) -> int:
        """Drop the last group and return the bytes freed."""
        self.end = self.firsts.pop()
        self.groups.pop()
        cost = self.charged.pop()
        self.bytes -= cost
        return cost


class ReplayLog:
    """Rows of all hops of a server, at most `limit` bytes of them; a limit of 0 switches it off."""

    def __init__(self, row_bytes: int, limit: int) -> None:
        self._row_bytes = row_bytes
        self.limit = limit
        self._room = limit  # what others leave of it
        self.bytes = 0
        self.evictions = 0  # runs dropped for want of memory
        self._runs: dict[Handle, _Run] = {}  # least recently used first

    @property
    def is_enabled(self) -> bool:
        return self.limit > 0

    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        """Retain rows [first, ...) of a buffer that does not change any more. They replace later rows of the run.

        Rows after a gap are not retained. Neither are rows that fit only instead of older rows of the same hop. The
        older ones are worth more, since a new successor needs rows from 0 on.
        """
        count = len(rows) // self._row_bytes
        if not self.is_enabled or count == 0:
            return
        run = self._touch(hop)
        if run is not None and run.end < first:
            return  # a gap: a successor that needs these rows needs the missing ones too
        if run is not None and run.end > first:
            self.truncate(hop, first)
            run = self._runs.get(hop)
        cost = len(rows) + GROUP_OVERHEAD
        if not self._make_room(hop, cost):
            return
        if run is None:
            run = self._runs[hop] = _Run()
        run.add(first, count, rows, cost)
        self.bytes += cost

    def reserve(self, size: int) -> None:
        """Leave `size` bytes of the budget to others: evict runs as long as the rest is too small."""
        self._room = max(0, self.limit - size)
        while self.bytes > self._room:
            self._evict(next(iter(self._runs)))

    def retained_range(self, hop: Handle) -> tuple[int, int]:
        """Return the retained positions [start, end); (0, 0) if there are none. Counts as a use."""
        run = self._touch(hop)
        return (0, 0) if run is None else (run.firsts[0], run.end)

    def read_rows(self, hop: Handle, start: int, end: int) -> Rows | None:
        """Return rows [start, end) in one buffer; None if some are not retained. Counts as a use."""
        run = self._touch(hop)
        if run is None or start < run.firsts[0] or end > run.end:
            return None
        at = bisect_right(run.firsts, start) - 1
        parts: list[Rows] = []
        while start < end:
            offset = start - run.firsts[at]
            group = run.groups[at]
            count = min(len(group) // self._row_bytes - offset, end - start)
            whole = count * self._row_bytes == len(group)
            parts.append(group if whole else self._part(group, offset, count))
            start += count
            at += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def truncate(self, hop: Handle, end: int) -> None:
        """Retain only rows below `end`. A group that is cut in two still costs the size of its buffer."""
        run = self._runs.get(hop)
        if run is None:
            return
        while run.firsts and run.firsts[-1] >= end:
            self.bytes -= run.pop()
        if not run.firsts:
            del self._runs[hop]
        elif run.end > end:
            first = run.firsts[-1]
            run.groups[-1] = self._part(run.groups[-1], 0, end - first)
            run.end = end

    def rename(self, old: Handle, new: Handle) -> None:
        """The hop has another handle now. Counts as a use."""
        if (run := self._runs.pop(old, None)) is not None:
            self._runs[new] = run

    def drop(self, hop: Handle) -> None:
        run = self._runs.pop(hop, None)
        if run is not None:
            self.bytes -= run.bytes

    def _touch(self, hop: Handle) -> _Run | None:
        run = self._runs.pop(hop, None)
        if run is not None:
            self._runs[hop] = run
        return run

    def _make_room(self, hop: Handle, cost: int) -> bool:
        """Evict runs of other hops, least recently used first, until `cost` bytes fit; none if that cannot help."""
        own = self._runs.get(hop)
        if cost + (0 if own is None else own.bytes) > self._room:
            return False
        while self.bytes + cost > self._room:
            self._evict(next(other for other in self._runs if other != hop))
        return True

    def _evict(self, hop: Handle) -> None:
        self.drop(hop)
        self.evictions += 1

    def _part(self, group: Rows, offset: int, count: int) -> Rows:
        size = self._row_bytes
        return memoryview(group)[offset * size : (offset + count) * size]
