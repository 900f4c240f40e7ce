"""Numerics classes (docs/protocol.md): names for the kernels of servers, by the blocks that ran in them.

Pure. The cost model prefers servers of the class that a block ran in last. Knows no sessions; compares names only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class BlockClass(NamedTuple):
    """The class that blocks [first, last) ran in; empty: unknown."""

    first: int
    last: int
    numerics: str


def joined_classes(hops: Iterable[BlockClass]) -> tuple[BlockClass, ...]:
    """Return the classes of hops in block order, neighbours of one class as one."""
    joined: list[BlockClass] = []
    for hop in hops:
        before = joined[-1] if joined else None
        if before is not None and (before.last, before.numerics) == (hop.first, hop.numerics):
            joined[-1] = before._replace(last=hop.last)
        else:
            joined.append(hop)
    return tuple(joined)


def other_classes(ran: Iterable[BlockClass], hop: BlockClass) -> list[str]:
    """Return the known classes other than the hop's in which some of its blocks ran."""
    found = (each.numerics for each in ran if each.first < hop.last and hop.first < each.last)
    return [name for name in dict.fromkeys(found) if name not in ("", hop.numerics)]
