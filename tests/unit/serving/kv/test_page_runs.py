"""Adjacent free pages become one run in any order of release."""

from __future__ import annotations

import itertools

import pytest

from modelswarm_serving.core.kv.page_allocator import PageAllocator

PARTS = ([0, 1], [2, 3], [4, 5])


def allocate_parts() -> PageAllocator:
    """Allocate pages 0 to 5, and page 6. Pages 7 to 12 are a free run that is long enough for any test."""
    pages = PageAllocator(13)
    for part in (*PARTS, [6]):
        assert pages.allocate(len(part)) == part
    return pages


def test_released_pages_join_the_run_to_their_left() -> None:
    pages = allocate_parts()
    pages.release([0, 1])
    pages.release([2, 3])
    assert pages.allocate(4) == [0, 1, 2, 3]


def test_released_pages_join_the_run_to_their_right() -> None:
    pages = allocate_parts()
    pages.release([2, 3])
    pages.release([0, 1])
    assert pages.allocate(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_parts_released_in_any_order_become_one_run(order: tuple[int, ...]) -> None:
    pages = allocate_parts()
    for index in order:
        pages.release(PARTS[index])
    assert pages.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_pages_apart_do_not_become_one_run() -> None:
    pages = allocate_parts()
    pages.release([0, 1])
    pages.release([4, 5])
    assert pages.allocate(4) == [7, 8, 9, 10]
