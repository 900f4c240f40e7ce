"""Decode rows attend in padded batches or alone, over copies or views: all equal the dense attention."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.models.interpreted import LIMITS, attend_densely

from modelswarm_serving.model.attention import attention, step_layout
from modelswarm_serving.model.attention.backend import Scoring
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.step_layout import GATHER_KEYS, StepLayout
from modelswarm_serving.model.base import BatchItem

PAGE, KV_HEADS, SIZE = 16, 2, 64
LENGTHS = (GATHER_KEYS + 1, 1, 40, GATHER_KEYS, 700, 16, 200, 17)  # positions of each session
TOTAL = sum(-(-length // PAGE) for length in LENGTHS)
SLOPES, SINKS = torch.tensor([0.5, 0.1, 0.02, 0.004]), torch.tensor([-1.0, 0.5, 2.0, 4.0])
SCORINGS = {
    "plain": Scoring(0.125),
    "window": Scoring(0.125, window=20),
    "softcap": Scoring(0.125, softcap=2.0),
    "slopes": Scoring(0.125, slopes=SLOPES),
    "sinks": Scoring(0.125, sinks=SINKS),
    "window and sinks": Scoring(0.125, window=150, sinks=SINKS),
}


def make_cache() -> KvCache:
    shape = KvCacheShape(1, TOTAL, PAGE, KV_HEADS, SIZE)
    return KvCache(shape, torch.float32, torch.device("cpu"))


def decode_items(*, scattered: bool = False) -> list[BatchItem]:
    """Return the newest row of each session; its pages are neighbours, or scattered."""
    pages = list(range(TOTAL))
    if scattered:
        random.Random(3).shuffle(pages)
    items = []
    for length in LENGTHS:
        held, pages = pages[: -(-length // PAGE)], pages[-(-length // PAGE) :]
        items.append(BatchItem(held, length - 1, 1, (0, 1), None, b"", 0, None))
    return items


def groups(window: int | None = None) -> list[tuple[int, int, int]]:
    """Return the first row, the rows and the padded keys of each group."""
    found = StepLayout(decode_items(), make_cache()).attention_groups(window)
    return [(group.start, group.sequences, group.n_keys) for group in found]


@pytest.mark.parametrize("pages", ["copied", "viewed", "scattered"])
@pytest.mark.parametrize("heads", [KV_HEADS, 2 * KV_HEADS])
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_decode_rows_equal_dense_attention(
    monkeypatch: pytest.MonkeyPatch, pages: str, heads: int, scoring: Scoring
) -> None:
    if pages == "viewed":
        monkeypatch.setattr(attention, "COPY_LIMIT", 0)
    slopes, sinks = (
        None if each is None else each[:heads] for each in (scoring.slopes, scoring.sinks)
    )
    scoring = replace(scoring, slopes=slopes, sinks=sinks)
    noise, cache = torch.Generator().manual_seed(5), make_cache()
    store = cache.blocks[0].normal_(generator=noise)
    layout = StepLayout(decode_items(scattered=pages == "scattered"), cache)
    query = torch.randn(layout.rows, heads, SIZE, generator=noise)
    out = attention.SDPA.attend(layout, store, query, scoring)
    for row, item in enumerate(layout.items):
        end = item.first + 1
        where = [item.pages[p // PAGE] * PAGE + p % PAGE for p in range(end)]
        kv = store[where]
        right = attend_densely(query[row : row + 1], kv[:, 0], kv[:, 1], item.first, scoring)
        torch.testing.assert_close(
            out[row : row + 1].double(), right, atol=LIMITS[torch.float32], rtol=0
        )


def test_rows_of_similar_length_attend_together() -> None:
    single = [(6, 1, GATHER_KEYS + 1), (7, 1, 700)]
    assert groups() == [(0, 4, 40), (4, 2, GATHER_KEYS), *single]


def test_longer_rows_attend_together_if_their_keys_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_layout, "GATHER_EACH", 400 * make_cache().key_bytes)
    assert groups() == [(0, 4, 40), (4, 3, GATHER_KEYS + 1), (7, 1, 700)]


def test_windows_decide_which_rows_are_short() -> None:
    assert groups(20) == [(0, 8, 20)]


def test_batches_of_rows_stay_below_the_limit_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 85 padded keys, and the fourth row has 40."""
    monkeypatch.setattr(step_layout, "GATHER_LIMIT", 85 * make_cache().key_bytes)
    assert [rows for _, rows, _ in groups()] == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "scoring", [Scoring(1.0, None, 5.0, SLOPES), Scoring(1.0, None, None, SLOPES, SINKS)]
)
def test_scores_that_no_family_has_are_refused(scoring: Scoring) -> None:
    layout = StepLayout(decode_items(), cache := make_cache())
    query = torch.zeros(layout.rows, 4, SIZE)
    with pytest.raises(NotImplementedError, match="no family"):
        attention.SDPA.attend(layout, cache.blocks[0], query, scoring)
