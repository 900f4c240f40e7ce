"""Bugs on purpose in what servers keep: the replay log with one rule switched off.

Joined to the others in `protocol.py`'s manner: each is a subclass that breaks one rule and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import Handle
from modelswarm_serving.core.hops.replay_log import ReplayLog, Rows
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


class StaleLog(ReplayLog):
    """Nothing is ever cut, and what was there first stays."""

    def truncate(self, hop: Handle, end: int) -> None:
        pass

    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        known = max(0, self.retained_range(hop)[1] - first) * self._row_bytes
        super().append(hop, first + known // self._row_bytes, memoryview(rows)[known:])


class SparseLog(ReplayLog):
    """Rows after a hole are taken for those that are missing."""

    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        start, end = self.retained_range(hop)
        super().append(hop, min(first, end) if start < end else 0, rows)


class BehindLog(ReplayLog):
    """The rows that are given out are those before the ones that were asked for."""

    def read_rows(self, hop: Handle, start: int, end: int) -> Rows | None:
        back = 1 if start > self.retained_range(hop)[0] else 0
        return super().read_rows(hop, start - back, end - back)


class KeepsCutRows(ServerCore):
    """R3: a cut of the KV does not cut the kept rows."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._replay_log.__class__ = StaleLog


class KeepsRowsWithHoles(ServerCore):
    """R6: kept rows are not what their positions say once some went."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._replay_log.__class__ = SparseLog


class SendsOtherKeptRows(ServerCore):
    """R6: kept rows are sent as other positions."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._replay_log.__class__ = BehindLog
