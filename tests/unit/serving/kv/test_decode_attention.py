"""Decode rows attend in padded batches or alone, over copies or views: all equal the dense attention."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.models.interpreted import LIMITS, attend_densely, random_scoring

from modelswarm_serving.model.attention import attention, step_layout
from modelswarm_serving.model.attention.backend import Scoring
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.step_layout import GATHER_KEYS, StepLayout
from modelswarm_serving.model.base import BatchItem

PAGE, SIZE = 16, 8
LENGTHS = (GATHER_KEYS + 1, 1, 40, GATHER_KEYS, 700, 16, 17)  # positions of each session
TOTAL = sum(-(-length // PAGE) for length in LENGTHS)


def make_cache(kv_heads: int = 2) -> KvCache:
    shape = KvCacheShape(1, TOTAL, PAGE, kv_heads, SIZE)
    return KvCache(shape, torch.float32, torch.device("cpu"))


def decode_items(scattered_by: int = 0) -> list[BatchItem]:
    """Return the newest row of each session; without a seed, its pages are neighbours."""
    pages = list(range(TOTAL))
    if scattered_by:
        random.Random(scattered_by).shuffle(pages)
    items = []
    for length in LENGTHS:
        held, pages = pages[: -(-length // PAGE)], pages[-(-length // PAGE) :]
        items.append(BatchItem(held, length - 1, 1, (0, 1), None, b"", 0, None))
    return items


@pytest.mark.parametrize("pages", ["copied", "viewed", "scattered"])
@pytest.mark.parametrize("seed", range(1, 13))
def test_decode_rows_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, pages: str, seed: int
) -> None:
    if pages == "viewed":
        monkeypatch.setattr(attention, "COPY_LIMIT", 0)
    pick, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, heads = 2, 2 * pick.choice((1, 3))
    cache = make_cache(kv_heads)
    store = cache.blocks[0].normal_(generator=noise)
    layout = StepLayout(decode_items(seed if pages == "scattered" else 0), cache)
    query = torch.randn(layout.rows, heads, SIZE, generator=noise)
    scoring = random_scoring(pick, noise, heads, SIZE)
    if scoring.softcap is not None:  # no family caps scores beside slopes or sinks
        scoring = replace(scoring, slopes=None, sinks=None)
    out = attention.SDPA.attend(layout, store, query, scoring)
    for row, item in enumerate(layout.items):
        end = item.first + 1
        where = [item.pages[p // PAGE] * PAGE + p % PAGE for p in range(end)]
        kv = store[where]
        right = attend_densely(query[row : row + 1], kv[:, 0], kv[:, 1], item.first, scoring)
        torch.testing.assert_close(
            out[row : row + 1].double(), right, atol=LIMITS[torch.float32], rtol=0
        )


def test_short_rows_attend_together_and_long_rows_alone() -> None:
    groups = StepLayout(decode_items(), make_cache()).attention_groups(None)
    assert [(group.start, group.sequences, group.n_keys) for group in groups] == [
        (0, 5, GATHER_KEYS),
        (5, 1, GATHER_KEYS + 1),
        (6, 1, 700),
    ]


def test_windows_decide_which_rows_are_short() -> None:
    groups = StepLayout(decode_items(), make_cache()).attention_groups(20)
    assert [(group.start, group.sequences, group.n_keys) for group in groups] == [(0, 7, 20)]


def test_batches_of_rows_stay_below_the_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are 1, 16, 17, 40 and 256 keys long; the limit is 85 padded keys."""
    cache = make_cache()
    monkeypatch.setattr(step_layout, "GATHER_LIMIT", 85 * cache.key_bytes)
    groups = StepLayout(decode_items(), cache).attention_groups(None)
    assert [(group.sequences, group.n_keys) for group in groups] == [
        (3, 17),
        (1, 40),
        (1, GATHER_KEYS),
        (1, GATHER_KEYS + 1),
        (1, 700),
    ]


def test_capped_scores_with_slopes_are_refused() -> None:
    layout = StepLayout(decode_items(), cache := make_cache())
    query, scoring = torch.zeros(layout.rows, 2, SIZE), Scoring(1.0, None, 5.0, torch.ones(2))
    with pytest.raises(NotImplementedError, match="cap"):
        attention.SDPA.attend(layout, cache.blocks[0], query, scoring)
