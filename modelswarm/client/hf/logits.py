"""Rows of logits and hidden states of one session, as tensors. Needs torch, and not transformers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from modelswarm.client.sessions.session import GatewaySession
from modelswarm.protocol.input_log import common_prefix_length
from modelswarm.protocol.wire import api_pb2


def read_logits(session: GatewaySession, log: list[int], count: int) -> Tensor:
    """Bring the session to `log`, and return the logits [count, vocabulary] of its last entries, in float32."""
    common = min(common_prefix_length(session.tokens, log), len(log) - count)
    if common < session.position:
        session.rewind(common)
    parts = session.read_rows(log[common:], all_positions=count > 1)
    return last_rows([part.logits for part in parts], count)


def last_rows(parts: Iterable[api_pb2.Tensor | None], count: int) -> Tensor:
    """Return the last `count` rows [count, width] of a session's answer, in float32."""
    return torch.cat([_to_tensor(part) for part in parts if part is not None])[-count:]


def _to_tensor(rows: api_pb2.Tensor) -> Tensor:
    """Return rows of the wire in float32."""
    dtype: torch.dtype = getattr(torch, rows.dtype)
    flat = torch.frombuffer(bytearray(rows.data), dtype=dtype)
    return flat.reshape(list(rows.shape)).float()
