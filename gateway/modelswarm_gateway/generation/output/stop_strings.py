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

    def __init__(
        self, stops: Sequence[str], *, keeps_match: bool = False, min_pieces: int = 0
    ) -> None:
        """`keeps_match`: the text ends with the match, and not before it. No match ends in the first `min_pieces`."""
        self._keeps_match, self._early_pieces = keeps_match, min_pieces
        self._searches = [_StopSearch(stop) for stop in stops]
        self._held = ""
        self.match: str | None = None  # the stop string that ended the text

    def feed(self, piece: str) -> StopMatch:
        if not self._searches:
            return StopMatch(piece, False)
        text = self._held + piece
        is_early, self._early_pieces = self._early_pieces > 0, self._early_pieces - 1
        found = [
            (end, -len(search.stop), search.stop)
            for search in self._searches
            if (end := search.find_end(piece, passes=is_early)) > 0
        ]
        if found:
            end, negative_length, self.match = min(found)
            end += len(self._held)
            self._held = ""
            return StopMatch(text[: end if self._keeps_match else end + negative_length], True)
        keep = max(search.matched for search in self._searches)
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], False)

    def flush(self) -> str:
        """Return the withheld text, when the text ended without a complete match."""
        held, self._held = self._held, ""
        return held


class _StopSearch:
    """Search for one stop string by Knuth, Morris and Pratt: constant time per character, on average."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text so far ends with
        # For each number of matched characters the next shorter beginning of `stop` with which they end.
        self._shorter = [0] * (len(stop) + 1)
        length = 0
        for index in range(1, len(stop)):
            length = self._extend(length, stop[index])
            self._shorter[index + 1] = length

    def find_end(self, piece: str, *, passes: bool = False) -> int:
        """Return the number of characters of `piece` up to the end of the first match; 0 without one.

        `passes`: go on behind a match, as if there was none.
        """
        matched = self.matched
        for count, character in enumerate(piece, 1):
            matched = self._extend(matched, character)
            if matched == len(self.stop):
                if not passes:
                    return count
                matched = self._shorter[matched]
        self.matched = matched
        return 0

    def _extend(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched]
        return matched + (self.stop[matched] == character)
