"""Paged attention of all spans: writes new keys and values into the pages and attends over them.

transformers calls `paged_attention` through its AttentionInterface, once per block. The model code does not pass down
which rows a step has. They come from the layout of the step in progress on this thread (`attention_context`), as does
the backend. `SdpaBackend` is the reference, for every device: torch's attention over gathered pages. Knows no sessions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from modelswarm.placement.memory import score_rows
from modelswarm_serving.model.attention import backend_names
from modelswarm_serving.model.attention.backend import AttentionBackend, Scoring
from modelswarm_serving.model.attention.biased_attention import attend_biased
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.step_layout import AttentionGroup, RowLayout, StepLayout

ATTENTION_NAME = "modelswarm_paged"
COPY_LIMIT = 16 * 1024 * 1024
"""Bytes of keys and values up to which one row attends over a copy of them on a CPU. Attention reads head by head, one
piece per position, which misses the caches; a copy reads in order. Measured on an AVX-512 EPYC with 100 to 4,000 keys:
a copy takes 10 to 40 % less time up to this size."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one block's attention call."""

    index: int
    scaling: float
    window: int | None
    softcap: float | None


class RowAttention(Protocol):
    """Attention without pages, of the rows of a pass (`model/passes/`)."""

    def attend_rows(self, query: Tensor, fresh: Tensor, scoring: Scoring) -> Tensor: ...


class _Context(threading.local):
    """The step, or the part of a pass, in progress on this thread."""

    layout: RowLayout | None = None
    cache: KvCache | None = None
    backend: AttentionBackend | None = None
    calls: list[AttentionCall] | None = None  # recorded for the self-check
    part: RowAttention | None = None


_context = _Context()


class SdpaBackend:
    """torch's attention over gathered pages."""

    name = backend_names.SDPA

    def attend(self, layout: RowLayout, store: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
        if not isinstance(layout, StepLayout):
            raise TypeError("attention over gathered pages cannot be captured")
        groups = layout.attention_groups(scoring.window)
        if len(groups) == 1:
            return _attend_group(groups[0], query, store, scoring)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in groups:
            rows = slice(group.start, group.start + group.sequences * group.rows_each)
            out[rows] = _attend_group(group, query[rows], store, scoring)
        return out


SDPA = SdpaBackend()


@contextmanager
def attention_context(
    layout: RowLayout,
    cache: KvCache,
    calls: list[AttentionCall] | None = None,
    backend: AttentionBackend = SDPA,
) -> Iterator[None]:
    """Let all attention calls inside use this layout, cache and backend; record them in `calls`."""
    _context.layout, _context.cache, _context.calls = layout, cache, calls
    _context.backend = backend
    try:
        yield
    finally:
        _context.layout = _context.cache = _context.calls = _context.backend = None


@contextmanager
def part_context(part: RowAttention) -> Iterator[None]:
    """Let all attention calls inside attend without pages."""
    _context.part = part
    try:
        yield
    finally:
        _context.part = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface demands: q, k, v [1, heads, T, D] in, [1, T, heads, D] out."""
    index = module.layer_idx
    assert isinstance(index, int)
    if sliding_window is None:  # Qwen2-MoE passes it in the mask alone
        sliding_window = getattr(module, "sliding_window", None)
    out = attend(
        index,
        query[0].transpose(0, 1),
        torch.stack((key[0], value[0])).permute(2, 0, 1, 3),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def attend(
    index: int,
    query: Tensor,
    fresh: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    *,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in the span's `index`-th block and return [T, heads, D].

    `query`: [T, heads, D]; `fresh`: keys and values of the same rows, [T, 2, kv_heads, D]. Where both are the same
    vector, it is [T, 1, kv_heads, D]. `slopes` (ALiBi) and `sinks` are per query head.
    """
    scoring = Scoring(scaling, window, softcap, slopes, sinks)
    if _context.part is not None:
        return _context.part.attend_rows(query, fresh, scoring)
    layout, cache, backend = _context.layout, _context.cache, _context.backend
    if layout is None or cache is None or backend is None:
        raise RuntimeError("paged attention was called outside a step")
    if _context.calls is not None:
        _context.calls.append(AttentionCall(index, scaling, window, softcap))
    store = cache.blocks[index]
    store.index_copy_(0, layout.slots, fresh)
    return backend.attend(layout, store, query, scoring)


def _attend_group(group: AttentionGroup, query: Tensor, store: Tensor, scoring: Scoring) -> Tensor:
    return attend_keys(group, query, *_gather_kv(store, group), scoring)


def attend_keys(
    group: AttentionGroup, query: Tensor, k: Tensor, v: Tensor, scoring: Scoring
) -> Tensor:
    """Attend for one group over keys and values, each [sequences, kv_heads, n_keys, D].

    Queries that share a key head become rows of one query block, so no key is repeated.
    """
    heads, size = query.shape[1:]
    kv_heads = k.shape[1]
    queries_per_key = heads // kv_heads
    scaling, softcap = scoring.scaling, scoring.softcap
    if scoring.slopes is not None or scoring.sinks is not None:
        if softcap is not None or (scoring.slopes is not None and scoring.sinks is not None):
            raise NotImplementedError("no family has two of capped scores, slopes and sinks")
        return attend_biased(group, query, k, v, scaling, scoring.slopes, scoring.sinks)
    if group.rows_each == 1:
        q = query.reshape(group.sequences, kv_heads, queries_per_key, size)
        out = _softmax_attention(q, k, v, group.mask, False, scaling, softcap)
        return out.reshape(group.sequences, heads, size)
    q = query.transpose(0, 1).unsqueeze(0)  # one sequence: [1, heads, count, D]
    if softcap is not None and queries_per_key > 1:
        k, v = (
            k.repeat_interleave(queries_per_key, dim=1),
            v.repeat_interleave(queries_per_key, dim=1),
        )
    out = _softmax_attention(q, k, v, group.mask, group.causal, scaling, softcap)
    return out[0].transpose(0, 1)


def _gather_kv(store: Tensor, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Return keys and values, each [sequences, kv_heads, n_keys, D]; views where they are not gathered or copied."""
    if not isinstance(group.slots, slice):
        picked = store.index_select(0, group.slots).view(
            group.sequences, group.n_keys, *store.shape[1:]
        )
        parts = picked.permute(2, 0, 3, 1, 4).unbind(0)
        return parts[0], parts[-1]
    run = store[group.slots]
    if group.rows_each == 1 and run.nbytes <= COPY_LIMIT and store.device.type == "cpu":
        run = run.clone()
    _, parts_each, kv_heads, size = run.shape
    slot, both, head, one = run.stride()
    shape, strides = (1, kv_heads, group.n_keys, size), (0, head, slot, one)
    start = run.storage_offset()
    v_start = start + (parts_each - 1) * both
    return run.as_strided(shape, strides, start), run.as_strided(shape, strides, v_start)


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
    sequences, heads, count, _ = q.shape
    step = score_rows(sequences * heads, k.shape[2])
    if step >= count:
        return _capped_attention(q, k, v, mask, 0 if causal else None, scaling, softcap)
    parts = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        some = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        first = start if causal else None
        parts.append(_capped_attention(q[:, :, rows], k, v, some, first, scaling, softcap))
    return torch.cat(parts, dim=2)


def _capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal_from: int | None,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Attend with capped scores, all of which are in memory. `causal_from`: number of the first row if causal."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if causal_from is not None:
        count, length = scores.shape[-2:]
        hidden = torch.ones(count, length, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(hidden.triu(1 + causal_from), float("-inf"))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
