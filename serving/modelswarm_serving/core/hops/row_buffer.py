"""Received rows of one hop that wait for a step: contiguous, taken in order, not copied when a group fits.

Used by `hop.py`. Knows neither positions nor epochs: R1 (rows never truncate) was applied before `append_rows`.
"""

from __future__ import annotations

from collections import deque


class RowBuffer:
    __slots__ = ("_groups", "_row_bytes")

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._groups: deque[bytes | memoryview] = deque()

    def append_rows(self, rows: bytes | memoryview) -> None:
        self._groups.append(rows)

    def put_back(self, rows: bytes | memoryview) -> None:
        """Return rows that were taken and did not run; they come first again."""
        self._groups.appendleft(rows)

    def clear(self) -> None:
        self._groups.clear()

    def take(self, count: int) -> bytes | memoryview:
        """Take the oldest `count` rows, which must be here."""
        wanted = count * self._row_bytes
        if len(self._groups[0]) == wanted:
            return self._groups.popleft()
        parts: list[bytes | memoryview] = []
        while wanted:
            group = self._groups.popleft()
            if len(group) > wanted:
                view = memoryview(group)
                self._groups.appendleft(view[wanted:])
                group = view[:wanted]
            parts.append(group)
            wanted -= len(group)
        return parts[0] if len(parts) == 1 else b"".join(parts)
