"""Checks that a model folder has a tokenizer whose ids are rows of the embedding, and a bounded decoder.

Called by the server before it loads a span. Special tokens may lie behind the embedding, as the token of images in the
Gemma 3 models that see none. A gateway refuses a text with one of these. It decodes on its event loop, at each token of
each stream, so the decoder's time is bounded by the tokens' texts. The `tokenizers` library is imported lazily: only
servers and gateways have it. Knows no chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelswarm.checkpoint.json_files import read_json
from modelswarm.errors import ModelSourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
# Largest tokenizer.json and largest other file that a gateway takes from a server, in bytes.
MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 64 << 20, 4 << 20
# Most commas in tokenizer.json; every token and merge has one, for which a gateway needs up to 270 bytes. The largest
# known model, Gemma 3, has 1.4 million.
MAX_TOKENIZER_COMMAS = 2 << 20
# Most token ids; a gateway needs 5 bytes for each below the highest.
MAX_TOKEN_IDS = 4 << 20
# Bytes of one token's text. The longest in use, 128 blanks of a byte-level tokenizer, has 256.
MAX_TOKEN_BYTES = 1024
# Bytes of a decoder as JSON; usual ones have less than 500.
MAX_DECODER_BYTES = 16 << 10
# Decoders of a Sequence; usual are 4.
MAX_STEPS = 16
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def entries_fault(tokenizer: bytes) -> str:
    """Return why a gateway refuses this tokenizer.json; empty if it has no more entries than its memory allows."""
    commas = tokenizer.count(b",")
    if commas <= MAX_TOKENIZER_COMMAS:
        return ""
    return f"{commas} commas between tokens and merges; allowed: {MAX_TOKENIZER_COMMAS}"


def token_texts(tokenizer: Tokenizer) -> tuple[list[str | None], str]:
    """Return the text of each id, None for an id without a token, and why a gateway refuses them; empty if not."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= MAX_TOKEN_IDS:
        return [], f"has ids up to {largest}; allowed: up to {MAX_TOKEN_IDS - 1}"
    texts = [tokenizer.id_to_token(place) for place in range(largest + 1)]
    decoder = tokenizer.decoder
    state = b"" if decoder is None else bytes(decoder.__getstate__())
    return texts, token_fault(texts) or (decoder_fault(state) if state else "")


def check_tokenizer(folder: Path, vocab: int) -> None:
    """Raise ModelSourceError if the tokenizer is missing, too large, unreadable or has an id of `vocab` or more.

    Ids of special tokens may be larger.
    """
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelSourceError(
            "model", f"{folder} has no {TOKENIZER_FILE}; a fast tokenizer is needed"
        )
    _check_size(path, MAX_TOKENIZER_BYTES)
    if fault := entries_fault(path.read_bytes()):
        raise ModelSourceError("model", f"{path} has {fault}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise ModelSourceError("model", f"{path} is not a tokenizer: {error}") from error
    for name in SETTINGS_FILES:
        if (folder / name).exists():
            _check_size(folder / name, MAX_SETTINGS_BYTES)
            read_json(folder / name)
    texts, fault = token_texts(tokenizer)
    if fault:
        raise ModelSourceError("model", f"{path}: {fault}")
    added = tokenizer.get_added_tokens_decoder().items()
    special = {place for place, token in added if token.special}
    largest = len(texts) - 1
    while largest >= vocab and (largest in special or texts[largest] is None):
        largest -= 1
    if largest >= vocab:
        raise ModelSourceError(
            "model",
            f"vocab_size in config.json is {vocab}, but {path} has ids up to {largest}; "
            f"allowed is a vocab_size of at least {largest + 1}",
        )


def _check_size(path: Path, most: int) -> None:
    size = path.stat().st_size
    if size > most:
        raise ModelSourceError("model", f"{path} has {size} bytes; allowed: at most {most}")


def token_fault(texts: Sequence[str | None]) -> str:
    """Return why tokens with these texts are refused; empty if each is short enough."""
    for place, text in enumerate(texts):
        if text is not None and len(text.encode()) > MAX_TOKEN_BYTES:
            size = len(text.encode())
            return f"the token {place} has {size} bytes; allowed: at most {MAX_TOKEN_BYTES}"
    return ""


def decoder_fault(content: bytes) -> str:
    """Return why the decoder with this JSON is refused; empty if its time and its text are bounded by the tokens'."""
    if len(content) > MAX_DECODER_BYTES:
        return f"the decoder has {len(content)} bytes; allowed: at most {MAX_DECODER_BYTES}"
    decoder = json.loads(content)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if len(steps) > MAX_STEPS:
        return f"the decoder has {len(steps)} steps; allowed: at most {MAX_STEPS}"
    for step in steps:
        kind = step["type"]
        if kind not in _RULES:
            return f"the decoder {kind} is not allowed here; allowed: {', '.join(sorted(_RULES))}"
        if fault := _RULES[kind](step):
            return f"the decoder {kind} {fault}"
    return ""


def _accept(step: Mapping[str, Any]) -> str:
    return ""


def _replace_fault(step: Mapping[str, Any]) -> str:
    text = step["pattern"].get("String")
    if text is None:
        return "replaces a regular expression, which may take any time; allowed: a text"
    if not text or len(step["content"].encode()) > len(text.encode()):
        return f"replaces {text!r} by a longer text; allowed: one of at most as many bytes"
    return ""


def _strip_fault(step: Mapping[str, Any]) -> str:
    """The library fails when it strips the end of a text that is shorter."""
    return "strips the end of a text; allowed: stop 0" if step["stop"] else ""


def _bpe_fault(step: Mapping[str, Any]) -> str:
    return "" if step["suffix"] else "has an empty suffix; allowed: a text"


def _ctc_fault(step: Mapping[str, Any]) -> str:
    is_complete = step["pad_token"] and step["word_delimiter_token"]
    return "" if is_complete else "has an empty pad_token or word_delimiter_token; allowed: a text"


_RULES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "BPEDecoder": _bpe_fault,
    "ByteFallback": _accept,
    "ByteLevel": _accept,
    "CTC": _ctc_fault,
    "Fuse": _accept,
    "Metaspace": _accept,
    "Replace": _replace_fault,
    "Strip": _strip_fault,
    "WordPiece": _accept,
}
