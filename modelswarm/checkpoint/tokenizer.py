"""Checks that a model folder has a tokenizer whose every id is a row of the embedding.

Called by the server before it loads a span, so that no gateway can send an id outside the embedding. The `tokenizers`
library is imported lazily: only servers and gateways have it. Knows no chat templates.
"""

from __future__ import annotations

from pathlib import Path

from modelswarm.checkpoint.json_files import read_json
from modelswarm.errors import ModelSourceError

TOKENIZER_FILE = "tokenizer.json"
# Largest tokenizer.json and largest other file that a gateway takes from a server, in bytes.
MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 64 << 20, 4 << 20
# Most commas in tokenizer.json; every token and merge has one, for which a gateway needs up to 270 bytes. The largest
# known model, Gemma 3, has 1.4 million.
MAX_TOKENIZER_COMMAS = 2 << 20
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def entries_fault(tokenizer: bytes) -> str:
    """Return why a gateway refuses this tokenizer.json; empty if it has no more entries than its memory allows."""
    commas = tokenizer.count(b",")
    if commas <= MAX_TOKENIZER_COMMAS:
        return ""
    return f"{commas} commas between tokens and merges; allowed: {MAX_TOKENIZER_COMMAS}"


def check_tokenizer(folder: Path, vocab: int) -> None:
    """Raise ModelSourceError if the tokenizer is missing, too large, unreadable or has an id of `vocab` or more."""
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
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
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
