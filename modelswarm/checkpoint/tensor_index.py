"""The tensors of a checkpoint folder by canonical name, from safetensors headers, checked against file sizes.

Used by facts (to weigh a model) and by the span loader (to find slices). Reads headers only, never tensor data.
Format: 8 bytes little-endian header length, JSON header, data (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.json_files import read_json
from modelswarm.checkpoint.tensor_names import canonical
from modelswarm.errors import ModelSourceError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # the limit of the format's own reader


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: where it is and how big."""

    file: str
    stored_name: str
    dtype: str  # as safetensors writes it: F32, BF16, ...
    shape: tuple[int, ...]
    size: int  # bytes


def shard_names(folder: Path) -> dict[str, str]:
    """Stored tensor name -> file, by the index; empty when the model is one file."""
    if not (folder / INDEX).exists():
        return {}
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelSourceError("model", f"{folder / INDEX} has no weight_map")
    return {str(name): str(file) for name, file in weight_map.items()}


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Entry]:
    """Canonical name -> entry for the wanted names; only files that hold one are opened (or need exist)."""
    weight_map = shard_names(folder)
    if not weight_map:
        return _of_file(folder, SINGLE, wanted)
    files = sorted({file for name, file in weight_map.items() if _is_wanted(name, wanted)})
    found: dict[str, Entry] = {}
    for file in files:
        found.update(_of_file(folder, file, wanted))
    return found


def _is_wanted(stored_name: str, wanted: Callable[[str], bool]) -> bool:
    name = canonical(stored_name)
    return name is not None and wanted(name)


def _of_file(folder: Path, file: str, wanted: Callable[[str], bool]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for stored_name, entry in read_header(folder, file).items():
        name = canonical(stored_name)
        if name is not None and wanted(name):
            found[name] = entry
    return found


def read_header(folder: Path, file: str) -> dict[str, Entry]:
    """All entries of one file by stored name; refuses a file that is shorter than its header says."""
    path = folder / file
    if not path.is_file():
        raise ModelSourceError("model", f"{folder} has no {file} (safetensors weights are needed)")
    size, raw = _header_bytes(path)
    try:
        header = json.loads(raw)
        entries = {
            name: _entry(file, name, fields)
            for name, fields in header.items()
            if name != "__metadata__"
        }
        end = max(
            (
                fields["data_offsets"][1]
                for name, fields in header.items()
                if name != "__metadata__"
            ),
            default=0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelSourceError("model", f"{path} is not a safetensors file") from error
    if size < 8 + len(raw) + end:
        missing = 8 + len(raw) + end - size
        raise ModelSourceError("model", f"{path} is truncated: {missing} bytes are missing")
    return entries


def _header_bytes(path: Path) -> tuple[int, bytes]:
    """The size of the file, and its header as it is written."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise ModelSourceError("model", f"{path} is truncated or not a safetensors file")
            return size, handle.read(length)
    except OSError as error:
        raise ModelSourceError("model", f"{path} cannot be read: {error.strerror}") from error


def _entry(file: str, name: str, fields: dict[str, Any]) -> Entry:
    start, end = fields["data_offsets"]
    shape = tuple(int(n) for n in fields["shape"])
    return Entry(file, name, str(fields["dtype"]), shape, int(end) - int(start))
