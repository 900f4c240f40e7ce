"""The gateway's comparison of one server with others, and a simple reference for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from modelswarm_gateway.core.detection.outlier_detector import MIN_DEVIATIONS, MIN_RATIO
from modelswarm_gateway.core.detection.peer_comparison import (
    MAD_TO_SIGMA,
    MIN_SPREAD,
    TIMER_NOISE,
    CostBySize,
    PeerGroup,
)
from modelswarm_gateway.core.servers.step_times import StepCost

# By step size. A number is a time; nothing is known of what these steps read.
Costs: TypeAlias = Mapping[int, StepCost | float]


@dataclass(frozen=True, slots=True)
class Compared:
    ratio: float  # own time / median of the others
    deviations: float  # distance of own time from that median, in deviations


def slow(compared: Compared) -> bool:
    return compared.ratio >= MIN_RATIO and compared.deviations >= MIN_DEVIATIONS


def as_costs(given: Costs) -> CostBySize:
    return {
        size: each if isinstance(each, StepCost) else StepCost(each) for size, each in given.items()
    }


def compare(own: Costs, others: Sequence[Costs]) -> Compared | None:
    """Return the comparison by the product; None without a step size in common."""
    group = PeerGroup()
    for number, times in enumerate((own, *others)):
        group.add_peer(f"s{number}")
        group.set_costs(f"s{number}", as_costs(times), math.inf)
    look = group.compare()
    row = group.peers.index("s0")
    if math.isnan(look.ratios[row]):
        return None
    return Compared(float(look.ratios[row]), float(look.deviations[row]))


def compare_simply(own: CostBySize, others: Sequence[CostBySize]) -> Compared | None:
    return _simply(own, others) or _simply(own, [at_most(costs) for costs in others])


def at_most(costs: CostBySize) -> CostBySize:
    """Return an upper bound of the time of a step of any size: the cost of the next larger size."""
    return {
        size: costs[min(each for each in costs if each >= size)]
        for size in range(max(costs, default=-1) + 1)
    }


def _simply(own: CostBySize, others: Sequence[CostBySize]) -> Compared | None:
    found = []
    for size, cost in sorted(own.items()):
        known = [costs[size].seconds for costs in others if size in costs]
        if not known:
            continue
        reads = median(costs[size].read_bytes for costs in others if size in costs)
        more = max(1.0, cost.read_bytes / reads) if reads else 1.0
        typical, seconds = max(TIMER_NOISE, median(known)), max(TIMER_NOISE, cost.seconds / more)
        spread = MAD_TO_SIGMA * median(abs(each - typical) for each in known)
        spread = max(spread, MIN_SPREAD * typical)
        found.append(Compared(seconds / typical, (seconds - typical) / spread))
    found.sort(key=lambda compared: (compared.ratio, compared.deviations))
    return found[len(found) // 2] if found else None
