"""Stop strings: finds the first match in text that arrives in pieces, and withholds text that may become a match.

Used by a generation, one matcher per turn. Pure: the result does not depend on the cuts between pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    text: str  # that may be shown
    matched: bool  # the text ends here; no more may be fed


class StopMatcher:
    """The match that is complete first wins; of matches that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> StopMatch:
        if not self._stops:
            return StopMatch(piece, False)
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return StopMatch(text[: min(ends)[1]], True)
        keep = max(_partial_match_length(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], False)

    def flush(self) -> str:
        """Return the withheld text, when the text ended without a complete match."""
        held, self._held = self._held, ""
        return held


def _partial_match_length(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, shorter than `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
