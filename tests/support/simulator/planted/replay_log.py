"""Planted bugs in the replay log of servers (R3: lowest cuts, R6: replay).

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from modelswarm.protocol.identity import Handle
from modelswarm_serving.core.hops.replay_log import ReplayLog, Rows
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


class KeepsTruncatedRows(ReplayLog):
    """R3 (lowest cuts): a truncation of the KV does not truncate the replay log, and the first rows stay."""

    @override
    def truncate(self, hop: Handle, end: int) -> None:
        return

    @override
    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        known = max(0, self.retained_range(hop)[1] - first) * self._row_bytes
        super().append(hop, first + known // self._row_bytes, memoryview(rows)[known:])


class IgnoresHoles(ReplayLog):
    """R6 (replay): rows after a hole are retained as the missing ones."""

    @override
    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        start, end = self.retained_range(hop)
        super().append(hop, min(first, end) if start < end else 0, rows)


class ReadsRowsBefore(ReplayLog):
    """R6 (replay): rows are read from one position too low."""

    @override
    def read_rows(self, hop: Handle, start: int, end: int) -> Rows | None:
        back = 1 if start > self.retained_range(hop)[0] else 0
        return super().read_rows(hop, start - back, end - back)


class SharedLog(ReplayLog):
    """One run of rows for all hops of a session, whatever their boundary is."""

    key_of: Callable[[Handle], Handle]

    @override
    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        super().append(self.key_of(hop), first, rows)

    @override
    def retained_range(self, hop: Handle) -> tuple[int, int]:
        return super().retained_range(self.key_of(hop))

    @override
    def read_rows(self, hop: Handle, start: int, end: int) -> Rows | None:
        return super().read_rows(self.key_of(hop), start, end)

    @override
    def drop(self, hop: Handle) -> None:
        super().drop(self.key_of(hop))


class MixesBoundaries(ServerCore):
    """R6 (replay): retained rows are found by session, not by boundary."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        log = self._replay_log
        log.__class__ = SharedLog
        assert isinstance(log, SharedLog)
        log.key_of = self._first_of_session

    def _first_of_session(self, handle: Handle) -> Handle:
        hop = self._fencing.hops.get(handle)
        if hop is None:
            return handle
        return next(other.handle for other in self._fencing.hops if other.session == hop.session)
