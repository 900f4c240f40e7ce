"""Reads what FILE and PROMPT name: a file, or standard input for `-`. Used by `up`, `plan` and `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from modelswarm.errors import DocumentError, UserError

if TYPE_CHECKING:
    from modelswarm.resources.spec import ModelSwarm

STANDARD_INPUT = "-"


def read_document(file: Path, name: str | None = None) -> ModelSwarm:
    """Return the swarm document in `file`, or on standard input. `name` replaces its metadata.name."""
    from modelswarm.resources.loading import MAX_DOCUMENT_BYTES, load_document, parse_document

    if str(file) == STANDARD_INPUT:
        document = parse_document(_read_input(MAX_DOCUMENT_BYTES), "standard input")
    else:
        document = load_document(file)
    return document if name is None else _rename(document, name)


def read_prompt(prompt: str) -> str:
    """Return the prompt, or for `-` all of standard input without the line end after its last line."""
    if prompt != STANDARD_INPUT:
        return prompt
    return _without_line_end(sys.stdin.read())


def read_prompt_file(file: Path) -> str:
    """Return the content of a file without the line end after its last line."""
    try:
        return _without_line_end(file.read_text(encoding="utf-8"))
    except OSError as error:
        detail = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise UserError("--file", f"{file}: {detail}; allowed: a text file") from None
    except UnicodeDecodeError as error:
        sentence = f"{file}: not UTF-8 (byte {error.start}); allowed: text in UTF-8"
        raise UserError("--file", sentence) from None


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _read_input(limit: int) -> str:
    content = sys.stdin.buffer.read(limit + 1)
    if len(content) > limit:
        raise DocumentError("standard input", f"larger than {limit} bytes; not a swarm document")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DocumentError("standard input", f"not UTF-8 text (byte {error.start})") from None


def _rename(document: ModelSwarm, name: str) -> ModelSwarm:
    from pydantic import ValidationError

    from modelswarm.resources.spec import Metadata
    from modelswarm.resources.violations import list_violations

    fields = document.metadata.model_dump(by_alias=True) | {"name": name}
    try:
        metadata = Metadata.model_validate(fields)
    except ValidationError as error:
        sentence = list_violations(error, Metadata)[0].removeprefix("name: ")
        raise UserError("--name", sentence) from None
    return document.model_copy(update={"metadata": metadata})
