"""Comparison of two recorded streams, one with a kill: gaps, and equality of the tokens. Pure. Used by `demo`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from modelswarm.client.inference import ReceivedChunk


@dataclass(frozen=True, slots=True)
class Recording:
    """A complete stream."""

    chunks: tuple[ReceivedChunk, ...]

    @classmethod
    def record(cls, chunks: Iterable[ReceivedChunk]) -> Recording:
        return cls(tuple(chunks))

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)

    @property
    def seconds(self) -> float:
        return self.chunks[-1].at - self.chunks[0].at if self.chunks else 0.0

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between each two consecutive chunks that carry tokens."""
        times = [chunk.at for chunk in self.chunks if chunk.tokens]
        return tuple(later - earlier for earlier, later in pairwise(times))

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    @property
    def median_gap(self) -> float:
        return statistics.median(self.gaps) if self.gaps else 0.0

    @property
    def is_contiguous(self) -> bool:
        """True if each chunk begins at the position where the one before it ended: no token lost or repeated."""
        parts = [chunk for chunk in self.chunks if chunk.tokens]
        return all(
            later.position == earlier.position + len(earlier.tokens)
            for earlier, later in pairwise(parts)
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The run without a kill beside the run with one."""

    reference: Recording
    interrupted: Recording
    killed_peer: str
    route_after: tuple[str, ...]  # peers, head first; empty if no route was seen

    @property
    def is_identical(self) -> bool:
        same = (
            self.reference.tokens == self.interrupted.tokens
            and self.reference.text == self.interrupted.text
        )
        return same and self.interrupted.is_contiguous

    @property
    def has_migrated(self) -> bool:
        """True if the session was seen on a route without the killed server."""
        return bool(self.route_after) and self.killed_peer not in self.route_after

    @property
    def is_success(self) -> bool:
        return self.is_identical and self.has_migrated
