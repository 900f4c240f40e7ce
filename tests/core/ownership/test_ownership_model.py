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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world", "floor"),
    [
        pytest.param(replicas(5, CUT_AND_KILL), 90_000, id="replicas-cut-kill"),
        pytest.param(
            replace(replicas(4, STALL), slow_answers=True),
            250_000,
            id="replicas-stall-slow",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            replicas(4, Budget(cuts=0, expiries=3, kills=1, stalls=1)), 150_000, id="replicas-taken"
        ),
        pytest.param(
            pipeline(5, CUT_AND_KILL), 150_000, id="pipeline-cut-kill", marks=pytest.mark.soak
        ),
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


# Gateway 0 runs a turn and is cut off for a lease. Gateway 1 runs another turn and ends. Then 0 has its link again.
FIRST_RUN = """open(g0) fence(g0>s0) ack-granted(s0>g0) start(g0>s0) input(g0>s0) sample-last(s0) token(s0>g0)
    claim_ends(g0,s0) claim_ends(g0,s1) cut(g0,s0)"""
ELSEWHERE = """resume(g0) find(g0>s1) info(s1>g0) fence(g0>s1) ack-granted(s1>g0) start(g0>s1) input(g0>s1)
    sample-last(s1) token(s1>g0)"""
OTHER_RUN = """take_over(g1) fence(g1>s0) ack-granted(s0>g1) edit(g1) fence(g1>s0) ack-granted(s0>g1) start(g1>s0)
    input(g1>s0) sample-last(s0) token(s0>g1) kill(g1) expire(g1,s0) link(g0,s0) owned(g0>s0)"""
RETURN = replace(replicas(5, Budget(3, cuts=1, expiries=2, kills=1)), max_epoch=6)
RETURN_PREFIX = (*FIRST_RUN.split(), "expire(g0,s0)", *OTHER_RUN.split())
ALONE_BUDGET = Budget(4, cuts=1, expiries=2, kills=1, crashes=1)
ALONE = replace(replicas(5, ALONE_BUDGET), max_epoch=7, slow_answers=True)
ALONE_PREFIX = (
    *(FIRST_RUN + " " + ELSEWHERE).split(),
    *("expire(g0,s0)", "crash(s1)"),
    *OTHER_RUN.split(),
)


@pytest.mark.parametrize(
    ("world", "prefix", "rules"),
    [
        pytest.param(RETURN, RETURN_PREFIX, Rules(asks_after_cut=False), id="question"),
        pytest.param(ALONE, ALONE_PREFIX, Rules(waits_for_answer=False), id="create"),
    ],
)
def test_returning_gateway_needs_the_rule(
    world: World, prefix: tuple[str, ...], rules: Rules
) -> None:
    kept = explore(world, prefix=prefix)
    assert (kept.fault, kept.is_complete) == ("", True)
    assert kept.states >= 50
    assert LOST in explore(replace(world, rules=rules), prefix=prefix).fault


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_name_without_log_needs_the_lease() -> None:
    """A gateway has started its first turn, and loses its link before the prompt arrives. Another one searches."""
    rules = Rules(waits_for_lease=False)
    assert LOST in explore(replace(replicas(5, CUT_AND_KILL), rules=rules)).fault


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_known_limit_is_found_by_the_model() -> None:
    """A gateway that reaches no server that holds the session, but another one, runs a second session of that name."""
    assert TWO_OWNERS in explore(replicas(4, Budget(cuts=2, expiries=0))).fault
