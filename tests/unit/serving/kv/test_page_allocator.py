"""The page allocator: every page has one owner, and pages are adjacent if a free run is long enough."""

from __future__ import annotations

import random

import pytest

from modelswarm_serving.core.kv.page_allocator import PageAllocator


def test_allocation_takes_the_lowest_run_that_fits() -> None:
    pool = PageAllocator(10)
    first, second, third = pool.allocate(3), pool.allocate(2), pool.allocate(4)
    assert (first, second, third) == ([0, 1, 2], [3, 4], [5, 6, 7, 8])
    pool.release(first)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) == [2, 9]  # no run of two is left
    assert pool.free == 0


def test_adjacent_free_runs_are_merged() -> None:
    pool = PageAllocator(6)
    a, b, c = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.release(a)
    pool.release(c)
    pool.release(b)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_allocation_beyond_free_pages_fails_and_takes_none() -> None:
    pool = PageAllocator(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 pages requested, 1 free"):
        pool.allocate(2)
    assert pool.free == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_allocations_share_and_lose_no_page(seed: int) -> None:
    rng = random.Random(seed)
    pool = PageAllocator(64)
    owned: list[list[int]] = []
    for _ in range(2000):
        if owned and rng.random() < 0.5:
            pages = owned.pop(rng.randrange(len(owned)))
            keep = rng.randrange(len(pages) + 1)
            pool.release(pages[keep:])
            if keep:
                owned.append(pages[:keep])
        else:
            count = rng.randint(0, min(12, pool.free))
            owned.append(pool.allocate(count))
        allocated = [page for pages in owned for page in pages]
        assert len(allocated) == len(set(allocated))
        assert len(allocated) + pool.free == 64
        assert all(0 <= page < 64 for page in allocated)
