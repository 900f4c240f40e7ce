"""Exhaustive search of the ownership model (R19, leases; R20, ownership), and plants that prove its invariants.

A search of the fast tier takes at most 5 CPU seconds on the build machine, all of the full tier 120. The tests assert
the states that were visited, so a model that lost its transitions fails; no test asserts a time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.ownership_model.explorer import explore
from support.ownership_model.state import Budget, Rules, World

LOST = "was read"
TWO_OWNERS = "run the session"
REPLICAS, PIPELINE = (World(each, Budget(), max_epoch=5) for each in (False, True))


def replicas(messages: int, budget: Budget) -> World:
    """Two servers that hold all blocks: a route has one of them."""
    return replace(REPLICAS, max_messages=messages, budget=budget)


def pipeline(messages: int, budget: Budget) -> World:
    """Two servers that hold one half of the blocks each: a route has both."""
    return replace(PIPELINE, max_messages=messages, budget=budget)


CUT_AND_KILL = Budget(cuts=1, expiries=2, kills=1)
STALL = Budget(cuts=0, expiries=2, stalls=1)
TIMEOUT = Budget(cuts=0, expiries=1, kills=1, timeouts=1)
CUT = Budget(cuts=1, expiries=1)
NO_FAULT = Budget(cuts=0, expiries=0)
KILL = Budget(turns=3, cuts=0, expiries=4, kills=1)


@pytest.mark.parametrize(
    ("world", "floor"),
    [
        pytest.param(replicas(6, NO_FAULT), 150, id="replicas"),
        pytest.param(replicas(5, TIMEOUT), 5_000, id="replicas-timeout"),
        pytest.param(replace(pipeline(6, KILL), max_epoch=6), 20_000, id="pipeline-kill"),
    ],
)
def test_small_worlds_keep_one_owner_and_its_log(world: World, floor: int) -> None:
    search = explore(world)
    assert (search.fault, search.path) == ("", ())
    assert search.is_complete
    assert search.states >= floor
    assert search.at_rest > 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "floor"),
    [
        pytest.param(replicas(5, CUT_AND_KILL), 90_000, id="replicas-cut-kill"),
        pytest.param(replicas(4, STALL), 60_000, id="replicas-stall"),
        pytest.param(pipeline(5, CUT_AND_KILL), 150_000, id="pipeline-cut-kill"),
        pytest.param(pipeline(4, STALL), 150_000, id="pipeline-stall"),
    ],
)
def test_large_worlds_keep_one_owner_and_its_log(world: World, floor: int) -> None:
    search = explore(world)
    assert (search.fault, search.path) == ("", ())
    assert search.is_complete
    assert search.states >= floor
    assert search.at_rest > 1000


@pytest.mark.parametrize(
    ("rules", "world", "fault"),
    [
        pytest.param(Rules(claims_names=False), replicas(6, NO_FAULT), TWO_OWNERS, id="claims"),
        pytest.param(Rules(searches_all=False), replicas(4, CUT), TWO_OWNERS, id="search"),
        pytest.param(Rules(keeps_lost_hops=False), replicas(5, CUT_AND_KILL), LOST, id="lost-hops"),
        pytest.param(Rules(keeps_replaced_hops=False), replicas(5, TIMEOUT), LOST, id="replaced"),
        pytest.param(
            Rules(renews_handles=False), replicas(4, STALL), "run on the hop", id="handles"
        ),
    ],
)
def test_rule_that_is_switched_off_is_missed(rules: Rules, world: World, fault: str) -> None:
    search = explore(replace(world, rules=rules))
    assert fault in search.fault, "the model needs this rule"
    assert search.path


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "fault"),
    [
        pytest.param(
            replace(replicas(5, CUT_AND_KILL), rules=Rules(waits_for_lease=False)),
            TWO_OWNERS,
            id="name-without-log",
        ),
        pytest.param(replace(replicas(4, STALL), slow_answers=True), TWO_OWNERS, id="late-answer"),
        pytest.param(replicas(4, Budget(cuts=2, expiries=1)), TWO_OWNERS, id="no-hops"),
        pytest.param(replicas(4, Budget(cuts=0, expiries=3, kills=1, stalls=1)), LOST, id="taken"),
    ],
)
def test_open_hole_is_found_by_the_model(world: World, fault: str) -> None:
    """`test_ownership_holes.py` has each of them on the real cores. Its mend changes this expectation."""
    assert fault in explore(world).fault
