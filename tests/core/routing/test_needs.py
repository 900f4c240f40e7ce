"""A server that lacks a need of a session costs it more: each need, its price, and its blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.core.fleets import IDLE, cover, hello, registry_of

from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.routing.cost_model import (
    LOST_DOMAIN_MS,
    OTHER_GRAMMAR_MS,
    OTHER_NUMERICS_MS,
    TOO_SHORT_MS,
    Needs,
)
from modelswarm_gateway.core.servers.numerics import BlockClass
from modelswarm_gateway.core.servers.server import MIN_KV_WAIT_MS

A, B = (replace(hello(name), max_length=4096) for name in "ab")
NONE = Needs(max_length=64)


def cost_ms(needs: Needs, *servers: Hello, free: int = 256) -> float:
    """Return the cost of a route by the first of these servers, as far as the needs raise it."""
    registry = registry_of(*servers)
    for each in servers:
        registry.on_heartbeat(each.peer, replace(IDLE, free_pages=free, total_pages=256), 1.0)
    others = frozenset(each.peer for each in servers[1:])
    totals = [
        cover(registry, servers[0], 1.0, replace(each, excluded=others), cheapest=True)
        for each in (needs, NONE)
    ]
    with_needs, without = (hops[0].cost_to_go_ms for hops in totals)
    return with_needs - without


def test_servers_without_a_lack_cost_nothing_more() -> None:
    needs = Needs(
        max_length=A.max_length,
        kv_positions=64,
        lost_domains=frozenset({"elsewhere"}),
        grammar="g/1",
        numerics=(BlockClass(0, 4, "n/1"),),
    )
    assert cost_ms(needs, replace(A, zone="here", grammar="g/1", numerics="n/1"), B) == 0.0


def test_lost_failure_domain_costs_more() -> None:
    needs = replace(NONE, lost_domains=frozenset({"x", "gone"}))
    assert cost_ms(needs, replace(A, zone="x"), B) == pytest.approx(LOST_DOMAIN_MS)
    assert cost_ms(needs, A, replace(B, zone="x")) == 0.0


@pytest.mark.parametrize(("length", "is_short"), [(4095, False), (4096, False), (4097, True)])
def test_server_that_is_too_short_costs_more(length: int, is_short: bool) -> None:
    extra = cost_ms(replace(NONE, max_length=length), A, replace(B, max_length=1 << 20))
    assert extra == pytest.approx(TOO_SHORT_MS if is_short else 0.0)


def test_longer_server_is_not_too_short_beside_a_short_one() -> None:
    assert cost_ms(replace(NONE, max_length=4096), A, replace(B, max_length=64)) == 0.0


def test_missing_pages_cost_the_predicted_wait() -> None:
    needs = replace(NONE, kv_positions=4)
    assert cost_ms(needs, A, B, free=0) > MIN_KV_WAIT_MS
    assert cost_ms(needs, A, B, free=20) > MIN_KV_WAIT_MS, "26 of 256 pages are for recovery"
    assert cost_ms(replace(needs, for_recovery=True), A, B, free=20) == 0.0


@pytest.mark.parametrize(
    ("own", "other", "extra"),
    [
        ("g/1", "g/2", 0.0),
        ("g/2", "g/1", OTHER_GRAMMAR_MS),
        ("g/2", "g/2", 0.0),  # no server has the version: any other one will do
        ("", "g/1", TOO_SHORT_MS),
        ("", "g/2", TOO_SHORT_MS),
    ],
)
def test_tail_with_another_version_of_grammars_costs_more(
    own: str, other: str, extra: float
) -> None:
    servers = replace(A, grammar=own), replace(B, grammar=other)
    assert cost_ms(replace(NONE, grammar="g/1"), *servers) == pytest.approx(extra)


def test_version_of_grammars_counts_at_the_tail_alone() -> None:
    head = replace(hello("head", 0, 2), grammar="g/2")
    tail = replace(hello("tail", 2, 4), grammar="g/1")
    registry = registry_of(head, tail)
    hops = cover(registry, head, 1.0, replace(NONE, grammar="g/1"), cheapest=True)
    assert [hop.peer for hop in hops] == [head.peer, tail.peer]
    assert hops[0].cost_to_go_ms < OTHER_GRAMMAR_MS


@pytest.mark.parametrize(
    ("ran", "is_other"),
    [
        (BlockClass(0, 4, "n/1"), False),
        (BlockClass(0, 4, "n/2"), True),
        (BlockClass(0, 4, ""), False),  # not known
        (BlockClass(3, 4, "n/2"), True),
        (BlockClass(0, 1, "n/2"), True),
        (BlockClass(4, 6, "n/2"), False),
        (BlockClass(2, 2, "n/2"), False),
    ],
)
def test_other_numerics_class_than_its_blocks_ran_in_costs_more(
    ran: BlockClass, is_other: bool
) -> None:
    server = replace(A, numerics="n/1")
    extra = cost_ms(replace(NONE, numerics=(ran,)), server, B)
    assert extra == pytest.approx(OTHER_NUMERICS_MS if is_other else 0.0)


def test_numerics_class_of_other_blocks_does_not_count() -> None:
    head, tail = hello("head", 0, 2), hello("tail", 2, 4)
    registry = registry_of(replace(head, numerics="n/1"), replace(tail, numerics="n/2"))
    ran = BlockClass(0, 2, "n/1"), BlockClass(2, 4, "n/2")
    plain, same, swapped = (
        cover(registry, head, 1.0, replace(NONE, numerics=each), cheapest=True)[0].cost_to_go_ms
        for each in ((), ran, (BlockClass(0, 2, "n/2"), BlockClass(2, 4, "n/1")))
    )
    assert same == plain
    assert swapped == pytest.approx(plain + 2 * OTHER_NUMERICS_MS)


def test_needs_add_up() -> None:
    server = replace(A, zone="x", numerics="n/1")
    one = replace(NONE, lost_domains=frozenset({"x"}))
    other = replace(NONE, numerics=(BlockClass(0, 4, "n/2"),))
    both = replace(one, numerics=other.numerics)
    assert cost_ms(both, server, B) == pytest.approx(LOST_DOMAIN_MS + OTHER_NUMERICS_MS)


def test_excluded_server_is_never_taken() -> None:
    registry = registry_of(A, B)
    assert {
        hop.peer
        for _ in range(20)
        for hop in cover(registry, A, 1.0, replace(NONE, excluded=frozenset({A.peer, "gone/1/b"})))
    } == {B.peer}
    assert cover(registry, A, 1.0, replace(NONE, excluded=frozenset({A.peer, B.peer}))) == []
    assert math.isfinite(cover(registry, A, 1.0, NONE)[0].cost_to_go_ms)


def test_each_need_is_a_question_of_its_own() -> None:
    """Costs-to-go are cached by question; those of one session do not answer another's."""
    registry = registry_of(replace(A, zone="x", numerics="n/1", max_length=64))
    asked = [
        NONE,
        replace(NONE, lost_domains=frozenset({"x"})),
        replace(NONE, numerics=(BlockClass(0, 4, "n/2"),)),
        replace(NONE, max_length=65),
        replace(NONE, kv_positions=64, max_length=64),
    ]
    registry.on_heartbeat(A.peer, replace(IDLE, free_pages=0), 1.0)
    costs = [cover(registry, A, 1.0, each, cheapest=True)[0].cost_to_go_ms for each in asked]
    again = [cover(registry, A, 1.0, each, cheapest=True)[0].cost_to_go_ms for each in asked]
    assert again == costs and len(set(costs)) == len(asked)
