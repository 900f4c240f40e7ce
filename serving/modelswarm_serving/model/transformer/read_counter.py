"""Counts the bytes of weights as they are read from the disk, for the progress of the start.

A slice of a safetensors file is a part of a mapped file, and no byte of it is read before its first use. Without this
module that were the self-check, long after the loading loop. So each slice is read here, piece by piece, when the
loading loop takes it. Used by `loading.py`. Keeps no copy of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

OnBytes: TypeAlias = Callable[[int, int], None]
"""Told (bytes read, all bytes to read); called from any thread, in order."""

PIECE_BYTES = 16 << 20
"""Bytes between two reports of one tensor; an embedding has gigabytes."""
PAGE_BYTES = 4096
"""Smallest page of the kernel. One byte of each page is read; the kernel reads the rest of it."""


class ReadCounter:
    """Adds up the bytes that several threads read."""

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self._total, self._on_bytes = total, on_bytes
        self._done, self._lock = 0, threading.Lock()
        on_bytes(0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._on_bytes(self._done, self._total)


class CountedSlice:
    """A lazy slice of a safetensors file that is read, and counted, when the loading loop indexes it."""

    def __init__(self, lazy: Any, counter: ReadCounter) -> None:
        self._lazy, self._counter = lazy, counter

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self._lazy[index]
        pages = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, pages.numel(), PIECE_BYTES):
            piece = pages[start : start + PIECE_BYTES]
            piece[::PAGE_BYTES].sum()
            self._counter.add(piece.numel())
        return tensor

    def get_shape(self) -> Any:
        return self._lazy.get_shape()

    def get_dtype(self) -> Any:
        return self._lazy.get_dtype()
