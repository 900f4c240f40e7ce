"""Rows of logits of one session, as tensors. Needs torch, and not transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from modelswarm.client.sessions.session import GatewaySession
from modelswarm.protocol.fork_sources import common_length
from modelswarm.protocol.wire import api_pb2


def read_logits(session: GatewaySession, log: list[int], count: int) -> Tensor:
    """Bring the session to `log`, and return the logits [count, vocabulary] of its last entries, in float32."""
    common = min(common_length(session.tokens, log), len(log) - count)
    if common < session.position:
        session.rewind(common)
    parts = session.read_logits(log[common:], all_positions=count > 1)
    rows = torch.cat([to_tensor(part) for part in parts])
    return rows[-count:]


def to_tensor(rows: api_pb2.Tensor) -> Tensor:
    """Return rows of the wire in float32."""
    dtype: torch.dtype = getattr(torch, rows.dtype)
    flat = torch.frombuffer(bytearray(rows.data), dtype=dtype)
    return flat.reshape(list(rows.shape)).float()
