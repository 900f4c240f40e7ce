"""Servers that do the same work, and how long it takes each of them against all others: a column for a size of steps.

Pure; used by `slowness.py`. Every server is compared with the median of its others, by the median of their deviations
from it. Both differ by one place in the order from one server to the next, so that a look at thousands takes as long as
a few sorts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MIN_SPREAD = 0.1  # of the median: what deviations are at least taken for
MAD_TO_SIGMA = 1.4826  # times the median of deviations is what they are usually said in
TIMER_NOISE = 0.0001  # seconds per block; shorter ones are all alike
SPARE_ROWS = 64  # made at once, for servers that will come

SecondsBySize = Mapping[int, float]  # seconds per block, by the size of steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every server against its others, by row, in the middle of all sizes of its steps; NaN: none to compare."""

    ratios: Floats  # own time over the median of the others
    deviations: Floats  # between the two

    def outliers(self, min_ratio: float, min_deviations: float) -> Bools:
        return (self.ratios >= min_ratio) & (self.deviations >= min_deviations)


class PeerGroup:
    def __init__(self) -> None:
        self.peers: list[PeerId] = []  # by row; "": nobody's
        self.fresh_until: Floats = np.zeros(0)  # from then on some of a row's times are too old
        self.reported: Floats = np.zeros(0)  # of each row, what others were told last; NaN: nothing
        self._row_of: dict[PeerId, int] = {}
        self._free: list[int] = []
        self.columns: dict[int, Floats] = {}  # NaN: not known
        self._baselines: dict[int, Floats] = {}  # what a row is held to that has nobody beside it
        self._known_healthy: Bools = np.zeros(0, dtype=np.bool_)  # and found well, in this life

    def __len__(self) -> int:
        return len(self._row_of)

    def add_peer(self, peer: PeerId) -> None:
        """One that is not in it."""
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
        """What is known of a server now, in place of what was."""
        row = self._row_of[peer]
        self.fresh_until[row] = fresh_until
        for size in times.keys() - self.columns.keys():
            self.columns[size] = np.full(len(self.peers), math.nan)
            self._baselines[size] = np.full(len(self.peers), math.nan)
        for size, column in self.columns.items():
            column[row] = times.get(size, math.nan)

    def compare(self) -> Comparison:
        """By steps of the same size; who shares none with others, by larger ones of theirs: they take no less."""
        with np.errstate(over="ignore", invalid="ignore"):  # whatever servers say of themselves
            sizes = sorted(self.columns)
            columns = [self.columns[size] for size in sizes]
            same = _median_size([_compare_column(column) for column in columns], len(self.peers))
            alone = np.isnan(same.ratios)
            if not any((alone & ~np.isnan(column)).any() for column in columns):
                return same
            found = []
            least = np.full(len(self.peers), math.nan)  # seconds that steps of a size take at most
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
        """Who has nobody to be compared with, and takes so many times what it took when it had last, or ever took: that
        is kept here. Those that are `slow` are held to what they took before."""
        alone = np.isnan(comparison.ratios)
        well = ~alone & ~slow
        self._known_healthy |= well
        found = np.zeros(len(self.peers), dtype=np.bool_)
        for size, column in self.columns.items():
            vouched = self._baselines[size]
            found |= alone & (np.maximum(TIMER_NOISE, column) >= min_ratio * np.maximum(TIMER_NOISE, vouched))
            kept = np.where(alone, np.fmin(vouched, column), vouched)
            self._baselines[size] = np.where(well & ~np.isnan(column), column, kept)
        return found

    def peers_at(self, rows: Bools) -> list[PeerId]:
        return [peer for row in np.flatnonzero(rows) if (peer := self.peers[row])]

    def never_compared(self, comparison: Comparison) -> Bools:
        """Who has steps, and was never found well beside others."""
        known = np.zeros(len(self.peers), dtype=np.bool_)
        for column in self.columns.values():
            known |= ~np.isnan(column)
        return known & np.isnan(comparison.ratios) & ~self._known_healthy


def compare_groups(groups: Sequence[PeerGroup]) -> list[Comparison]:
    """All of several groups against all others, whatever work they do: for each group a look."""
    starts = np.cumsum([len(group.peers) for group in groups])[:-1]
    sizes = sorted({size for group in groups for size in group.columns})
    columns = [
        np.concatenate(
            [group.columns.get(size, np.full(len(group.peers), math.nan)) for group in groups]
        )
        for size in sizes
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        look = _median_size(
            [_compare_column(column) for column in columns], sum(len(g.peers) for g in groups)
        )
    return [
        Comparison(ratios, deviations)
        for ratios, deviations in zip(
            np.split(look.ratios, starts), np.split(look.deviations, starts), strict=True
        )
    ]


def _median_size(found: Sequence[tuple[Floats, Floats]], count: int) -> Comparison:
    """Of the ratios that are known of each row, and the deviations with it."""
    if not found:
        return Comparison(np.full(count, math.nan), np.full(count, math.nan))
    ratios, deviations = (np.array(each) for each in zip(*found, strict=True))
    order = ratios.argsort(axis=0, kind="stable")  # NaN last
    middle = (~np.isnan(ratios)).sum(axis=0) // 2
    at = np.take_along_axis(order, middle.clip(max=len(found) - 1)[np.newaxis], axis=0)
    return Comparison(
        np.take_along_axis(ratios, at, axis=0)[0], np.take_along_axis(deviations, at, axis=0)[0]
    )


def _compare_column(column: Floats, rows: Bools | None = None) -> tuple[Floats, Floats]:
    """Ratios and deviations by one size of steps; of these rows only."""
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
    """For each of two or more, the median of all others: what stands in its place in their order, or one further."""
    others = values.size - 1
    low, high = (others - 1) // 2, others // 2
    ranks = sorted({low, low + 1, high, high + 1})
    order = np.partition(values, ranks)
    below, above = (np.where(values <= order[at], order[at + 1], order[at]) for at in (low, high))
    return np.asarray((below + above) / 2)
