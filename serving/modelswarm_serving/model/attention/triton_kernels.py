"""Triton kernels of paged attention: tiles of query rows over pages, and the merge of split keys.

Launched by `triton_attention.py`, which has the shapes. One kernel serves decode and chunked prefill: a tile is one row
of a sequence, or some neighbouring rows of it. The query heads of one key head are rows of the same tile, so that each
key is read once for all of them. The softmax is the streaming one of FlashAttention (Dao et al., 2022) in base 2.
Knows no sessions.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
PRECISION = tl.constexpr("ieee")
"""Precision of float32 products, the only one that all devices have. Products of 16 bits ignore it."""


# The width of the page table differs from step to step: it must not be one more reason to compile.
@triton.jit(do_not_specialize=("table_row",))
def attend_tiles(
    query,
    keys,
    values,
    out,
    part_out,
    part_weight,
    tiles,
    table,
    positions,
    slopes,
    sinks,
    scaling,
    softcap,
    window,
    query_row,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    out_row,
    out_head,
    table_row,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Attend one tile in one key head over one part of its keys. Grid: (tiles, key heads, SPLITS).

    `tiles`: [n, 3], sequence, first row and number of rows. `table`: [sequences, pages]. The parts of a row are
    written to `part_out` with their weights (log2 of the softmax's denominator), a whole row to `out`.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + tile * 3).to(tl.int64)
    first_row = tl.load(tiles + tile * 3 + 1).to(tl.int64)
    count = tl.load(tiles + tile * 3 + 2)
    first = tl.load(positions + first_row).to(tl.int32)

    lanes = tl.arange(0, LANES)
    member, offset = lanes % GROUP_PAD, lanes // GROUP_PAD
    is_row = (offset < count) & (member < GROUP)
    head = kv_head * GROUP + member
    row = first_row + offset
    position = first + offset
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    in_key, in_value = key_dims < KEY_SIZE, value_dims < VALUE_SIZE
    q = tl.load(
        query + row[:, None] * query_row + head[:, None] * query_head + key_dims[None, :],
        mask=is_row[:, None] & in_key[None, :],
        other=0.0,
    ).to(PRODUCT)

    best = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    mixed = tl.zeros([LANES, VALUE_PAD], tl.float32)
    if HAS_SINKS:
        # A sink is a key without a value. One part counts it.
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, tl.full([LANES], 1.0, tl.float32), total)
    if HAS_SLOPES:
        slope = tl.load(slopes + head, mask=is_row, other=0.0).to(tl.float32)

    low = 0
    if HAS_WINDOW:
        low = tl.maximum(first - window + 1, 0)
    high = first + count
    part = tl.cdiv(tl.cdiv(high - low, SPLITS), BLOCK) * BLOCK
    low = low + split * part
    high = tl.minimum(low + part, high)
    for start in range(low, high, BLOCK):
        key_position = start + tl.arange(0, BLOCK)
        is_key = key_position < high
        page = tl.load(
            table + sequence * table_row + key_position // PAGE, mask=is_key, other=0
        ).to(tl.int64)
        slot = page * PAGE + key_position % PAGE
        k = tl.load(
            keys + slot[None, :] * key_slot + kv_head * key_head + key_dims[:, None],
            mask=is_key[None, :] & in_key[:, None],
            other=0.0,
        ).to(PRODUCT)
        scores = tl.dot(q, k, input_precision=PRECISION) * scaling
        distance = key_position[None, :] - position[:, None]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1), which no large x overflows
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        if HAS_SLOPES:
            scores += slope[:, None] * distance
        is_seen = is_key[None, :] & (distance <= 0)
        if HAS_WINDOW:
            is_seen = is_seen & (distance > -window)
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            values + slot[:, None] * value_slot + kv_head * value_head + value_dims[None, :],
            mask=is_key[:, None] & in_value[None, :],
            other=0.0,
        ).to(PRODUCT)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(PRODUCT), v, input_precision=PRECISION)
        best = larger

    is_filled = total > 0.0
    mixed = mixed / tl.where(is_filled, total, 1.0)[:, None]
    is_value = is_row[:, None] & in_value[None, :]
    if SPLITS == 1:
        place = row[:, None] * out_row + head[:, None] * out_head + value_dims[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=is_value)
    else:
        heads = tl.num_programs(1) * GROUP
        place = (row * heads + head) * SPLITS + split
        tl.store(part_out + place[:, None] * VALUE_SIZE + value_dims[None, :], mixed, mask=is_value)
        weight = tl.where(is_filled, best + tl.log2(tl.where(is_filled, total, 1.0)), float("-inf"))
        tl.store(part_weight + place, weight, mask=is_row)


@triton.jit
def merge_parts(
    part_out,
    part_weight,
    out,
    out_row,
    out_head,
    VALUE_SIZE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the parts of one row in one head by their weights. Grid: (rows, heads)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = (row * tl.num_programs(1) + head) * SPLITS
    parts, dims = tl.arange(0, SPLITS), tl.arange(0, VALUE_PAD)
    weight = tl.load(part_weight + place + parts)
    share = tl.exp2(weight - tl.max(weight, 0))
    mixed = tl.load(
        part_out + (place + parts)[:, None] * VALUE_SIZE + dims[None, :],
        mask=(dims < VALUE_SIZE)[None, :],
        other=0.0,
    )
    merged = tl.sum(mixed * share[:, None], 0) / tl.sum(share, 0)
    tl.store(
        out + row * out_row + head * out_head + dims,
        merged.to(out.dtype.element_ty),
        mask=dims < VALUE_SIZE,
    )
