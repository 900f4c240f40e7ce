"""Servers that do the same work, and how long it takes each of them against all others: a column for a size of steps.

Pure; used by `slowness.py`. Every server is compared with the median of its others, by the median of their deviations
from it. Both differ by one place in the order from one server to the next, so that a look at thousands takes as long as
a few sorts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId

Floats = npt.NDArray[np.float64]

LEAST_SPREAD = 0.1  # of the median: what deviations are at least taken for
DEVIATION = 1.4826  # times the median of deviations is what they are usually said in
NOISE = 0.0001  # seconds per block; shorter ones are all alike
SPARE_ROWS = 64  # made at once, for servers that will come

Times = Mapping[int, float]  # seconds per block, by the size of steps


@dataclass(frozen=True, slots=True)
class Look:
    """Every server against its others, by row: in the middle of all sizes of steps that others have made too; NaN where
    there are none."""

    ratios: Floats  # own time over the median of the others
    deviations: Floats  # between the two


class Alike:
    def __init__(self) -> None:
        self.peers: list[PeerId] = []  # by row; "": nobody's
        self.until: Floats = np.zeros(0)  # from then on some of a row's times are too old
        self.told: Floats = np.zeros(0)  # of each row, what others were told last; NaN: nothing
        self._row: dict[PeerId, int] = {}
        self._free: list[int] = []
        self._columns: dict[int, Floats] = {}  # NaN: not known

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
            for size, column in self._columns.items():
                self._columns[size] = np.append(column, np.full(more, math.nan))
        row = self._row[peer] = self._free.pop()
        self.peers[row] = peer
        self.told[row] = math.nan

    def remove(self, peer: PeerId) -> None:
        self.put(peer, {}, math.inf)
        row = self._row.pop(peer)
        self.peers[row] = ""
        self._free.append(row)

    def put(self, peer: PeerId, times: Times, until: float) -> None:
        """What is known of a server now, in place of what was."""
        row = self._row[peer]
        self.until[row] = until
        for size in times.keys() - self._columns.keys():
            self._columns[size] = np.full(len(self.peers), math.nan)
        for size, column in self._columns.items():
            column[row] = times.get(size, math.nan)

    def look(self) -> Look:
        with np.errstate(over="ignore", invalid="ignore"):  # whatever servers say of themselves
            looks = [_against_others(self._columns[size]) for size in sorted(self._columns)]
        if not looks:
            nothing = np.full(len(self.peers), math.nan)
            return Look(nothing, nothing)
        ratios = np.array([ratios for ratios, _ in looks])
        deviations = np.array([deviations for _, deviations in looks])
        order = ratios.argsort(axis=0, kind="stable")  # NaN last
        middle = (~np.isnan(ratios)).sum(axis=0) // 2
        at = np.take_along_axis(order, middle.clip(max=len(looks) - 1)[np.newaxis], axis=0)
        return Look(
            np.take_along_axis(ratios, at, axis=0)[0],
            np.take_along_axis(deviations, at, axis=0)[0],
        )


def _against_others(column: Floats) -> tuple[Floats, Floats]:
    """Ratios and deviations by one size of steps."""
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
    return ratios, deviations


def middle_of_others(values: Floats) -> Floats:
    """For each of two or more, the median of all others: what stands in its place in their order, or one further."""
    others = values.size - 1
    low, high = (others - 1) // 2, others // 2
    ranks = sorted({low, low + 1, high, high + 1})
    order = np.partition(values, ranks)
    below, above = (np.where(values <= order[at], order[at + 1], order[at]) for at in (low, high))
    return np.asarray((below + above) / 2)
