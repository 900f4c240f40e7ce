"""Routes over servers whose spans are equal, unequal, overlapping or missing."""

from __future__ import annotations

import itertools
import random

import pytest

from modelswarm_gateway.routing import Candidate, Leg, cover


def server(name: str, first: int, last: int, load: float = 0.0) -> Candidate:
    return Candidate(name, first, last, load)


def test_the_less_loaded_of_equal_servers_is_taken() -> None:
    servers = [
        server("a", 0, 4, 3),
        server("b", 0, 4, 0),
        server("c", 4, 8, 1),
        server("d", 4, 8, 5),
    ]
    assert cover(servers, (0, 8)) == [Leg("b", 0, 4), Leg("c", 4, 8)]


def test_a_block_that_nobody_holds_makes_no_route() -> None:
    assert cover([server("a", 0, 4), server("c", 5, 8)], (0, 8)) is None
    assert cover([], (0, 1)) is None


def test_a_gap_inside_a_server_span_uses_only_the_missing_blocks() -> None:
    assert cover([server("a", 0, 8)], (2, 5)) == [Leg("a", 2, 5)]


def test_fewer_hops_win_over_more() -> None:
    servers = [server("whole", 0, 8), server("a", 0, 4), server("b", 4, 8)]
    assert cover(servers, (0, 8)) == [Leg("whole", 0, 8)]


def test_a_pair_that_keeps_failing_is_avoided_but_not_forbidden() -> None:
    servers = [server("a", 0, 4), server("b", 4, 8), server("c", 4, 8, 50)]
    bad = {frozenset(("a", "b"))}
    assert cover(servers, (0, 8), bad_pairs=bad) == [Leg("a", 0, 4), Leg("c", 4, 8)]
    assert cover(servers[:2], (0, 8), bad_pairs=bad) == [Leg("a", 0, 4), Leg("b", 4, 8)]
    assert cover(servers[1:], (4, 8), before="a", bad_pairs=bad) == [Leg("c", 4, 8)]


def test_jitter_spreads_sessions_over_equal_servers() -> None:
    rng = random.Random(1)
    servers = [server(name, 0, 4) for name in "abcd"]
    routes = [cover(servers, (0, 4), jitter=rng.random) for _ in range(200)]
    chosen = {route[0].peer for route in routes if route}
    assert chosen == set("abcd")


@pytest.mark.parametrize("seed", range(30))
def test_a_route_covers_every_block_once_whenever_every_block_is_held(seed: int) -> None:
    rng = random.Random(seed)
    blocks = rng.randint(1, 12)
    servers = []
    for index in range(rng.randint(1, 12)):
        first = rng.randrange(blocks)
        servers.append(
            server(f"s{index}", first, rng.randint(first + 1, blocks), rng.randint(0, 9))
        )
    route = cover(servers, (0, blocks))
    held = set(itertools.chain.from_iterable(range(s.first, s.last) for s in servers))
    assert (route is not None) == (held == set(range(blocks)))
    if route is not None:
        assert [b for leg in route for b in range(leg.first, leg.last)] == list(range(blocks))
        spans = {s.peer: s for s in servers}
        assert all(
            spans[leg.peer].first <= leg.first < leg.last <= spans[leg.peer].last for leg in route
        )
