"""The replay log alone: retained rows, truncation, the memory limit, and eviction."""

from __future__ import annotations

import random

import pytest

from modelswarm.placement.replay_memory import GROUP_OVERHEAD
from modelswarm_serving.core.hops.replay_log import ReplayLog

SIZE = 8


def make_rows(first: int, end: int, mark: int = 0) -> bytes:
    return b"".join((mark * 1000 + at).to_bytes(SIZE, "little") for at in range(first, end))


def count_bytes(*groups: int) -> int:
    return sum(GROUP_OVERHEAD + SIZE * group for group in groups)


def make_filled_log(limit: int = 1 << 20) -> ReplayLog:
    """Return a log with hop 1: a prompt of 10 rows, then 5 decode rows."""
    log = ReplayLog(SIZE, limit)
    log.append(1, 0, make_rows(0, 10))
    for at in range(10, 15):
        log.append(1, at, make_rows(at, at + 1))
    return log


@pytest.mark.parametrize(("start", "end"), [(0, 15), (0, 10), (3, 7), (9, 12), (14, 15), (5, 5)])
def test_retained_rows_are_read_back_unchanged(start: int, end: int) -> None:
    read = make_filled_log().read_rows(1, start, end)
    assert read is not None and bytes(read) == make_rows(start, end)


def test_rows_not_retained_are_not_returned() -> None:
    log = make_filled_log()
    assert log.retained_range(1) == (0, 15)
    assert log.retained_range(2) == (0, 0)
    assert log.read_rows(1, 0, 16) is None
    assert log.read_rows(2, 0, 1) is None


def test_group_is_retained_without_a_copy() -> None:
    log = ReplayLog(SIZE, 1 << 20)
    given = make_rows(0, 10)
    log.append(1, 0, given)
    assert log.read_rows(1, 0, 10) is given


def test_bytes_count_all_live_buffers() -> None:
    log = make_filled_log()
    assert log.bytes == count_bytes(10, 1, 1, 1, 1, 1)
    log.truncate(1, 12)
    assert log.retained_range(1) == (0, 12) and log.bytes == count_bytes(10, 1, 1)
    log.truncate(1, 4)  # the buffer of ten rows is still in use
    assert log.retained_range(1) == (0, 4) and log.bytes == count_bytes(10)
    read = log.read_rows(1, 0, 4)
    assert read is not None and bytes(read) == make_rows(0, 4) and log.read_rows(1, 0, 5) is None
    log.truncate(1, 0)
    assert log.retained_range(1) == (0, 0) and log.bytes == 0


def test_dropped_hop_frees_all_bytes() -> None:
    log = make_filled_log()
    log.drop(1)
    log.drop(1)
    assert log.bytes == 0 and log.retained_range(1) == (0, 0) and log.evictions == 0


def test_repeated_rows_replace_the_old_ones() -> None:
    log = make_filled_log()
    log.append(1, 8, make_rows(8, 11, mark=7))
    assert log.retained_range(1) == (0, 11)
    read = log.read_rows(1, 6, 11)
    assert read is not None and bytes(read) == make_rows(6, 8) + make_rows(8, 11, mark=7)


def test_rows_after_a_gap_are_not_retained() -> None:
    log = make_filled_log()
    log.append(1, 16, make_rows(16, 20))
    assert log.retained_range(1) == (0, 15)


def test_least_recently_used_hop_is_evicted_whole() -> None:
    log = ReplayLog(SIZE, count_bytes(10, 10, 10))
    for hop in (1, 2, 3):
        log.append(hop, 0, make_rows(0, 10))
    log.read_rows(1, 0, 1)
    log.append(3, 10, make_rows(10, 11))
    assert [log.retained_range(hop) for hop in (1, 2, 3)] == [(0, 10), (0, 0), (0, 11)]
    assert log.evictions == 1 and log.bytes <= log.limit


def test_evicted_hop_retains_later_rows() -> None:
    log = ReplayLog(SIZE, count_bytes(10, 10))
    for hop in (1, 2, 3):
        log.append(hop, 0, make_rows(0, 10))
    log.append(1, 10, make_rows(10, 12))
    assert log.retained_range(1) == (10, 12)


def test_hop_too_long_for_memory_retains_its_first_rows() -> None:
    log = ReplayLog(SIZE, count_bytes(10, 10))
    log.append(2, 0, make_rows(0, 5))
    for first in (0, 10, 20, 30):
        log.append(1, first, make_rows(first, first + 10))
    assert log.retained_range(1) == (0, 20) and log.retained_range(2) == (0, 0)
    assert log.bytes == log.limit and log.evictions == 1


def test_log_without_memory_retains_nothing() -> None:
    log = ReplayLog(SIZE, 0)
    log.append(1, 0, make_rows(0, 10))
    assert not log.is_enabled and log.bytes == 0 and log.retained_range(1) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_bytes_and_rows_consistent(seed: int) -> None:
    rng = random.Random(seed)
    log = ReplayLog(SIZE, rng.choice((2000, 5000, 100_000)))
    ends = dict.fromkeys(range(5), 0)
    marks: dict[tuple[int, int], int] = {}
    for step in range(400):
        hop = rng.randrange(5)
        if rng.random() < 0.75:
            count = rng.choice((1, 1, 1, 30))
            log.append(hop, ends[hop], make_rows(ends[hop], ends[hop] + count, mark=step))
            marks |= {(hop, at): step for at in range(ends[hop], ends[hop] + count)}
            ends[hop] += count
        elif rng.random() < 0.8:
            ends[hop] = rng.randint(0, ends[hop])
            log.truncate(hop, ends[hop])
        else:
            ends[hop] = 0
            log.drop(hop)
        assert 0 <= log.bytes <= log.limit
        start, end = log.retained_range(hop)
        assert end <= ends[hop]
        read = log.read_rows(hop, start, end)
        wanted = b"".join(make_rows(at, at + 1, marks[hop, at]) for at in range(start, end))
        assert read is not None or start == end
        assert read is None or bytes(read) == wanted
    for hop in ends:
        log.drop(hop)
    assert log.bytes == 0


def test_budget_shrinks_by_what_others_need() -> None:
    log = ReplayLog(SIZE, count_bytes(1, 1, 1))
    for hop in (1, 2, 3):
        log.append(hop, 0, make_rows(0, 1))
    log.reserve(count_bytes(1))
    assert [log.retained_range(hop) for hop in (1, 2, 3)] == [(0, 0), (0, 1), (0, 1)]
    log.append(4, 0, make_rows(0, 1))
    assert (log.retained_range(2), log.retained_range(4)) == ((0, 0), (0, 1))
    log.reserve(2 * log.limit)
    assert (log.bytes, log.evictions) == (0, 4)
    log.reserve(0)
    log.append(4, 0, make_rows(0, 4))
    assert log.retained_range(4) == (0, 4)
