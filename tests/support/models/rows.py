"""Rows of logits and hidden states as a client of the gRPC API reads them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from modelswarm.protocol.wire import api_pb2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor(found: api_pb2.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(found.data), dtype=DTYPES[found.dtype])
    return flat.view(*found.shape)


def joined(
    parts: Iterable[api_pb2.GenerateResponse], first: int, kind: str = "logits"
) -> torch.Tensor:
    """Return the rows of all parts. Each must come once and in order, from entry `first` on, before its token."""
    found, end = [], first
    for part in parts:
        if part.HasField("rows_position"):
            assert part.rows_position == end, f"row {part.rows_position} instead of {end}"
            rows = tensor(getattr(part, kind))
            found.append(rows)
            end += len(rows)
        if part.token_ids:
            last = part.position + len(part.token_ids) - 1
            assert last <= end, f"entry {last} came before its row"
    return torch.cat(found)
