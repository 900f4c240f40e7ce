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

LEAST_SPREAD = 0.1  # of the median: what deviations are at least taken for
DEVIATION = 1.4826  # times the median of deviations is what they are usually said in
NOISE = 0.0001  # seconds per block; shorter ones are all alike
SPARE_ROWS = 64  # made at once, for servers that will come

Times = Mapping[int, float]  # seconds per block, by the size of steps


@dataclass(frozen=True, slots=True)
class Look:
    """Every server against its others, by row, in the middle of all sizes of its steps; NaN: none to compare."""

    ratios: Floats  # own time over the median of the others
    deviations: Floats  # between the two

    def slow(self, times: float, far: float) -> Bools:
        return (self.ratios >= times) & (self.deviations >= far)


class Alike:
    def __init__(self) -> None:
        self.peers: list[PeerId] = []  # by row; "": nobody's
        self.until: Floats = np.zeros(0)  # from then on some of a row's times are too old
        self.told: Floats = np.zeros(0)  # of each row, what others were told last; NaN: nothing
        self._row: dict[PeerId, int] = {}
        self._free: list[int] = []
        self.columns: dict[int, Floats] = {}  # NaN: not known
        self._vouched: dict[int, Floats] = {}  # what a row is held to that has nobody beside it
        self._compared: Bools = np.zeros(0, dtype=np.bool_)  # and found well, in this life

    def __len__(self) -> int:
        return len(self._row)

    def add(self, peer: PeerId) -> None:
        """One that is not in it."""
        if not self._free:
            count, more = len(self.peers), max(SPARE_ROWS, len(self.peers))
            self._free = list(reversed(range(count, count + more)))
            self.peers += [""] * more
            self.until = np.append(self.until, np.full(more, math.inf))
            self.told = np.append(self.told, np.full(more, math.nan))
            self._compared = np.append(self._compared, np.zeros(more, dtype=np.bool_))
            for columns in (self.columns, self._vouched):
                for size, column in columns.items():
                    columns[size] = np.append(column, np.full(more, math.nan))
        row = self._row[peer] = self._free.pop()
        self.peers[row] = peer
        self.told[row], self._compared[row] = math.nan, False

    def remove(self, peer: PeerId) -> None:
        self.put(peer, {}, math.inf)
        row = self._row.pop(peer)
        for column in self._vouched.values():
            column[row] = math.nan
        self.peers[row] = ""
        self._free.append(row)

    def put(self, peer: PeerId, times: Times, until: float) -> None:
        """What is known of a server now, in place of what was."""
        row = self._row[peer]
        self.until[row] = until
        for size in times.keys() - self.columns.keys():
            self.columns[size] = np.full(len(self.peers), math.nan)
            self._vouched[size] = np.full(len(self.peers), math.nan)
        for size, column in self.columns.items():
            column[row] = times.get(size, math.nan)

    def look(self) -> Look:
        """By steps of the same size; who shares none with others, by larger ones of theirs: they take no less."""
        with np.errstate(over="ignore", invalid="ignore"):  # whatever servers say of themselves
            sizes = sorted(self.columns)
            columns = [self.columns[size] for size in sizes]
            same = _middle([_against_others(column) for column in columns], len(self.peers))
            alone = np.isnan(same.ratios)
            if not any((alone & ~np.isnan(column)).any() for column in columns):
                return same
            found = []
            least = np.full(len(self.peers), math.nan)  # seconds that steps of a size take at most
            for column in reversed(columns):
                known = ~np.isnan(column)
                least = np.where(known, column, least)
                found.append(_against_others(least, known & alone))
            larger = _middle(found, len(self.peers))
        return Look(
            np.where(alone, larger.ratios, same.ratios),
            np.where(alone, larger.deviations, same.deviations),
        )

    def vouch(self, look: Look, slow: Bools, times: float) -> Bools:
        """Who has nobody to be compared with, and takes so many times what it took when it had last, or ever took: that
        is kept here. Those that are `slow` are held to what they took before."""
        alone = np.isnan(look.ratios)
        well = ~alone & ~slow
        self._compared |= well
        found = np.zeros(len(self.peers), dtype=np.bool_)
        for size, column in self.columns.items():
            vouched = self._vouched[size]
            found |= alone & (np.maximum(NOISE, column) >= times * np.maximum(NOISE, vouched))
            kept = np.where(alone, np.fmin(vouched, column), vouched)
            self._vouched[size] = np.where(well & ~np.isnan(column), column, kept)
        return found

    def of(self, rows: Bools) -> list[PeerId]:
        return [peer for row in np.flatnonzero(rows) if (peer := self.peers[row])]

    def strangers(self, look: Look) -> Bools:
        """Who has steps, and was never found well beside others."""
        known = np.zeros(len(self.peers), dtype=np.bool_)
        for column in self.columns.values():
            known |= ~np.isnan(column)
        return known & np.isnan(look.ratios) & ~self._compared


def side_by_side(groups: Sequence[Alike]) -> list[Look]:
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
        look = _middle(
            [_against_others(column) for column in columns], sum(len(g.peers) for g in groups)
        )
    return [
        Look(ratios, deviations)
        for ratios, deviations in zip(
            np.split(look.ratios, starts), np.split(look.deviations, starts), strict=True
        )
    ]


def _middle(found: Sequence[tuple[Floats, Floats]], count: int) -> Look:
    """Of the ratios that are known of each row, and the deviations with it."""
    if not found:
        return Look(np.full(count, math.nan), np.full(count, math.nan))
    ratios, deviations = (np.array(each) for each in zip(*found, strict=True))
    order = ratios.argsort(axis=0, kind="stable")  # NaN last
    middle = (~np.isnan(ratios)).sum(axis=0) // 2
    at = np.take_along_axis(order, middle.clip(max=len(found) - 1)[np.newaxis], axis=0)
    return Look(
        np.take_along_axis(ratios, at, axis=0)[0], np.take_along_axis(deviations, at, axis=0)[0]
    )


def _against_others(column: Floats, rows: Bools | None = None) -> tuple[Floats, Floats]:
    """Ratios and deviations by one size of steps; of these rows only."""
    ratios, deviations = np.full_like(column, math.nan), np.full_like(column, math.nan)
    known = np.flatnonzero(~np.isnan(column))
    if known.size < 2:
        return ratios, deviations
    own = column[known]
    typical = np.maximum(NOISE, middle_of_others(own))
    spread = np.empty_like(own)
    for each in np.unique(typical):  # a few
        here = typical == each
        spread[here] = middle_of_others(np.abs(own - each))[here]
    spread = np.maximum(DEVIATION * spread, LEAST_SPREAD * typical)
    seconds = np.maximum(NOISE, own)
    ratios[known], deviations[known] = seconds / typical, (seconds - typical) / spread
    if rows is not None:
        ratios[~rows] = deviations[~rows] = math.nan
    return ratios, deviations


def middle_of_others(values: Floats) -> Floats:
    """For each of two or more, the median of all others: what stands in its place in their order, or one further."""
    others = values.size - 1
    low, high = (others - 1) // 2, others // 2
    ranks = sorted({low, low + 1, high, high + 1})
    order = np.partition(values, ranks)
    below, above = (np.where(values <= order[at], order[at + 1], order[at]) for at in (low, high))
    return np.asarray((below + above) / 2)
