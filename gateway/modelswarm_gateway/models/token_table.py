"""The texts of a model's tokens, and its decoder: all that the gateway itself holds of a tokenizer.json.

Made from bytes of the model's process, where tokenizer.json was read. `decode` may run on the event loop. It takes time
and memory in proportion to the tokens' texts, because `checkpoint/tokenizer.py` bounds both. Equals the library's own
decode.
"""

from __future__ import annotations

import json
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer

from modelswarm.checkpoint.tokenizer import MAX_TOKEN_BYTES

# Texts of a model that are kept as strings; most answers use fewer tokens.
CACHED_TEXTS = 4096
# Beginnings of names that are compared in one text: about 0.3 s.
MAX_LOOKUPS = 1 << 20
_ENTRY_BYTES = 150  # of a name in a table, beside its characters
_COUNT = struct.Struct("!I")
_SHOWN, _ADDED = 1, 2  # flags of a token: it has a text in an answer, it is added to the vocabulary
_ANY_ADDED = re.compile(b"[%c-%c]" % (_ADDED, _ADDED | _SHOWN))
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
_EMPTY = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}


class _Decoder(Protocol):
    def decode(self, tokens: list[str]) -> str: ...


def pack_table(texts: Sequence[str | None], added: Mapping[int, bool]) -> bytes:
    """Return the bytes of a table. `added`: added tokens by id, True for special ones: an answer does not show them."""
    ends, content = array("I"), bytearray()
    flags = bytearray(_SHOWN if text is not None else 0 for text in texts)
    for text in texts:
        content += (text or "").encode()
        ends.append(len(content))
    for place, is_special in added.items():
        flags[place] = _ADDED if is_special else _ADDED | _SHOWN
    return b"".join((_COUNT.pack(len(texts)), ends.tobytes(), flags, content))


class TokenTable:
    def __init__(self, content: bytes, decoder: dict[str, Any] | None) -> None:
        """Read the bytes of `pack_table`. `decoder`: as in tokenizer.json, and checked; without one, blanks."""
        [count] = _COUNT.unpack_from(content)
        self._ends = array("I")
        first = _COUNT.size + count * self._ends.itemsize
        self._ends.frombytes(content[_COUNT.size : first])
        self._flags, self._texts = content[first : first + count], content[first + count :]
        self._decoder: _Decoder | None = None
        if decoder is not None:
            self._decoder = Tokenizer.from_str(json.dumps(_EMPTY | {"decoder": decoder})).decoder
        self._is_byte_level = "ByteLevel" in _kinds(decoder)
        self._has_bytes = "ByteFallback" in _kinds(decoder)
        self._shown_text = lru_cache(maxsize=CACHED_TEXTS)(self._read_shown_text)
        self._named = self._tokens_to_name()
        self._lengths: dict[str, set[int]] = {}  # of those names, by their first character
        for name in self._named:
            self._lengths.setdefault(name[0], set()).add(len(name))
        self.memory_bytes = len(content) + CACHED_TEXTS * MAX_TOKEN_BYTES
        self.memory_bytes += sum(_ENTRY_BYTES + len(name) for name in self._named)

    def decode(self, ids: Sequence[int], markers: Sequence[str] = ()) -> str:
        """Return the text of the tokens. Ids without a token have none; of special tokens only `markers` have one."""
        texts = [text for each in ids if (text := self._shown_text(each)) is not None]
        if markers:
            found = [self._shown_text(each) or self._marker(each, markers) for each in ids]
            texts = [text for text in found if text is not None]
        return self._join(texts)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, with that of special tokens."""
        return self._join(self.names(ids))

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the entries of the vocabulary; "" for an id without a token."""
        return [self._text(each) for each in ids]

    def _join(self, texts: list[str]) -> str:
        return " ".join(texts) if self._decoder is None else self._decoder.decode(texts)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for, perhaps a part of a character; special ones have their names'."""
        text = self._text(token)
        if self._flags_of(token) & _ADDED:
            return text.encode()
        if self._is_byte_level:
            if all(character in _BYTES for character in text):
                return bytes(_BYTES[character] for character in text)
            return text.encode()
        byte = _BYTE.fullmatch(text) if self._has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(_BLANK, " ").encode()

    def _read_shown_text(self, token: int) -> str | None:
        return self._text(token) if self._flags_of(token) & _SHOWN else None

    def _marker(self, token: int, markers: Sequence[str]) -> str | None:
        text = self._text(token)
        return text if text in markers and self._flags_of(token) & _ADDED else None

    def tokens_within(self, text: str) -> dict[str, int]:
        """Return the added tokens within the text that a grammar must name, with their ids, in the order of these.

        ValueError after MAX_LOOKUPS: a text of a grammar has 256 KiB, and a model 100,000 such tokens.
        """
        found: set[str] = set()
        lookups = 0
        for start, first in enumerate(text):
            lengths = self._lengths.get(first, ())
            lookups += len(lengths)
            if lookups > MAX_LOOKUPS:
                detail = f"takes over {MAX_LOOKUPS} comparisons; use a shorter text"
                raise ValueError(f"the search for the model's tokens in it {detail}")
            found.update(
                name for each in lengths if (name := text[start : start + each]) in self._named
            )
        return dict(sorted(((n, self._named[n]) for n in found), key=lambda item: item[1]))

    def _tokens_to_name(self) -> dict[str, int]:
        """Return the added tokens that llguidance's texts never match: special ones, and those in angle brackets."""
        found: dict[str, int] = {}
        for added in _ANY_ADDED.finditer(self._flags):
            name = self._text(added.start())
            is_special = not self._flags[added.start()] & _SHOWN
            if name and (is_special or (name.startswith("<") and name.endswith(">"))):
                found[name] = added.start()
        return found

    def _flags_of(self, token: int) -> int:
        return self._flags[token] if 0 <= token < len(self._ends) else 0

    def _text(self, token: int) -> str:
        if not 0 <= token < len(self._ends):
            return ""
        start = self._ends[token - 1] if token else 0
        return self._texts[start : self._ends[token]].decode()


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Return the types of a decoder's steps."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    return {step["type"] for step in steps}
