"""Step times of the servers of one peer group, each compared with all others: one column per step size.

Pure; used by `outlier_detector.py`. Each server is compared with the median of the others, in units of their median
absolute deviation. From one server to the next, both medians differ by at most one place in the sorted order. So
comparing thousands takes as long as a few sorts. Knows no health and no sessions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId

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

# Seconds per block of a step, by the step's size (log2 of its rows).
SecondsBySize: TypeAlias = Mapping[int, float]


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
        self.columns: dict[int, Floats] = {}  # times by step size; NaN: not known
        self._baselines: dict[int, Floats] = {}  # times a server without a peer is compared with
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
                    columns[size] = np.append(column, np.full(more, math.nan))
        row = self._row_of[peer] = self._free.pop()
        self.peers[row] = peer
        self.reported[row], self._known_healthy[row] = math.nan, False

    def remove_peer(self, peer: PeerId) -> None:
        self.set_times(peer, {}, math.inf)
        row = self._row_of.pop(peer)
        for column in self._baselines.values():
            column[row] = math.nan
        self.peers[row] = ""
        self._free.append(row)

    def set_times(self, peer: PeerId, times: SecondsBySize, fresh_until: float) -> None:
        """Replace the step times of a server."""
        row = self._row_of[peer]
        self.fresh_until[row] = fresh_until
        for size in times.keys() - self.columns.keys():
            self.columns[size] = np.full(len(self.peers), math.nan)
            self._baselines[size] = np.full(len(self.peers), math.nan)
        for size, column in self.columns.items():
            column[row] = times.get(size, math.nan)

    def compare(self) -> Comparison:
        """Compare all servers by steps of equal size.

        A server that shares no size with others is compared by their larger steps, which take no less time.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # servers may report any number
            sizes = sorted(self.columns)
            columns = [self.columns[size] for size in sizes]
            same = _median_size([_compare_column(column) for column in columns], len(self.peers))
            alone = np.isnan(same.ratios)
            if not any((alone & ~np.isnan(column)).any() for column in columns):
                return same
            found = []
            least = np.full(
                len(self.peers), math.nan
            )  # upper bound of the time of a step of this size
            for column in reversed(columns):
                known = ~np.isnan(column)
                least = np.where(known, column, least)
                found.append(_compare_column(least, known & alone))
            larger = _median_size(found, len(self.peers))
        return Comparison(
            np.where(alone, larger.ratios, same.ratios),
            np.where(alone, larger.deviations, same.deviations),
        )

    def compare_with_baseline(self, comparison: Comparison, slow: Bools, min_ratio: float) -> Bools:
        """Return servers without a peer whose step time is at least `min_ratio` times their own baseline.

        The baseline is the time at the last comparison that found the server healthy, lowered by every shorter time
        since. It is updated here, except for servers in `slow`.
        """
        alone = np.isnan(comparison.ratios)
        healthy = ~alone & ~slow
        self._known_healthy |= healthy
        found = np.zeros(len(self.peers), dtype=np.bool_)
        for size, column in self.columns.items():
            baseline = self._baselines[size]
            limit = min_ratio * np.maximum(TIMER_NOISE, baseline)
            found |= alone & (np.maximum(TIMER_NOISE, column) >= limit)
            kept = np.where(alone, np.fmin(baseline, column), baseline)
            self._baselines[size] = np.where(healthy & ~np.isnan(column), column, kept)
        return found

    def peers_at(self, rows: Bools) -> list[PeerId]:
        return [peer for row in np.flatnonzero(rows) if (peer := self.peers[row])]

    def never_compared(self, comparison: Comparison) -> Bools:
        """Return servers with step times that were never compared with others and found healthy."""
        known = np.zeros(len(self.peers), dtype=np.bool_)
        for column in self.columns.values():
            known |= ~np.isnan(column)
        return known & np.isnan(comparison.ratios) & ~self._known_healthy


def compare_groups(groups: Sequence[PeerGroup]) -> list[Comparison]:
    """Compare each server with those of all groups, although their work differs. Returns one comparison per group."""
    starts = np.cumsum([len(group.peers) for group in groups])[:-1]
    sizes = sorted({size for group in groups for size in group.columns})
    columns = [
        np.concatenate(
            [group.columns.get(size, np.full(len(group.peers), math.nan)) for group in groups]
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
    ratios, deviations = np.full_like(column, math.nan), np.full_like(column, math.nan)
    known = np.flatnonzero(~np.isnan(column))
    if known.size < 2:
        return ratios, deviations
    own = column[known]
    typical = np.maximum(TIMER_NOISE, median_of_others(own))
    spread = np.empty_like(own)
    for each in np.unique(typical):  # a few
        here = typical == each
        spread[here] = median_of_others(np.abs(own - each))[here]
    spread = np.maximum(MAD_TO_SIGMA * spread, MIN_SPREAD * typical)
    seconds = np.maximum(TIMER_NOISE, own)
    ratios[known], deviations[known] = seconds / typical, (seconds - typical) / spread
    if rows is not None:
        ratios[~rows] = deviations[~rows] = math.nan
    return ratios, deviations


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
