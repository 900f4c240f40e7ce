"""What the demo concludes from two recorded streams (pure): gaps, and whether both said the same."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from modelswarm.client.inference import ReceivedChunk


@dataclass(frozen=True, slots=True)
class Recording:
    """A stream that came to its end."""

    chunks: tuple[ReceivedChunk, ...]

    @classmethod
    def record(cls, chunks: Iterable[ReceivedChunk]) -> Recording:
        return cls(tuple(chunks))

    @property
    def text(self) -> str:
        return "".join(arrival.text for arrival in self.chunks)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for arrival in self.chunks for token in arrival.tokens)

    @property
    def seconds(self) -> float:
        return self.chunks[-1].at - self.chunks[0].at if self.chunks else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between one arrival of tokens and the next."""
        times = [arrival.at for arrival in self.chunks if arrival.tokens]
        return tuple(later - earlier for earlier, later in pairwise(times))

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def median_gap(self) -> float:
        return statistics.median(self.gaps) if self.gaps else 0.0

    @property
    def is_contiguous(self) -> bool:
        """Every token stands where the one before it ended: none lost, none doubled."""
        parts = [arrival for arrival in self.chunks if arrival.tokens]
        return all(
            later.position == earlier.position + len(earlier.tokens)
            for earlier, later in pairwise(parts)
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    reference: Recording
    interrupted: Recording
    killed_peer: str  # peer
    route_after: tuple[str, ...]  # peers

    @property
    def is_identical(self) -> bool:
        same = self.reference.tokens == self.interrupted.tokens and self.reference.text == self.interrupted.text
        return same and self.interrupted.is_contiguous

    @property
    def has_migrated(self) -> bool:
        """The session ran on another route after the kill."""
        return bool(self.route_after) and self.killed_peer not in self.route_after

    @property
    def is_success(self) -> bool:
        return self.is_identical and self.has_migrated
