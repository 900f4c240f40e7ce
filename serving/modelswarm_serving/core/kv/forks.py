"""Forks (R15): a new hop copies the KV of another session's hop on this server instead of computing it.

Used by `fencing.py`, which grants pages and acknowledges, and by `step.py`, which runs the copies. The new hop's
FenceAck waits for its copy and states how many positions there are. It is all of them, or a part if the parent left its
epoch or the time is up. The gateway lets the hop run what is missing, so a fork saves work and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import ForkSource
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.parts import CoreParts
from modelswarm_serving.model.base import KvCopy, Result

FORK_SECONDS = 0.2
"""Longest time of a copy. It ends before the FenceAck is overdue, which is after 0.3 s and the longest step."""


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    parent: Hop
    length: int  # positions to copy
    until: float  # time at which the copy ends with what it has


class KvForks:
    def __init__(self, parts: CoreParts, acknowledge: Callable[[Hop], None]) -> None:
        self._shape = parts.shape
        self._replay_log = parts.replay_log
        self._step_bytes = parts.settings.fork_step_bytes
        self._acknowledge = acknowledge
        self._forks: dict[Hop, Fork] = {}  # by the new hop, the oldest first
        self._running: list[tuple[Hop, KvCopy, bytes | memoryview | None]] = []

    def start(self, hop: Hop, parent: Hop | None, source: ForkSource, now: float) -> bool:
        """Begin to fill a new hop. Return False if there is nothing to copy: it may be acknowledged at once."""
        length = 0 if parent is None else self._forked_length(hop, parent, source)
        if parent is None or length <= 0:
            return False
        if hop.is_head or hop.is_tail:
            hop.log = parent.log[:length]
            hop.opaque = {at: row for at, row in parent.opaque.items() if at < length}
        self._forks[hop] = Fork(parent, length, now + FORK_SECONDS)
        return True

    def is_filling(self, hop: Hop) -> bool:
        """Return whether the hop's create waits for its copy."""
        return hop in self._forks or any(filled is hop for filled, _, _ in self._running)

    def _forked_length(self, hop: Hop, parent: Hop, source: ForkSource) -> int:
        """Return the positions of `parent` that a new hop may copy.

        A rewind raises the epoch. So in the epoch that the gateway named, the parent's KV is that of the log it named.
        """
        is_same = (parent.gateway, parent.first, parent.last) == (hop.gateway, hop.first, hop.last)
        is_same = is_same and parent.turn.adapter == hop.turn.adapter
        if not is_same or parent.epoch != source.epoch or parent.pending_fence is not None:
            return 0
        return min(source.length, parent.kv, hop.turn.reserved_positions)

    def on_stopped(self, hop: Hop) -> None:
        """The hop left its epoch. Its own fork ends without an acknowledgement, those that copy it end with one."""
        self._forks.pop(hop, None)
        for copy in [copy for copy, fork in self._forks.items() if fork.parent is hop]:
            self._end(copy)

    def end_overdue(self, now: float) -> None:
        for hop in [hop for hop, fork in self._forks.items() if now >= fork.until]:
            self._end(hop)

    def _end(self, hop: Hop) -> None:
        """End the fork with what it has; during a step, `settle` acknowledges it."""
        del self._forks[hop]
        if not hop.in_step:
            self._acknowledge(hop)

    # ---- steps

    @property
    def ready_count(self) -> int:
        """Hops with KV to copy."""
        return len(self._forks)

    @property
    def running_count(self) -> int:
        """Tasks in the running step."""
        return len(self._running)

    def plan(self) -> list[KvCopy]:
        """Return the copies of the next step, the oldest fork first."""
        room = self._step_bytes
        for hop, fork in self._forks.items():
            each = self._shape.kv_bytes * (hop.last - hop.first)
            count = min(fork.length - hop.kv, max(1, room // each))
            # Own lists: the parent may be truncated or freed meanwhile. No other task writes its pages in this step.
            pages, blocks = tuple(fork.parent.pages), (hop.first, hop.last)
            task = KvCopy(pages, hop.pages, hop.kv, count, blocks)
            rows = self._replay_log.read_rows(fork.parent.handle, hop.kv, hop.kv + count)
            hop.in_step = True  # truncation has to wait, as for rows
            self._running.append((hop, task, rows))
            room -= count * each
            if room <= 0:
                break
        return [task for _, task, _ in self._running]

    def take_results(self, results: Sequence[Result]) -> list[Hop]:
        """Take the results of the step; return the hops that it held, to be released and settled."""
        running, self._running = self._running, []
        for (hop, task, rows), result in zip(running, results, strict=True):
            if result.error is not None:
                self._forks.pop(hop, None)  # the hop runs the rest itself
            elif not hop.is_freed:
                hop.kv = task.first + task.count
                if rows is not None:
                    self._replay_log.append(hop.handle, task.first, rows)
        return [hop for hop, _, _ in running]

    def settle(self, hop: Hop, now: float) -> None:
        """Acknowledge a released hop whose fork is complete or has ended. A Fence that came since was answered."""
        fork = self._forks.get(hop)
        if fork is not None and hop.kv < fork.length and now < fork.until:
            return
        self._forks.pop(hop, None)
        if hop.fence_ack is None:
            self._acknowledge(hop)
