"""The pass R6: from where every hop of a route restarts, given what each still has.

Pure. Called by the loop with what `Fenced` reported, kept rows included: a run at the very boundary where the hop ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import RetainedRows


@dataclass(frozen=True, slots=True)
class HopState:
    """What a hop has: KV for [0, kv) and rows at its end boundary in `kept` runs."""

    kv: int
    boundary: int
    retained: tuple[RetainedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartPoint:
    start: int  # the hop is cut to this and runs from it
    send_from: int  # first row its successor lacks


def restart_points(hops: Sequence[HopState]) -> list[RestartPoint]:
    """One pass from tail to head; hops in route order.

    A hop that is not ahead of its successor just goes on from its own KV. One that is ahead sends kept rows, and goes
    back to where they end: at worst to where its successor starts.
    """
    points: list[RestartPoint] = []
    needed = 0
    for index in range(len(hops) - 1, -1, -1):
        hop = hops[index]
        tail = index == len(hops) - 1
        start = hop.kv if tail else min(hop.kv, retained_until(hop, needed))
        points.append(RestartPoint(start, needed))
        needed = start
    points.reverse()
    return points


def retained_until(hop: HopState, start: int) -> int:
    """End of the contiguous kept rows from `start`; `start` itself if there are none."""
    end = start
    for run in sorted(hop.retained, key=lambda run: run.start):
        if run.boundary == hop.boundary and run.start <= end < run.end:
            end = run.end
    return end
