"""Incremental detokenizer: tokens to text, piece by piece, and never half a character.

Used by a generation, one per turn. Knows tokenizers only by their `decode`. The text is a pure function of the tokens
fed and the few before them. The pieces do not depend on the times at which tokens arrive.

`DecodeStream` of tokenizers (0.23) was tried instead. It repeats text of the prompt if that ends inside a character,
and has no flush. It takes quadratic time while bytes do not become a character (3,000 bad bytes: 2.5 s, here 0.12 s).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# Tokens of the prompt decoded with the first token; without them a leading space would be dropped.
CONTEXT_TOKENS = 6
# Bytes of an incomplete character at most.
MAX_PARTIAL_BYTES = 3
# Tokens withheld at most, for bytes that never become a character.
MAX_WITHHELD_TOKENS = 64
# Tokens of a long text that are decoded before other tasks run, in some 5 ms.
TOKENS_AT_ONCE = 512


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """The prefix-offset method: decode a short window, and return its text beyond the part shown before.

    While the window ends inside a character nothing is returned. One more byte may change all characters of a run of
    bytes, including those that were complete before.
    """

    def __init__(self, decoder: Decoder, before: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window: list[int] = list(before[-CONTEXT_TOKENS:])
        self._context_length = len(self._window)  # tokens of the window whose text was shown
        text = decoder.decode(self._window) if self._window else ""
        # The text may begin inside a character: that is at most MAX_PARTIAL_BYTES replacement characters.
        self._shown = max(len(text.rstrip(REPLACEMENT)), len(text) - MAX_PARTIAL_BYTES)

    def feed(self, token: int) -> str:
        """Add a token and return the text that can be shown now; may be empty."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        may_withhold = len(self._window) - self._context_length <= MAX_WITHHELD_TOKENS
        if may_withhold and (text.endswith(REPLACEMENT) or len(text) <= self._shown):
            return ""
        new = text[self._shown :]
        self._advance_window()
        return new

    def flush(self) -> str:
        """Return the rest at the end of the text; half a character becomes a replacement character."""
        rest = self._decoder.decode(self._window)[self._shown :] if self._window else ""
        self._shown += len(rest)
        return rest

    def _advance_window(self) -> None:
        """Keep only the tokens shown last: they are the context of the next ones."""
        self._window = self._window[self._context_length :]
        self._context_length = len(self._window)
        self._shown = len(self._decoder.decode(self._window))


async def detokenize_all(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token makes visible, the rest with the last one. Other tasks run meanwhile."""
    pieces = []
    for count, token in enumerate(tokens, 1):
        pieces.append(detokenizer.feed(token))
        if count % TOKENS_AT_ONCE == 0:
            await asyncio.sleep(0)
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces
