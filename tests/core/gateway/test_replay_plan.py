"""The replay plan over tables of the state that hops still have (R6, replay)."""

from __future__ import annotations

import pytest

from modelswarm.protocol.messages import RetainedRows
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points


def starts(*kvs: int) -> list[tuple[int, int]]:
    hops = [HopState(kv, boundary) for boundary, kv in enumerate(kvs, 1)]
    return [(point.start, point.send_from) for point in restart_points(hops)]


@pytest.mark.parametrize(
    ("kvs", "expected"),
    [
        ((9,), [(9, 0)]),
        ((9, 9), [(9, 9), (9, 0)]),
        ((0, 0, 0), [(0, 0), (0, 0), (0, 0)]),
        ((9, 0), [(0, 0), (0, 0)]),  # tail lost, no retained rows: all is run again
        ((0, 9), [(0, 9), (9, 0)]),  # head lost: it runs all rows again and sends only row 9
        (
            (9, 0, 9),
            [(0, 0), (0, 9), (9, 0)],
        ),  # the middle is rebuilt, the tail gets no row of it
        ((9, 4, 9), [(4, 4), (4, 9), (9, 0)]),
        ((3, 9, 6), [(3, 6), (6, 6), (6, 0)]),  # a hop ahead of its successor restarts there
    ],
)
def test_hop_without_retained_rows_restarts_for_its_successor(
    kvs: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    assert starts(*kvs) == expected


def test_hop_with_retained_rows_restarts_at_its_own_kv() -> None:
    hops = [HopState(9, 2, (RetainedRows(2, 0, 9),)), HopState(0, 4), HopState(9, 6)]
    assert [(p.start, p.send_from) for p in restart_points(hops)] == [(9, 0), (0, 9), (9, 0)]


def test_retained_rows_count_only_up_to_a_hole() -> None:
    hops = [HopState(9, 2, (RetainedRows(2, 5, 9), RetainedRows(2, 0, 3))), HopState(0, 4)]
    assert [(p.start, p.send_from) for p in restart_points(hops)] == [(3, 0), (0, 0)]


def test_retained_rows_of_another_boundary_do_not_count() -> None:
    hops = [HopState(9, 2, (RetainedRows(3, 0, 9),)), HopState(0, 4)]
    assert [p.start for p in restart_points(hops)] == [0, 0]


def test_retained_rows_beyond_own_kv_do_not_raise_start() -> None:
    hops = [HopState(5, 2, (RetainedRows(2, 0, 9),)), HopState(0, 4)]
    assert [p.start for p in restart_points(hops)] == [5, 0]
