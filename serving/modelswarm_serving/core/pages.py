"""Which KV pages are free, and how many a session may still take.

Used by `admission.py`. Knows page numbers only: neither what a page holds nor who owns it.
"""

from __future__ import annotations


def pages_for(positions: int, page_size: int) -> int:
    return -(-max(0, positions) // page_size)


class PagePool:
    """A stack of free page numbers: the page given back last is taken first, while it is warm."""

    __slots__ = ("_free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has looked at `free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
