"""The bytes that each token stands for, for log probabilities: a token may be a part of a character.

Made by `tokenizer.py` when a request first asks. Reads the kind of the tokenizer's decoder: byte-level (GPT-2), or
words with a marker for blanks and tokens like `<0x0A>` for single bytes (SentencePiece).
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"  # SentencePiece's marker of a blank


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones stand for themselves, the others follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_characters()


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
        self._is_byte_level = '"ByteLevel"' in decoder
        self._has_bytes = '"ByteFallback"' in decoder
        self._added = {
            token: entry.content for token, entry in tokenizer.get_added_tokens_decoder().items()
        }
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; empty for an id that stands for no text."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decode(token)
        return found

    def _decode(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            if all(character in _BYTES for character in text):
                return bytes(_BYTES[character] for character in text)
            return text.encode()
        byte = _BYTE.fullmatch(text) if self._has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(_BLANK, " ").encode()
