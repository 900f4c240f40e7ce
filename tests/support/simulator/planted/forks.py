"""Planted bugs in forks (R15): each leaves a new session with KV that is not that of its log.

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import ForkSource
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.kv.forks import KvForks
from modelswarm_serving.model.base import KvCopy


class CopiesOneTooFew(KvForks):
    """The last position of a copy is counted and not copied."""

    @override
    def plan(self) -> list[KvCopy]:
        tasks = super().plan()
        return [replace(task, count=task.count - 1) if task.count > 1 else task for task in tasks]


class OutlivesRewinds(KvForks):
    """A copy goes on after the parent's Fence, which may truncate the parent or free its pages."""

    @override
    def on_stopped(self, hop: Hop) -> None:
        self._forks.pop(hop, None)


class AcknowledgesAtOnce(KvForks):
    """The FenceAck states the whole copy before it is made."""

    @override
    def start(self, hop: Hop, parent: Hop | None, source: ForkSource, now: float) -> bool:
        if super().start(hop, parent, source, now):
            copied, hop.kv = hop.kv, self._forks[hop].length
            self._acknowledge(hop)
            hop.kv = copied
            return True
        return False
