"""Tokens to text, piece by piece, without ever showing half a character.

Used by the service, one per turn. Knows tokenizers only by their `decode`. The text is a pure function of the tokens
fed (and the few before them): however they arrive in time, the same pieces come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT = 6  # tokens before the first one: a leading space does not begin a text
OPEN_BYTES = 3
LONGEST_WAIT = 64  # tokens; bytes that never become a character are not waited for beyond this


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """The prefix-offset method: decode a short window, give what it has beyond the part that was given.

    While the window ends inside a character nothing is given: one more byte may change all signs of a run of bytes,
    also of those that were characters before.
    """

    def __init__(self, decoder: Decoder, before: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window: list[int] = list(before[-CONTEXT:])
        self._settled = len(self._window)  # tokens of the window whose text was given
        text = decoder.decode(self._window) if self._window else ""
        # The text may begin inside a character, which shows as at most OPEN_BYTES signs before it is whole.
        self._given = max(len(text.rstrip(REPLACEMENT)), len(text) - OPEN_BYTES)

    def feed(self, token: int) -> str:
        """What can be shown now that it could not be before."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        patient = len(self._window) - self._settled <= LONGEST_WAIT
        if patient and (text.endswith(REPLACEMENT) or len(text) <= self._given):
            return ""
        new = text[self._given :]
        self._move()
        return new

    def flush(self) -> str:
        """The rest, at the end of the text; half a character shows as a replacement sign."""
        rest = self._decoder.decode(self._window)[self._given :] if self._window else ""
        self._given += len(rest)
        return rest

    def _move(self) -> None:
        """Keep only the tokens that were given last: they are the context of the next ones."""
        self._window = self._window[self._settled :]
        self._settled = len(self._window)
        self._given = len(self._decoder.decode(self._window))
