"""The replay pass (R6, replay): the position from which each hop of a route restarts, given what each still holds.

Pure. Called by the recovery loop with the content of the FenceAcks. Retained rows count if they are a run at the
block boundary where the hop ends. Knows neither sessions nor messages other than the retained runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import RetainedRows


@dataclass(frozen=True, slots=True)
class HopState:
    """State of a hop: KV for [0, kv) and rows at its end boundary in the `retained` runs."""

    kv: int
    boundary: int
    retained: tuple[RetainedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class RestartPoint:
    start: int  # the hop is truncated to this position and runs from it
    send_from: int  # first row its successor lacks


def restart_points(hops: Sequence[HopState]) -> list[RestartPoint]:
    """Compute all restart points in one pass from tail to head; hops in route order.

    A hop that is not ahead of its successor continues from its own KV. One that is ahead sends retained rows and goes
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
    """Return the end of the contiguous retained rows from `start`; `start` itself if there are none."""
    end = start
    for run in sorted(hop.retained, key=lambda run: run.start):
        if run.boundary == hop.boundary and run.start <= end < run.end:
            end = run.end
    return end
