"""The one attention function of all spans: writes new keys and values into the pages, attends over them.

transformers calls `paged_attention` through its AttentionInterface, once per block. What the rows of the step are is
not passed down by the model code: it is the `Batch` of the step in progress on this thread (`attending`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from modelswarm_serving.model.attention.kv_cache import PagePool
from modelswarm_serving.model.attention.step_layout import Batch, Piece

NAME = "modelswarm_paged"


@dataclass(frozen=True, slots=True)
class Call:
    """How one block asked for attention."""

    index: int
    scaling: float
    window: int | None
    softcap: float | None


class _Context(threading.local):
    """The step in progress on this thread."""

    batch: Batch | None = None
    pool: PagePool | None = None
    calls: list[Call] | None = None  # gathered for a guard


_context = _Context()


@contextmanager
def attending(batch: Batch, pool: PagePool, calls: list[Call] | None = None) -> Iterator[None]:
    """All attention inside works on this batch and pool, and is noted in `calls`."""
    _context.batch, _context.pool, _context.calls = batch, pool, calls
    try:
        yield
    finally:
        _context.batch = _context.pool = _context.calls = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' contract: q, k, v [1, heads, T, D] in, [1, T, heads, D] out."""
    index = module.layer_idx
    assert isinstance(index, int)
    out = attend(
        index,
        query[0].transpose(0, 1),
        torch.stack((key[0], value[0])).permute(2, 0, 1, 3),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


def attend(
    index: int,
    query: Tensor,
    fresh: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """In the span's `index`-th block: `query` [T, heads, D] and `fresh`, the same rows' keys and values,
    [T, 2, kv_heads, D]; gives [T, heads, D]."""
    batch, pool = _context.batch, _context.pool
    if batch is None or pool is None:
        raise RuntimeError("paged attention was called outside a step")
    if _context.calls is not None:
        _context.calls.append(Call(index, scaling, window, softcap))
    store = pool.blocks[index]
    store.index_copy_(0, batch.slots, fresh)
    pieces = batch.pieces(window)
    if len(pieces) == 1:
        return _attend_piece(pieces[0], query, store, scaling, softcap)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for piece in pieces:
        rows = slice(piece.start, piece.start + piece.n * piece.count)
        out[rows] = _attend_piece(piece, query[rows], store, scaling, softcap)
    return out


def _attend_piece(
    piece: Piece, query: Tensor, store: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """The queries that share a key head become rows of one query block, so that no key is repeated in memory."""
    heads, size = query.shape[1:]
    kv_heads = store.shape[2]
    group = heads // kv_heads
    k, v = _read(store, piece)
    if piece.count == 1:
        q = query.reshape(piece.n, kv_heads, group, size)
        out = _softmax_attention(q, k, v, piece.mask, False, scaling, softcap)
        return out.reshape(piece.n, heads, size)
    q = query.transpose(0, 1).unsqueeze(0)  # one sequence: [1, heads, count, D]
    if softcap is not None and group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = _softmax_attention(q, k, v, piece.mask, piece.causal, scaling, softcap)
    return out[0].transpose(0, 1)


def _read(store: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Keys and values, each [n, kv_heads, length, D]; views where the slots are neighbours."""
    if not isinstance(piece.where, slice):
        picked = store.index_select(0, piece.where).view(piece.n, piece.length, *store.shape[1:])
        k, v = picked.permute(2, 0, 3, 1, 4).unbind(0)
        return k, v
    _, _, kv_heads, size = store.shape
    slot, both, head, one = store.stride()
    shape, strides = (1, kv_heads, piece.length, size), (0, head, slot, one)
    start = piece.where.start * slot
    return store.as_strided(shape, strides, start), store.as_strided(shape, strides, start + both)


def _softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=True
        )
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if causal:
        count, length = scores.shape[-2:]
        hidden = torch.ones(count, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


AttentionInterface.register(NAME, paged_attention)
