"""Free KV pages, kept as runs of neighbouring numbers.

Attention over neighbouring pages needs no gather. So a request gets the lowest run that holds all of it, and pieces of
several runs only if no run is long enough. Used by `admission.py`. Knows page numbers only: neither what a page holds
nor its owner.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain


def pages_needed(positions: int, page_size: int) -> int:
    return -(-max(0, positions) // page_size)


class PageAllocator:
    __slots__ = ("_runs", "free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._runs: list[tuple[int, int]] = (
            [(0, total)] if total else []
        )  # [start, end), ascending, apart

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller must have checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} pages requested, {self.free} free")
        self.free -= count
        for index, (start, end) in enumerate(self._runs):
            if end - start >= count:
                self._runs[index : index + 1] = (
                    [(start + count, end)] if start + count < end else []
                )
                return list(range(start, start + count))
        return self._allocate_pieces(count)

    def _allocate_pieces(self, count: int) -> list[int]:
        """Take pages from the lowest runs; no run is long enough by itself."""
        taken: list[range] = []
        while count:
            start, end = self._runs.pop(0)
            stop = min(end, start + count)
            if stop < end:
                self._runs.insert(0, (stop, end))
            taken.append(range(start, stop))
            count -= stop - start
        return list(chain.from_iterable(taken))

    def release(self, pages: list[int]) -> None:
        self.free += len(pages)
        start = end = -1
        for page in sorted(pages):
            if page == end:
                end += 1
                continue
            self._release_run(start, end)
            start, end = page, page + 1
        self._release_run(start, end)

    def _release_run(self, start: int, end: int) -> None:
        """Put [start, end) back, joined with the runs it touches."""
        if start == end:
            return
        at = bisect_left(self._runs, (start, end))
        first, last = at, at
        if at and self._runs[at - 1][1] == start:
            first, start = at - 1, self._runs[at - 1][0]
        if at < len(self._runs) and self._runs[at][0] == end:
            last, end = at + 1, self._runs[at][1]
        self._runs[first:last] = [(start, end)]
