"""What the demo concludes from two recorded streams (pure): gaps, and whether both said the same."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from modelswarm.client.inference import Arrival


@dataclass(frozen=True, slots=True)
class Recording:
    """A stream that came to its end."""

    arrivals: tuple[Arrival, ...]

    @classmethod
    def of(cls, arrivals: Iterable[Arrival]) -> Recording:
        return cls(tuple(arrivals))

    @property
    def text(self) -> str:
        return "".join(arrival.text for arrival in self.arrivals)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for arrival in self.arrivals for token in arrival.tokens)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between one arrival of tokens and the next."""
        times = [arrival.at for arrival in self.arrivals if arrival.tokens]
        return tuple(later - earlier for earlier, later in pairwise(times))

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def median_gap(self) -> float:
        return statistics.median(self.gaps) if self.gaps else 0.0

    @property
    def in_order(self) -> bool:
        """Every token stands where the one before it ended: none lost, none doubled."""
        parts = [arrival for arrival in self.arrivals if arrival.tokens]
        return all(
            later.position == earlier.position + len(earlier.tokens)
            for earlier, later in pairwise(parts)
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    calm: Recording
    disturbed: Recording
    killed: str  # peer
    route_after: tuple[str, ...]  # peers

    @property
    def identical(self) -> bool:
        same = self.calm.tokens == self.disturbed.tokens and self.calm.text == self.disturbed.text
        return same and self.disturbed.in_order

    @property
    def moved(self) -> bool:
        """The session ran on another route after the kill."""
        return bool(self.route_after) and self.killed not in self.route_after

    @property
    def good(self) -> bool:
        return self.identical and self.moved
