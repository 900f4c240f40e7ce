"""Step times of the servers of one peer group, each compared with all others: one column per step size.

Pure; used by `outlier_detector.py`. Each server is compared with the median of the others, in units of their median
absolute deviation. From one server to the next, both medians differ by at most one place in the sorted order. So
comparing thousands takes as long as a few sorts. A server that reads more per step, because its sessions are longer,
may take that much longer (roofline model of a decode step). One that reads less gets no shorter limit: small models
are not bound by memory. Knows no health and no sessions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.servers.step_times import StepCost

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Least spread of step times, as a share of the median.
MIN_SPREAD = 0.1
# Factor from the median absolute deviation to a standard deviation.
MAD_TO_SIGMA = 1.4826
# Time in seconds per block below which all times count as equal.
TIMER_NOISE = 0.0001
# Number of rows that a table grows by at least.
SPARE_ROWS = 64

# Cost of a step in one block, by the step's size (log2 of its rows).
CostBySize: TypeAlias = Mapping[int, StepCost]


_UNKNOWN = StepCost(math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every server against the others, by row: the median over its step sizes. NaN: no other server to compare with."""

    ratios: Floats  # own time over the median of the others
    deviations: Floats  # difference of the two, in standard deviations of the others

    def outliers(self, min_ratio: float, min_deviations: float) -> Bools:
        return (self.ratios >= min_ratio) & (self.deviations >= min_deviations)


class PeerGroup:
    """A structure of arrays: one row per server; the row of a removed server is reused."""

    def __init__(self) -> None:
        self.peers: list[PeerId] = []  # by row; "": the row is free
        self.fresh_until: Floats = np.zeros(0)  # from then on a time of the row is too old
        self.reported: Floats = np.zeros(0)  # ratio last reported to the registry; NaN: none
        self._row_of: dict[PeerId, int] = {}
        self._free: list[int] = []
        # By step size: [2, rows], seconds and bytes read; NaN: not known.
        self.columns: dict[int, Floats] = {}
        self._baselines: dict[int, Floats] = {}  # what a server without a peer is compared with
        # Servers that were compared with others and were no outlier.
        self._known_healthy: Bools = np.zeros(0, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._row_of)

    def add_peer(self, peer: PeerId) -> None:
        """Add a server that is not in the group."""
        if not self._free:
            count, more = len(self.peers), max(SPARE_ROWS, len(self.peers))
            self._free = list(reversed(range(count, count + more)))
            self.peers += [""] * more
            self.fresh_until = np.append(self.fresh_until, np.full(more, math.inf))
            self.reported = np.append(self.reported, np.full(more, math.nan))
            self._known_healthy = np.append(self._known_healthy, np.zeros(more, dtype=np.bool_))
            for columns in (self.columns, self._baselines):
                for size, column in columns.items():
                    columns[size] = np.append(column, np.full((2, more), math.nan), axis=1)
        row = self._row_of[peer] = self._free.pop()
        self.peers[row] = peer
        self.reported[row], self._known_healthy[row] = math.nan, False

    def remove_peer(self, peer: PeerId) -> None:
        self.set_costs(peer, {}, math.inf)
        row = self._row_of.pop(peer)
        for column in self._baselines.values():
            column[:, row] = math.nan
        self.peers[row] = ""
        self._free.append(row)

    def set_costs(self, peer: PeerId, costs: CostBySize, fresh_until: float) -> None:
        """Replace the costs of the steps of a server."""
        row = self._row_of[peer]
        self.fresh_until[row] = fresh_until
        for size in costs.keys() - self.columns.keys():
            self.columns[size] = np.full((2, len(self.peers)), math.nan)
            self._baselines[size] = np.full((2, len(self.peers)), math.nan)
        for size, column in self.columns.items():
            column[:, row] = costs.get(size, _UNKNOWN)

    def compare(self) -> Comparison:
        """Compare all servers by steps of equal size.

        A server that shares no size with others is compared by their larger steps, which take no less time.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # servers may report any number
            sizes = sorted(self.columns)
            columns = [self.columns[size] for size in sizes]
            same = _median_size([_compare_column(column) for column in columns], len(self.peers))
            alone = np.isnan(same.ratios)
            if not any((alone & ~np.isnan(column[0])).any() for column in columns):
                return same
            found = []
            # Upper bound of the time of a step of this size.
            least = np.full((2, len(self.peers)), math.nan)
            for column in reversed(columns):
                known = ~np.isnan(column[0])
                least = np.where(known, column, least)
                found.append(_compare_column(least, known & alone))
            larger = _median_size(found, len(self.peers))
        return Comparison(
            np.where(alone, larger.ratios, same.ratios),
            np.where(alone, larger.deviations, same.deviations),
        )

    def compare_with_baseline(self, comparison: Comparison, slow: Bools, min_ratio: float) -> Bools:
        """Return servers without a peer whose step time is at least `min_ratio` times their own baseline.

        The baseline is the cost at the last comparison that found the server healthy, or of any shorter step since. It
        is updated here, except for servers in `slow`.
        """
        alone = np.isnan(comparison.ratios)
        healthy = ~alone & ~slow
        self._known_healthy |= healthy
        found = np.zeros(len(self.peers), dtype=np.bool_)
        for size, column in self.columns.items():
            baseline = self._baselines[size]
            limit = min_ratio * np.maximum(TIMER_NOISE, baseline[0])
            found |= alone & (_comparable_seconds(column, baseline[1]) >= limit)
            known = ~np.isnan(column[0])
            lower = alone & ~(baseline[0] <= column[0])
            self._baselines[size] = np.where(known & (healthy | lower), column, baseline)
        return found

    def peers_at(self, rows: Bools) -> list[PeerId]:
        return [peer for row in np.flatnonzero(rows) if (peer := self.peers[row])]

    def never_compared(self, comparison: Comparison) -> Bools:
        """Return servers with step times that were never compared with others and found healthy."""
        known = np.zeros(len(self.peers), dtype=np.bool_)
        for column in self.columns.values():
            known |= ~np.isnan(column[0])
        return known & np.isnan(comparison.ratios) & ~self._known_healthy


def compare_groups(groups: Sequence[PeerGroup]) -> list[Comparison]:
    """Compare each server with those of all groups, although their work differs. Returns one comparison per group."""
    starts = np.cumsum([len(group.peers) for group in groups])[:-1]
    sizes = sorted({size for group in groups for size in group.columns})
    columns = [
        np.concatenate(
            [group.columns.get(size, np.full((2, len(group.peers)), math.nan)) for group in groups],
            axis=1,
        )
        for size in sizes
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        comparison = _median_size(
            [_compare_column(column) for column in columns], sum(len(g.peers) for g in groups)
        )
    return [
        Comparison(ratios, deviations)
        for ratios, deviations in zip(
            np.split(comparison.ratios, starts),
            np.split(comparison.deviations, starts),
            strict=True,
        )
    ]


def _median_size(found: Sequence[tuple[Floats, Floats]], count: int) -> Comparison:
    """Return the median of the known ratios of each row over the step sizes, with the deviation that belongs to it."""
    if not found:
        return Comparison(np.full(count, math.nan), np.full(count, math.nan))
    ratios, deviations = (np.array(each) for each in zip(*found, strict=True))
    order = np.lexsort(
        (deviations, ratios), axis=0
    )  # of equal ratios the lower deviation first; NaN last
    middle = (~np.isnan(ratios)).sum(axis=0) // 2
    at = np.take_along_axis(order, middle.clip(max=len(found) - 1)[np.newaxis], axis=0)
    return Comparison(
        np.take_along_axis(ratios, at, axis=0)[0], np.take_along_axis(deviations, at, axis=0)[0]
    )


def _compare_column(column: Floats, rows: Bools | None = None) -> tuple[Floats, Floats]:
    """Return ratios and deviations by steps of one size; with `rows`, of these rows only."""
    ratios, deviations = np.full((2, column.shape[1]), math.nan)
    known = np.flatnonzero(~np.isnan(column[0]))
    if known.size < 2:
        return ratios, deviations
    costs = column[:, known]
    own, reads = costs
    typical = np.maximum(TIMER_NOISE, median_of_others(own))
    spread = np.empty_like(own)
    for each in np.unique(typical):  # a few
        here = typical == each
        spread[here] = median_of_others(np.abs(own - each))[here]
    spread = np.maximum(MAD_TO_SIGMA * spread, MIN_SPREAD * typical)
    seconds = _comparable_seconds(costs, median_of_others(reads))
    ratios[known], deviations[known] = seconds / typical, (seconds - typical) / spread
    if rows is not None:
        ratios[~rows] = deviations[~rows] = math.nan
    return ratios, deviations


def _comparable_seconds(column: Floats, typical_reads: Floats) -> Floats:
    """Return the seconds, less by as much as each server reads more than is typical."""
    seconds, reads = column
    more = np.fmax(
        1.0, np.divide(reads, typical_reads, where=typical_reads > 0, out=np.ones_like(reads))
    )
    return np.asarray(np.maximum(TIMER_NOISE, seconds / more))


def median_of_others(values: Floats) -> Floats:
    """Return for each of two or more values the median of all others.

    Without the value itself, the sorted order shifts by at most one place.
    """
    others = values.size - 1
    low, high = (others - 1) // 2, others // 2
    ranks = sorted({low, low + 1, high, high + 1})
    order = np.partition(values, ranks)
    below, above = (np.where(values <= order[at], order[at + 1], order[at]) for at in (low, high))
    return np.asarray((below + above) / 2)
