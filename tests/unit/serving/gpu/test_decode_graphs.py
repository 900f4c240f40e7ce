"""Captured batch sizes cover all steps up to the largest, and backends are chosen by name and device."""

from __future__ import annotations

import random
import sysconfig

import pytest
import torch
from support.models.device_library import DeviceLibrary

from modelswarm.errors import DeviceError, UserError
from modelswarm_serving.model.attention import staging, static_decode
from modelswarm_serving.model.attention.attention import SDPA
from modelswarm_serving.model.attention.backend import CapturableBackend
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.selection import choose_backend
from modelswarm_serving.model.attention.staging import to_device
from modelswarm_serving.model.attention.static_decode import StaticDecode
from modelswarm_serving.model.attention.step_layout import StepLayout
from modelswarm_serving.model.base import BatchItem
from modelswarm_serving.model.device import HOST
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
    assert choose_backend("auto", CACHE, HOST) is SDPA
    assert choose_backend("sdpa", CACHE, HOST) is SDPA
    assert not isinstance(SDPA, CapturableBackend)


def test_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'flash' is not one of auto, triton, sdpa"):
        choose_backend("flash", CACHE, HOST)


def test_triton_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    large = KvCache(KvCacheShape(1, 1, 4, 1, 512), torch.float32, torch.device("cpu"))
    cuda = DeviceLibrary().open()
    with pytest.raises(DeviceError, match="heads of 512 are larger than 256; allowed here: auto"):
        choose_backend("triton", large, cuda)
    for other in (HOST, DeviceLibrary(accelerator="xpu", compute_capability=None).open("xpu")):
        with pytest.raises(
            DeviceError, match=f"on {other.name}.*: its kernels are for CUDA and ROCm"
        ):
            choose_backend("triton", CACHE, other)
    pytest.importorskip("triton")
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "")
        with pytest.raises(DeviceError, match="no C compiler"):
            choose_backend("triton", CACHE, cuda)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    with pytest.raises(DeviceError, match="no headers of Python"):
        choose_backend("triton", CACHE, cuda)


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
        sequences = batch.tiles[:, 0].tolist()
        assert batch.table[sequences[0], :2].tolist() == [7, 2]
        assert batch.table[sequences[count:], 0].tolist() == [10] * (4 - count)
        assert batch.tiles[:, 1:].tolist() == [[row, 1] for row in range(4)]


def decode_item(pages: list[int], position: int) -> BatchItem:
    return BatchItem(pages, position, 1, (0, 1), None, b"", 0, None)


def test_page_table_has_the_pages_of_every_step() -> None:
    """Lists of pages grow, are truncated and refilled, and die, as sessions do; more live than the table has rows."""
    pick, static = random.Random(3), StaticDecode(CACHE, rows=2, positions=24)
    layouts = {size: static.padding(size) for size in (1, 2)}
    held = [[pick.randrange(10) for _ in range(6)] for _ in range(12)]
    for _ in range(400):
        changed = pick.choice(held)
        if pick.random() < 0.3:
            changed[pick.randrange(6)] = pick.randrange(10)
        elif pick.random() < 0.1:
            held[held.index(changed)] = list(changed)
        items = [decode_item(pages, pick.randrange(24)) for pages in pick.sample(held, 2)]
        size = pick.choice((1, 2))
        layout = StepLayout(items[:size], CACHE)
        static.fill(layout, size)
        (batch,) = layouts[size].tile_batches(1)
        for tile, item in zip(batch.tiles.tolist(), layout.items, strict=True):
            used = item.first // 4 + 1
            assert batch.table[tile[0], :used].tolist() == item.pages[:used]


@pytest.mark.parametrize("failing", [1, 2])
def test_failed_copy_of_pages_is_repeated(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of a step without memory run again, one by one."""
    static = StaticDecode(CACHE, rows=2, positions=24)
    (batch,) = static.padding(1).tile_batches(1)
    pages = [7, 2, 5]
    static.fill(StepLayout([decode_item(pages, 3)], CACHE), 1)
    layout = StepLayout([decode_item(pages, 8)], CACHE)
    copies = iter(range(1, 10))

    def find_no_memory(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        if next(copies) == failing:
            raise torch.OutOfMemoryError("no memory")
        return to_device(values, device)

    for module in (static_decode, staging):
        monkeypatch.setattr(module, "to_device", find_no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        static.fill(layout, 1)
    static.fill(layout, 1)
    assert batch.table[batch.tiles[0, 0], :3].tolist() == pages


def test_pages_that_did_not_change_are_not_copied_again() -> None:
    """Turning all pages into a table took 0.2 ms of the host for 32 sequences of 8,100 positions, and takes 0.06."""
    static = StaticDecode(CACHE, rows=2, positions=24)
    (batch,) = static.padding(2).tile_batches(1)
    pages = [[7, 2, 5], [3, 9, 1]]
    static.fill(StepLayout([decode_item(each, 8) for each in pages], CACHE), 2)
    places = batch.tiles[:, 0].tolist()
    batch.table[places] = 99
    pages[1][1] = 4
    static.fill(StepLayout([decode_item(each, 9) for each in pages], CACHE), 2)
    assert batch.tiles[:, 0].tolist() == places
    assert batch.table[places, :3].tolist() == [[99, 99, 99], [3, 4, 1]]
