"""Rows of one hop that have arrived and wait for a step: contiguous, taken in order, never copied when a group fits.

Used by `session.py`. Knows neither positions nor epochs: R1 was applied before `put`.
"""

from __future__ import annotations

from collections import deque


class RowBuffer:
    __slots__ = ("_groups", "_row_bytes")

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._groups: deque[bytes | memoryview] = deque()

    def put(self, rows: bytes | memoryview) -> None:
        self._groups.append(rows)

    def put_back(self, rows: bytes | memoryview) -> None:
        """Rows that were taken and did not run; they come first again."""
        self._groups.appendleft(rows)

    def clear(self) -> None:
        self._groups.clear()

    def take(self, count: int) -> bytes | memoryview:
        """The oldest `count` rows; they must have been put."""
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
