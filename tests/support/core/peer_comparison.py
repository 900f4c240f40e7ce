"""The gateway's comparison of one server with others, and a simple reference for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from modelswarm_gateway.core.detection.outlier_detector import MIN_DEVIATIONS, MIN_RATIO
from modelswarm_gateway.core.detection.peer_comparison import (
    MAD_TO_SIGMA,
    MIN_SPREAD,
    TIMER_NOISE,
    PeerGroup,
    SecondsBySize,
)


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: float  # own time / median of the others
    deviations: float  # distance of own time from that median, in deviations


def slow(compared: Compared) -> bool:
    return compared.ratio >= MIN_RATIO and compared.deviations >= MIN_DEVIATIONS


def compare(own: SecondsBySize, others: Sequence[SecondsBySize]) -> Compared | None:
    """Return the comparison by the product; None without a step size in common."""
    group = PeerGroup()
    for number, times in enumerate((own, *others)):
        group.add_peer(f"s{number}")
        group.set_times(f"s{number}", times, math.inf)
    look = group.compare()
    row = group.peers.index("s0")
    if math.isnan(look.ratios[row]):
        return None
    return Compared(float(look.ratios[row]), float(look.deviations[row]))


def compare_simply(own: SecondsBySize, others: Sequence[SecondsBySize]) -> Compared | None:
    return _simply(own, others) or _simply(own, [at_most(times) for times in others])


def at_most(times: SecondsBySize) -> SecondsBySize:
    """Return an upper bound of the time of a step of any size: the time of the next larger size."""
    return {
        size: times[min(each for each in times if each >= size)]
        for size in range(max(times, default=-1) + 1)
    }


def _simply(own: SecondsBySize, others: Sequence[SecondsBySize]) -> Compared | None:
    found = []
    for size, seconds in sorted(own.items()):
        known = [times[size] for times in others if size in times]
        if not known:
            continue
        typical, seconds = max(TIMER_NOISE, median(known)), max(TIMER_NOISE, seconds)
        spread = MAD_TO_SIGMA * median(abs(each - typical) for each in known)
        spread = max(spread, MIN_SPREAD * typical)
        found.append(Compared(seconds / typical, (seconds - typical) / spread))
    found.sort(key=lambda compared: (compared.ratio, compared.deviations))
    return found[len(found) // 2] if found else None
