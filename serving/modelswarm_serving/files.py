"""The files of a model folder that a gateway may ask for, in chunks (`ModelFileRequest`).

Used by `node.py`. Only names of `MODEL_FILES` exist: no paths, no weights. Knows no connections.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from modelswarm.checkpoint.sources import MODEL_FILES
from modelswarm.protocol.messages import ModelFileChunk

ALLOWED = frozenset({*MODEL_FILES, "added_tokens.json"})
CHUNK = 256 << 10
MAX_BYTES = 256 << 20  # of one file; the largest tokenizers have 40 MB


class ModelFiles:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        """None when there is no such file, or not for gateways. Reads the disk: call it in a thread."""
        if self._folder is None or name not in ALLOWED:
            return None
        path = self._folder / name
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                return None
            return path.read_bytes()
        except OSError:
            return None


def chunks(name: str, content: bytes | None) -> Iterator[ModelFileChunk]:
    """At least one chunk; an empty file gives one without data."""
    if content is None:
        yield ModelFileChunk(name, 0, 0, b"", missing=True)
        return
    for offset in range(0, max(len(content), 1), CHUNK):
        yield ModelFileChunk(name, offset, len(content), content[offset : offset + CHUNK])
