"""One server against others, by the comparison that the gateway runs, and by the simple way that it must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from modelswarm_gateway.core.detection.outlier_detector import FAR, SLOW
from modelswarm_gateway.core.detection.peer_comparison import (
    DEVIATION,
    LEAST_SPREAD,
    NOISE,
    Alike,
    Times,
)


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: float  # own time over the median of the others
    deviations: float  # between the two


def slow(compared: Compared) -> bool:
    return compared.ratio >= SLOW and compared.deviations >= FAR


def compare(own: Times, others: Sequence[Times]) -> Compared | None:
    """None: there is no size of steps that another has made too."""
    group = Alike()
    for number, times in enumerate((own, *others)):
        group.add(f"s{number}")
        group.put(f"s{number}", times, math.inf)
    look = group.look()
    row = group.peers.index("s0")
    if math.isnan(look.ratios[row]):
        return None
    return Compared(float(look.ratios[row]), float(look.deviations[row]))


def compare_simply(own: Times, others: Sequence[Times]) -> Compared | None:
    return _simply(own, others) or _simply(own, [at_most(times) for times in others])


def at_most(times: Times) -> Times:
    """What steps of any size took no longer than: larger ones."""
    return {
        size: times[min(each for each in times if each >= size)]
        for size in range(max(times, default=-1) + 1)
    }


def _simply(own: Times, others: Sequence[Times]) -> Compared | None:
    found = []
    for size, seconds in sorted(own.items()):
        known = [times[size] for times in others if size in times]
        if not known:
            continue
        typical, seconds = max(NOISE, median(known)), max(NOISE, seconds)
        spread = DEVIATION * median(abs(each - typical) for each in known)
        spread = max(spread, LEAST_SPREAD * typical)
        found.append(Compared(seconds / typical, (seconds - typical) / spread))
    found.sort(key=lambda compared: compared.ratio)
    return found[len(found) // 2] if found else None
