"""Continuous batching: each step runs the decode rows first, then prefill chunks, under a budget of rows.

`Scheduler` chooses the rows of the next step. Decode rows run oldest first. Prefill of recoveries and migrations
precedes prompts of new turns, each oldest first. Used by `server.py` and `step.py`, which report when a hop becomes
ready. Knows neither messages nor pages, and never looks at hops that wait.
"""

from __future__ import annotations

import math

from modelswarm_serving.core.hops.hop import Hop

MIN_PREFILL_ROWS = 32
"""Rows of prefill per step, however many sessions decode, so that no prompt starves."""


class Scheduler:
    """Queues of ready hops: hops at row n or later decode, the others prefill."""

    def __init__(self, token_budget: int, pipeline_rows: int) -> None:
        """`pipeline_rows`: most rows of a new prompt in a step, where its route has several hops."""
        self._budget, self._pipeline_rows = token_budget, pipeline_rows
        self._decode: dict[Hop, float] = {}  # in order of readiness, with its time
        self._prefill: dict[Hop, float] = {}
        self._alone: dict[Hop, float] = {}  # one per step, before all others
        self._prefill_order: dict[
            Hop, tuple[bool, int]
        ] = {}  # recoveries first, then by StartEpoch
        self._next_start = 0
        self._decoding: dict[int, int] = {}  # hops of the route -> sessions that decode

    @property
    def ready_count(self) -> int:
        return len(self._decode) + len(self._prefill) + len(self._alone)

    @property
    def has_decoding(self) -> bool:
        """True while a session decodes here."""
        return bool(self._decoding)

    def oldest_ready_at(self) -> float | None:
        """Return the time at which the row that waits longest became ready; None when no row waits."""
        first = next(iter(self._decode.values()), None)
        times = [*self._prefill.values(), *self._alone.values()]
        return min(times if first is None else [first, *times], default=None)

    def on_start(self, hop: Hop) -> None:
        """StartEpoch came: the prefill of the hop gets its place in the order."""
        self._prefill_order[hop] = (not hop.for_recovery, self._next_start)
        self._next_start += 1

    def remove_hop(self, hop: Hop) -> None:
        """The hop left its epoch: none of its rows are ready."""
        for queue in (self._decode, self._prefill, self._alone):
            queue.pop(hop, None)
        hop.alone_rows = 0
        self._prefill_order.pop(hop, None)
        self._set_decode_hops(hop, 0)

    def enqueue(self, hop: Hop, now: float) -> None:
        """Queue the hop, whose rows [kv, ready_end) may run; a queued hop keeps its place."""
        started = hop.started
        assert started is not None
        if hop.alone_rows:
            self._alone.setdefault(hop, now)
        elif hop.kv >= started.length - 1:
            self._decode.setdefault(hop, now)
        else:
            self._prefill.setdefault(hop, now)

    def update_decoding(self, hop: Hop, max_hops: int) -> None:
        """The KV of the hop grew: count it if it decodes now. A finished session no longer counts."""
        started = hop.started
        assert started is not None
        decodes = hop.kv >= started.length - 1 and started.sample and not hop.finished
        self._set_decode_hops(hop, max(1, min(started.hops, max_hops)) if decodes else 0)

    def take_batch(self) -> list[tuple[Hop, int]]:
        """Take the hops of the next step out of the queues, each with its maximum of rows."""
        if self._alone:
            hop = next(iter(self._alone))
            del self._alone[hop]
            return [(hop, hop.alone_rows)]
        chosen: list[tuple[Hop, int]] = []
        rows, group_size = 0, self._group_size()
        for hop in self._decode:
            if len(chosen) >= group_size or rows >= self._budget:
                break
            # one row, or those of the tokens that a grammar forced together
            count = min(hop.ready_end() - hop.kv, self._budget - rows)
            chosen.append((hop, count))
            rows += count
        for hop, _ in chosen:
            del self._decode[hop]
        if self._prefill:
            least = min(MIN_PREFILL_ROWS, self._budget)
            chosen += self._take_prefill(max(least, self._budget - rows))
        return chosen

    def _take_prefill(self, budget: int) -> list[tuple[Hop, int]]:
        chosen = []
        for hop in sorted(self._prefill, key=self._prefill_order.__getitem__):
            count = min(budget, hop.ready_end() - hop.kv, self._max_prefill(hop))
            chosen.append((hop, count))
            budget -= count
            del self._prefill[hop]
            if budget <= 0:
                break
        return chosen

    def _max_prefill(self, hop: Hop) -> int:
        """Return the most rows of the hop in a step. The hops of a new prompt work at the same time, in short steps.

        A recovery is mostly the work of one hop.
        """
        started = hop.started
        assert started is not None
        is_new, _ = self._prefill_order[hop]
        return self._pipeline_rows if is_new and started.hops > 1 else self._budget

    def _group_size(self) -> int:
        """Return the decode rows of a step.

        A session is here for one of as many turns as its route has hops: while it is here, others keep the other
        servers busy. Sessions of one hop are in every step, and read the weights together.
        """
        if not self._decoding:
            return self._budget
        return math.ceil(sum(count / hops for hops, count in self._decoding.items()))

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
