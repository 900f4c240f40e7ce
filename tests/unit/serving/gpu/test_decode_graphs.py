"""Captured batch sizes cover all steps up to the largest, and backends are chosen by name and device."""

from __future__ import annotations

import pytest
import torch

from modelswarm.errors import UserError
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import CapturableBackend
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.selection import choose_backend
from modelswarm_serving.model.attention.static_decode import StaticDecode
from modelswarm_serving.model.attention.step_layout import StepLayout
from modelswarm_serving.model.base import BatchItem
from modelswarm_serving.model.transformer.decode_graphs import batch_sizes

CACHE = KvCache(KvCacheShape(1, 10, 4, 1, 8), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 16]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 48]),
    ],
)
def test_batch_sizes_end_with_the_first_that_fits(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_backend_on_the_cpu_is_the_reference() -> None:
    assert choose_backend("auto", CACHE) is SDPA
    assert choose_backend("sdpa", CACHE) is SDPA
    assert not isinstance(SDPA, CapturableBackend)


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'flash' is not one of auto, sdpa, triton"):
        choose_backend("flash", CACHE)


def test_triton_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    large = KvCache(KvCacheShape(1, 1, 4, 1, 512), torch.float32, torch.device("cpu"))
    with pytest.raises(UserError, match="heads of 512 are larger than 256; allowed here: sdpa"):
        choose_backend("triton", large)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"no C compiler|triton is not installed"):
        choose_backend("triton", CACHE)


def test_padding_is_at_a_page_without_a_session() -> None:
    static = StaticDecode(CACHE, rows=4, positions=24)
    rows = static.padding(4)
    items = [
        BatchItem([7, 2], 5, 1, (0, 1), None, b"", 0, None),
        BatchItem([3, 9, 1, 0], 12, 1, (0, 1), None, b"", 0, None),
    ]
    for count in (2, 1):  # rows of the longer step become padding again
        static.fill(StepLayout(items[:count], CACHE), 4)
        (batch,) = rows.tile_batches(1)
        padding = [10 * 4] * (4 - count)
        assert rows.positions.tolist() == [5, 12][:count] + [0] * (4 - count)
        assert rows.slots.tolist() == [2 * 4 + 1, 0 * 4 + 0][:count] + padding
        assert batch.table[0, :2].tolist() == [7, 2]
        assert batch.table[count:, 0].tolist() == [10] * (4 - count)
        assert batch.tiles.tolist() == [[row, row, 1] for row in range(4)]
