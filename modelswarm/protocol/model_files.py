"""Messages by which a gateway loads tokenizer, template and configuration files from servers.

Part of `messages.py`, which lists all messages. Knows neither files nor folders.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFileRequest:
    """A gateway asks a server for a tokenizer, template or configuration file, by file name."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelFileChunk:
    name: str
    offset: int
    total: int  # size in bytes; 0 with `missing` when there is no such file
    data: bytes
    missing: bool = False
