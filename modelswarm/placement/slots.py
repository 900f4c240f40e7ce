"""Slots: every (span, ordinal) that shall have a server.

Used by the local runtime, which starts servers. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelswarm.placement.spans import Span


@dataclass(frozen=True, slots=True)
class Slot:
    name: str  # unique in the swarm; name of the server process and of its run file
    span_index: int
    span: Span
    ordinal: int


def slots_of(swarm: str, spans: Iterable[Span], replicas: int) -> tuple[Slot, ...]:
    """Return `replicas` slots per span, ordered so that a failure while starting leaves every span covered."""
    indexed = tuple(enumerate(spans))
    return tuple(
        Slot(f"{swarm}-s{index}-r{ordinal}", index, span, ordinal)
        for ordinal in range(replicas)
        for index, span in indexed
    )


def coverage(spans: Iterable[Span], serving: Iterable[Span]) -> int:
    """Return the smallest number of servers of any span; with 0 no session can run."""
    counts = dict.fromkeys(spans, 0)
    for span in serving:
        if span in counts:
            counts[span] += 1
    return min(counts.values(), default=0)
