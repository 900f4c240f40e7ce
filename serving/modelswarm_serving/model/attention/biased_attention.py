"""Attention with a bias per head: the slopes of ALiBi, and sinks that take a share of each row's weights.

Used by `attention.py` for one attention group. The scores are in memory, of as many rows at once as the memory plan
counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelswarm.placement.memory import score_rows
from modelswarm_serving.model.attention.step_layout import AttentionGroup


def attend_biased(
    group: AttentionGroup,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend for one group: query [rows, heads, D], k and v [sequences, kv_heads, n_keys, D]."""
    rows, heads, size = query.shape
    q = query.view(group.sequences, group.rows_each, heads, size).transpose(1, 2)
    bias = torch.zeros(1, 1, 1, device=q.device)
    if slopes is not None:
        # Relative to the last key: a softmax does not change with a constant per row.
        bias = slopes.float()[:, None, None] * torch.arange(1 - group.n_keys, 1, device=q.device)
    step = score_rows(group.sequences * heads, group.n_keys)
    parts = []
    for start in range(0, group.rows_each, step):
        chosen = slice(start, min(start + step, group.rows_each))
        mask = _hidden(group, chosen, q.device)
        parts.append(_attend_rows(q[:, :, chosen], k, v, bias + mask, scaling, sinks))
    return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, heads, size)


def _hidden(group: AttentionGroup, rows: slice, device: torch.device) -> Tensor:
    """Return what is added to the scores of these rows: minus infinity for the keys that they do not see."""
    if group.causal:
        count = rows.stop - rows.start
        hidden = torch.ones(count, group.n_keys, dtype=torch.bool, device=device)
        zeros = torch.zeros(count, group.n_keys, device=device)
        return zeros.masked_fill(hidden.triu(1 + rows.start), float("-inf"))
    if group.mask is None:
        return torch.zeros(1, device=device)
    return (group.mask if group.mask.shape[2] == 1 else group.mask[:, :, rows]).float()


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float, sinks: Tensor | None
) -> Tensor:
    """Attend for q [sequences, heads, rows, D]."""
    sequences, heads, rows, size = q.shape
    shape = (sequences, k.shape[1], -1, size)  # queries of one key head as rows of one product
    scores = torch.matmul(q.reshape(shape), k.transpose(2, 3)).view(sequences, heads, rows, -1)
    scores = scores.float() * scaling + bias
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(sequences, heads, rows, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]].to(q.dtype)
    return torch.matmul(weights.view(sequences, k.shape[1], -1, k.shape[2]), v).view(q.shape)
