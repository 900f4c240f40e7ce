"""Slots: every (span, ordinal) that is to be kept filled with a server.

Used by whoever starts servers: the local runtime, later the operator's keeper. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modelswarm.placement.spans import Span


@dataclass(frozen=True, slots=True)
class Slot:
    name: str  # unique in the swarm; names the server process and its members file
    span_index: int
    span: Span
    ordinal: int


def slots_of(swarm: str, spans: Iterable[Span], replicas: int) -> tuple[Slot, ...]:
    """`replicas` slots per span, span by span, ordered so that a failure while starting leaves every span covered."""
    indexed = tuple(enumerate(spans))
    return tuple(
        Slot(f"{swarm}-s{index}-r{ordinal}", index, span, ordinal)
        for ordinal in range(replicas)
        for index, span in indexed
    )


def coverage(spans: Iterable[Span], serving: Iterable[Span]) -> int:
    """The fewest servers that any block has: 0 means that no session can run."""
    counts = dict.fromkeys(spans, 0)
    for span in serving:
        if span in counts:
            counts[span] += 1
    return min(counts.values(), default=0)
