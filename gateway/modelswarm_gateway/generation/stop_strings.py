"""Stop strings: finds the first match in text that arrives in pieces, and holds back what may become one.

Used by the service, one per turn. Pure: the result does not depend on where the pieces were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    text: str  # may be shown
    matched: bool  # the text ends here; nothing more is to be fed


class StopMatcher:
    """The match that is complete first wins; of those that end together, the longest."""

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
        """What was held back, when the text ended without completing a match."""
        held, self._held = self._held, ""
        return held


def _partial_match_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins (all of `stop` excluded)."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
