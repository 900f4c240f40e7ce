"""Epoch counters of named sessions that ended here, and the bound of those that other processes state.

Used by `gateway.py`. The next session of a name starts above the counter of the last one (R20, ownership). Knows no
session.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from modelswarm.protocol.identity import NO_EPOCH, Epoch
from modelswarm.protocol.messages import SessionInfo

MAX_NAMES = 10_000
"""Names whose counters are kept. The highest of the others counts for all names, so no order is ever lost."""
MAX_STATED_COUNTER = 1 << 48
"""Greatest counter that is believed. A session raises its own by one per route, which never comes near."""


class EpochCounters:
    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._counters: OrderedDict[str, int] = OrderedDict()  # the latest end last
        self._dropped = 0  # highest counter of the names that are not kept

    def record_end(self, name: str, counter: int) -> None:
        self._counters[name] = max(counter, self._counters.pop(name, 0))
        if len(self._counters) > self._max_names:
            _, dropped = self._counters.popitem(last=False)
            self._dropped = max(self._dropped, dropped)

    def counter_of(self, name: str) -> int:
        """Return the counter above which a session of this name starts."""
        return self._counters.get(name, self._dropped)


def lowest_epoch(found: int, unix_seconds: float) -> int:
    """Return the counter above which a new session begins: of two that have one name, the newer one outranks.

    `found`: the highest counter that was found. Epochs are raised more slowly than once in a millisecond.
    """
    return max(found, int(1000 * unix_seconds))


def without_absurd_epochs(found: SessionInfo) -> SessionInfo:
    """Return an answer without hops if an epoch in it is absurd. Otherwise this gateway would go on above that one."""
    epochs: list[Epoch | None] = [found.epoch, found.last_started]
    epochs += [hop.epoch for hop in found.hops]
    if all(epoch is None or epoch.counter <= MAX_STATED_COUNTER for epoch in epochs):
        return found
    empty = SessionInfo(found.session, NO_EPOCH)
    return replace(empty, claimant=found.claimant, search_id=found.search_id)
