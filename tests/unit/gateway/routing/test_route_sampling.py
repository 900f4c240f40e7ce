"""A hop is sampled from the best few servers and their ties, for any number of slightly worse ones."""

from __future__ import annotations

import numpy as np
import pytest

from modelswarm_gateway.core.routing.path_search import SAMPLED_SERVERS, sample_softmax

BEST_MS = 100.0
WORSE_MS = 105.0  # weight exp(-0.05 / 0.08) = 0.54 of the best server's
DRAWS = [(index + 0.5) / 2000 for index in range(2000)]  # covers [0, 1) evenly


def sampled_servers(*groups: tuple[int, float]) -> set[int]:
    """Return the indexes that are sampled. A group is a number of servers and their cost."""
    costs = np.concatenate([np.full(count, cost_ms) for count, cost_ms in groups])
    return {sample_softmax(costs, iter([draw]).__next__) for draw in DRAWS}


def test_thousands_of_worse_servers_are_not_sampled() -> None:
    """All worse servers together have 99 % of the weight."""
    sampled = sampled_servers((SAMPLED_SERVERS, BEST_MS), (5000, WORSE_MS))
    assert sampled == set(range(SAMPLED_SERVERS))


def test_order_of_servers_does_not_matter() -> None:
    sampled = sampled_servers((5000, WORSE_MS), (SAMPLED_SERVERS, BEST_MS))
    assert sampled == set(range(5000, 5000 + SAMPLED_SERVERS))


def test_worse_servers_are_sampled_when_few() -> None:
    assert sampled_servers((1, BEST_MS), (SAMPLED_SERVERS - 1, WORSE_MS)) == set(
        range(SAMPLED_SERVERS)
    )


@pytest.mark.parametrize(("cost_ms", "is_tie"), [(105.5, True), (107.0, False)])
def test_servers_tied_with_last_sampled_one_are_sampled(cost_ms: float, is_tie: bool) -> None:
    """0.5 ms of 100 ms leave 0.94 of the last sampled server's weight; 2 ms leave 0.78."""
    groups = (1, BEST_MS), (SAMPLED_SERVERS - 1, WORSE_MS), (3, cost_ms)
    count = SAMPLED_SERVERS + (3 if is_tie else 0)
    assert sampled_servers(*groups) == set(range(count))


def test_greatest_draw_takes_a_server_that_may_be_sampled() -> None:
    """The last servers have no weight, and no draw is beyond the others."""
    costs = np.array([*np.full(3, BEST_MS), *np.full(9, 100 * BEST_MS)])
    assert sample_softmax(costs, lambda: 1.0 - 2.0**-53) == 2
    assert sample_softmax(costs, lambda: 0.0) == 0
