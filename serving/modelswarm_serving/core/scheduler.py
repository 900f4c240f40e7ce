"""Which rows go into the next step: decode rows first and oldest first, then prefill chunks under a budget: what a loss
or a move made necessary before the prompts of new turns, and the oldest first.

Used by `server.py`, which says when a hop becomes ready; nothing here looks at hops that wait. Knows neither
messages nor pages.
"""

from __future__ import annotations

from modelswarm_serving.core.hops.hop import Hop

MIN_PREFILL_ROWS = 32
"""Rows of prefill per step however many sessions decode, so that no prompt starves."""


class Scheduler:
    """Ready hops in queues: those at row n or later decode, the others prefill."""

    def __init__(self, token_budget: int) -> None:
        self._budget = token_budget
        self._decode: dict[Hop, float] = {}  # in order of readiness, with the time of it
        self._prefill: dict[Hop, float] = {}
        self._alone: dict[Hop, float] = {}  # each in a step of its own, before all others
        self._prefill_order: dict[
            Hop, tuple[bool, int]
        ] = {}  # repairs first, then by order of their Go
        self._next_start = 0
        self._decoding: dict[int, int] = {}  # hops of the route -> sessions that decode

    @property
    def ready_count(self) -> int:
        return len(self._decode) + len(self._prefill) + len(self._alone)

    @property
    def has_decoding(self) -> bool:
        """Whether somebody waits for tokens of sessions here."""
        return bool(self._decoding)

    def oldest_ready_at(self) -> float | None:
        """When the row that waits longest became ready."""
        first = next(iter(self._decode.values()), None)
        times = [*self._prefill.values(), *self._alone.values()]
        return min(times if first is None else [first, *times], default=None)

    def on_start(self, hop: Hop) -> None:
        """Go came: from now on its prefill has a place in the queue."""
        self._prefill_order[hop] = (not hop.for_recovery, self._next_start)
        self._next_start += 1

    def remove_hop(self, hop: Hop) -> None:
        """It left the epoch: none of its rows are ready."""
        for queue in (self._decode, self._prefill, self._alone):
            queue.pop(hop, None)
        hop.run_alone = False
        self._prefill_order.pop(hop, None)
        self._set_decode_hops(hop, 0)

    def enqueue(self, hop: Hop, now: float) -> None:
        """Rows [kv, ready_end) may run; a hop that already waits keeps its place."""
        started = hop.started
        assert started is not None
        if hop.run_alone:
            self._alone.setdefault(hop, now)
        elif hop.kv >= started.length - 1:
            self._decode.setdefault(hop, now)
        else:
            self._prefill.setdefault(hop, now)

    def update_decoding(self, hop: Hop, max_hops: int) -> None:
        """Its KV grew: does it decode now? Sessions that finished no longer count."""
        started = hop.started
        assert started is not None
        decodes = hop.kv >= started.length - 1 and started.sample and not hop.finished
        self._set_decode_hops(hop, max(1, min(started.hops, max_hops)) if decodes else 0)

    def take_batch(self) -> list[tuple[Hop, int]]:
        """Hops for the next step, each with the most rows it may run; they are no longer ready."""
        if self._alone:
            hop = next(iter(self._alone))
            del self._alone[hop]
            return [(hop, self._budget)]
        chosen: list[tuple[Hop, int]] = []
        for hop in self._decode:
            if len(chosen) >= min(self._group_size(), self._budget):
                break
            chosen.append((hop, 1))
        for hop, _ in chosen:
            del self._decode[hop]
        if self._prefill:
            least = min(MIN_PREFILL_ROWS, self._budget)
            chosen += self._take_prefill(max(least, self._budget - len(chosen)))
        return chosen

    def _take_prefill(self, budget: int) -> list[tuple[Hop, int]]:
        chosen = []
        for hop in sorted(self._prefill, key=self._prefill_order.__getitem__):
            count = min(budget, hop.ready_end() - hop.kv)
            chosen.append((hop, count))
            budget -= count
            del self._prefill[hop]
            if budget <= 0:
                break
        return chosen

    def _group_size(self) -> int:
        """Decode rows per step: the sessions in as many groups as the longest route has hops, so that while one
        group is here the others keep the other servers busy."""
        if not self._decoding:
            return self._budget
        return -(-sum(self._decoding.values()) // max(self._decoding))

    def _set_decode_hops(self, hop: Hop, hops: int) -> None:
        if hops == hop.decode_hops:
            return
        if hop.decode_hops:
            self._decoding[hop.decode_hops] -= 1
            if not self._decoding[hop.decode_hops]:
                del self._decoding[hop.decode_hops]
        if hops:
            self._decoding[hops] = self._decoding.get(hops, 0) + 1
        hop.decode_hops = hops
