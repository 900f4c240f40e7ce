"""Routes over servers with equal, unequal, overlapping or missing spans, checked against a search of all routes."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Candidate, PathTable, RouteHop

Between = tuple[str | None, str | None]


def zone_delay(one: str, other: str) -> float:
    return 0.5 if one == other else 3.0 + len(one + other)


def make_table(*servers: tuple[str, int, int], blocks: int = 8, **hops: float) -> PathTable:
    """Return servers in one zone at 1 ms per block; `hops` sets the hop cost of some, in ms."""
    table = PathTable([Candidate(*server) for server in servers], blocks, zone_delay)
    for peer, ms in hops.items():
        table.hop_ms[table.row_of[peer]] = ms
    return table


def find_route(
    table: PathTable,
    blocks: tuple[int, int],
    between: Between = (None, None),
    draw: Callable[[], float] | None = None,
) -> list[RouteHop] | None:
    to_go = table.cost_to_go(blocks, table.hop_ms, between[1])
    return table.sample_path(blocks, to_go, table.hop_ms, between[0], draw)


def describe_hops(path: list[RouteHop] | None) -> list[tuple[str, int, int]] | None:
    return None if path is None else [(hop.peer, hop.first, hop.last) for hop in path]


def test_cheapest_of_equal_servers_is_chosen() -> None:
    servers = make_table(("a", 0, 4), ("b", 0, 4), ("c", 4, 8), ("d", 4, 8), a=3, b=0, c=1, d=5)
    assert describe_hops(find_route(servers, (0, 8))) == [("b", 0, 4), ("c", 4, 8)]


def test_rows_of_removed_servers_are_used_again() -> None:
    servers = make_table(("a", 0, 8), ("b", 0, 8))
    servers.remove_peers(["a", "b"])
    servers.add_candidates([Candidate("c", 0, 8)])
    rows = len(servers.peers)
    for number in range(9):
        servers.remove_peers([f"d{number - 1}" if number else "c"])
        servers.add_candidates([Candidate(f"d{number}", 0, 8)])
    assert len(servers.peers) == rows
    assert describe_hops(find_route(servers, (0, 8))) == [("d8", 0, 8)]


def test_uncovered_block_gives_no_route() -> None:
    assert find_route(make_table(("a", 0, 4), ("c", 5, 8)), (0, 8)) is None
    assert find_route(make_table(blocks=1), (0, 1)) is None


def test_gap_inside_a_span_uses_only_the_missing_blocks() -> None:
    assert describe_hops(find_route(make_table(("a", 0, 8)), (2, 5))) == [("a", 2, 5)]


def test_route_with_fewer_hops_is_chosen() -> None:
    servers = make_table(("whole", 0, 8), ("a", 0, 4), ("b", 4, 8))
    assert describe_hops(find_route(servers, (0, 8))) == [("whole", 0, 8)]


def test_route_enters_a_fast_server_in_the_middle_of_its_span() -> None:
    servers = make_table(("slow", 0, 8), ("head", 0, 3), ("wide", 1, 8))
    servers.block_ms[servers.row_of["slow"]] = 10.0
    assert describe_hops(find_route(servers, (0, 8))) == [("head", 0, 3), ("wide", 3, 8)]


def test_last_resort_serves_only_otherwise_uncovered_blocks() -> None:
    servers = make_table(
        ("a", 0, 4), ("b", 0, 4), ("c", 4, 8), a=LAST_RESORT, b=900.0, c=LAST_RESORT
    )
    rng = random.Random(1)
    for _ in range(50):
        assert describe_hops(find_route(servers, (0, 8), draw=rng.random)) == [
            ("b", 0, 4),
            ("c", 4, 8),
        ]


def test_last_resort_downstream_keeps_the_cheapest_first_hop() -> None:
    servers = make_table(("a", 0, 4), ("b", 0, 4), ("c", 4, 8), b=20.0, c=LAST_RESORT)
    rng = random.Random(1)
    chosen = Counter(
        (find_route(servers, (0, 8), draw=rng.random) or [])[0].peer for _ in range(100)
    )
    assert chosen["a"] == 100


def test_servers_with_infinite_cost_are_never_chosen() -> None:
    assert find_route(make_table(("a", 0, 8), a=math.inf), (0, 8)) is None
    servers = make_table(("a", 0, 8), ("b", 0, 8), a=math.inf, b=1e6)
    assert describe_hops(find_route(servers, (0, 8))) == [("b", 0, 8)]


def test_equal_servers_share_the_sessions() -> None:
    rng = random.Random(1)
    servers = make_table(*((name, 0, 4) for name in "abcd"), blocks=4)
    chosen = Counter(
        (find_route(servers, (0, 4), draw=rng.random) or [])[0].peer for _ in range(400)
    )
    assert min(chosen.values()) > 60


def test_all_of_many_equal_servers_are_chosen() -> None:
    rng = random.Random(1)
    servers = make_table(*((f"s{n}", 0, 4) for n in range(100)), blocks=4)
    chosen = Counter(
        (find_route(servers, (0, 4), draw=rng.random) or [])[0].peer for _ in range(2000)
    )
    assert len(chosen) == 100


def test_clearly_worse_server_is_rarely_chosen() -> None:
    rng = random.Random(1)
    servers = make_table(("a", 0, 4), ("b", 0, 4), blocks=4, b=4.0)
    chosen = Counter(
        (find_route(servers, (0, 4), draw=rng.random) or [])[0].peer for _ in range(400)
    )
    assert chosen["b"] <= 1


def test_route_hop_records_its_cost_and_the_best_alternative() -> None:
    servers = make_table(("a", 0, 8), ("b", 0, 8), b=2.0)
    [hop] = find_route(servers, (0, 8), draw=lambda: 0.999999999999) or []
    assert hop == RouteHop("b", 0, 8, cost_to_go_ms=10.0, best_ms=8.0, best_peer="a", options=2)


def test_repair_prefers_servers_in_the_neighbours_zone() -> None:
    servers = PathTable([Candidate("a", 2, 4, "east"), Candidate("b", 2, 4, "west")], 8, zone_delay)
    assert describe_hops(find_route(servers, (2, 4), ("west", "west"))) == [("b", 2, 4)]
    assert describe_hops(find_route(servers, (2, 4), (None, "east"))) == [("a", 2, 4)]


# --- properties


def make_random_table(rng: random.Random) -> tuple[PathTable, list[Candidate]]:
    blocks = rng.randint(1, 7)
    servers = []
    for index in range(rng.randint(1, 9)):
        first = rng.randrange(blocks)
        span = first, rng.randint(first + 1, blocks)
        servers.append(Candidate(f"s{index}", *span, rng.choice(("", "east", "west"))))
    table = PathTable(servers, blocks, zone_delay)
    table.hop_ms[:] = [rng.choice((rng.random(), LAST_RESORT, math.inf)) for _ in servers]
    table.block_ms[:] = [rng.uniform(0.1, 9.0) for _ in servers]
    return table, servers


def list_routes(
    servers: list[Candidate], blocks: tuple[int, int]
) -> list[list[tuple[str, int, int]]]:
    """Return all routes in which each hop reaches the end of its server's span."""
    first, end = blocks
    if first == end:
        return [[]]
    return [
        [(s.peer, first, min(s.last, end)), *rest]
        for s in servers
        if s.first <= first < s.last
        for rest in list_routes(servers, (min(s.last, end), end))
    ]


def compute_cost(
    table: PathTable, servers: list[Candidate], path: list[tuple[str, int, int]], at: Between
) -> float:
    zones = {s.peer: s.zone for s in servers}
    line = [zone for zone in [at[0], *(zones[p] for p, _, _ in path), at[1]] if zone is not None]
    used = sum(
        table.hop_ms[table.row_of[p]] + (b - a) * table.block_ms[table.row_of[p]]
        for p, a, b in path
    )
    return float(used) + sum(zone_delay(a, b) for a, b in itertools.pairwise(line))


@pytest.mark.parametrize("seed", range(60))
def test_route_is_the_cheapest_of_all(seed: int) -> None:
    rng = random.Random(seed)
    table, servers = make_random_table(rng)
    first = rng.randrange(table.n_blocks)
    blocks = first, rng.randint(first + 1, table.n_blocks)
    at: Between = rng.choice((None, *table.zones)), rng.choice((None, *table.zones))
    all_costs = [compute_cost(table, servers, path, at) for path in list_routes(servers, blocks)]
    cheapest = min(all_costs, default=math.inf)
    path = find_route(table, blocks, at)
    if math.isinf(cheapest):
        assert path is None
        return
    found = describe_hops(path)
    assert found is not None and path is not None
    assert compute_cost(table, servers, found, at) == pytest.approx(cheapest)
    assert path[0].cost_to_go_ms == pytest.approx(cheapest)
    if at == (None, None):
        assert table.path_cost(found) == pytest.approx(cheapest)


@pytest.mark.parametrize("seed", range(60))
def test_sampled_route_covers_blocks_with_fewest_last_resorts(seed: int) -> None:
    rng = random.Random(1000 + seed)
    table, servers = make_random_table(rng)
    blocks = 0, table.n_blocks
    for _ in range(5):
        found = describe_hops(find_route(table, blocks, draw=rng.random))
        best = describe_hops(find_route(table, blocks))
        assert (found is None) == (best is None)
        if found is None or best is None:
            continue
        assert [b for _, first, last in found for b in range(first, last)] == list(range(*blocks))
        spans = {s.peer: s for s in servers}
        assert all(spans[p].first <= a < b <= spans[p].last for p, a, b in found)
        assert table.path_cost(found) // LAST_RESORT == table.path_cost(best) // LAST_RESORT


def test_route_over_10_000_servers_is_near_the_optimum() -> None:
    rng = random.Random(5)
    spans = [
        (first, first + rng.randint(5, 40)) for first in (rng.randrange(96) for _ in range(10_000))
    ]
    servers = [
        Candidate(f"s{n}", first, min(last, 100), f"z{rng.randrange(20)}")
        for n, (first, last) in enumerate(spans)
    ]
    table = PathTable(servers, 100, zone_delay)
    table.block_ms[:] = np.random.default_rng(1).uniform(0.5, 2.0, len(servers))
    best = find_route(table, (0, 100))
    found = find_route(table, (0, 100), draw=rng.random)
    assert best is not None and found is not None
    assert table.path_cost(describe_hops(best) or []) == pytest.approx(best[0].cost_to_go_ms)
    assert table.path_cost(describe_hops(found) or []) <= 1.5 * best[0].cost_to_go_ms


def test_route_over_an_unknown_server_is_unreachable() -> None:
    servers = make_table(("a", 0, 4), ("b", 4, 8), a=3, b=2)
    assert servers.path_cost([("a", 0, 4), ("b", 4, 8)]) == 3 + 4 + 2 + 4 + zone_delay("", "")
    for route in ([("a", 0, 4), ("gone", 4, 8)], [("gone", 0, 4), ("b", 4, 8)]):
        assert servers.path_cost(route) == math.inf
