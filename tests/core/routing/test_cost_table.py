"""Cost table: which changes outdate costs-to-go, which rows are updated, and what a row holds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.core.fleets import IDLE, hello

from modelswarm_gateway.core.routing.cost_table import UPDATES_PER_CHOICE, CostTable
from modelswarm_gateway.core.routing.path_search import LAST_RESORT
from modelswarm_gateway.core.routing.zones import MIN_CHANGE_MS, ZoneDelays
from modelswarm_gateway.core.servers.server import DEFAULT_BLOCK_MS, Server

COST = (3.0, 2.0, 1.0)  # ms of a hop, ms of a block, health


def server_of(name: str, step_ms: float = 0.0, **fields: object) -> Server:
    """Return a server of all four blocks. `step_ms`: of a heartbeat with steps; 0: it has sent none."""
    server = Server(replace(hello(name), **fields))  # type: ignore[arg-type]
    if step_ms:
        server.on_heartbeat(replace(IDLE, step_ms=step_ms), 1.0)
    return server


def table_of(*servers: Server, zones: ZoneDelays | None = None) -> CostTable:
    """Return a table whose servers all have the cost COST, and whose costs-to-go are up to date."""
    table = CostTable(servers, zones or ZoneDelays())
    for row in range(len(servers)):
        table.set_cost(row, *COST, last_resort=False)
    table.refresh(1.0)
    return table


def state(table: CostTable) -> tuple[bool, bool]:
    """Return whether costs-to-go are outdated, and whether cached ones may not be used any more."""
    return table.is_outdated, table.must_refresh


def test_new_table_has_to_be_refreshed() -> None:
    table = CostTable([server_of("a")], ZoneDelays())
    assert state(table) == (True, True)


def test_same_cost_outdates_nothing() -> None:
    table = table_of(server_of("a"), server_of("b"))
    table.set_cost(1, *COST, last_resort=False)
    assert state(table) == (False, False)


@pytest.mark.parametrize("cost", [(3.5, 2.0, 1.0), (3.0, 2.5, 1.0), (3.0, 2.0, 0.5)])
def test_other_cost_outdates_costs_to_go(cost: tuple[float, float, float]) -> None:
    table = table_of(server_of("a"), server_of("b"))
    table.set_cost(1, *cost, last_resort=False)
    assert state(table) == (True, False)
    assert (table.hop_ms[1], table.block_ms[1], table.score[1]) == cost
    assert (table.hop_ms[0], table.block_ms[0], table.score[0]) == COST
    table.refresh(2.0)
    assert state(table) == (False, False) and table.refreshed_at == 2.0


def test_other_free_pages_outdate_costs_to_go() -> None:
    server = server_of("a")
    table = table_of(server)
    server.reserve(1, 0)
    table.set_cost(0, *COST, last_resort=False)
    assert state(table) == (True, False)
    assert table.free_pages[0] == server.free_pages == server.hello.total_pages - 1


def test_last_resort_costs_more_and_refreshes_at_both_changes() -> None:
    table = table_of(server_of("a"), server_of("b"))
    for is_last in (True, False):
        table.set_cost(1, *COST, last_resort=is_last)
        assert state(table) == (False, True)
        extra = LAST_RESORT if is_last else 0.0
        assert (table.last_resort_ms[1], table.hop_ms[1]) == (extra, COST[0] + extra)
        table.refresh(2.0)
        table.set_cost(1, *COST, last_resort=is_last)
        assert state(table) == (False, False)


def test_other_zone_delay_outdates_costs_to_go_until_refreshed() -> None:
    zones = ZoneDelays()
    table = table_of(server_of("a", zone="x"), server_of("b", zone="y"), zones=zones)
    before = table.delays.copy()
    zones.record_round_trip("x", 40.0)
    assert state(table) == (True, False) and (table.delays == before).all()
    table.refresh(2.0)
    assert state(table) == (False, False)
    assert table.delays[table.zones["x"], table.zones["y"]] == 40.0
    zones.record_round_trip("x", 40.0 - MIN_CHANGE_MS / 2)
    assert state(table) == (False, False)


def test_refresh_forgets_cached_costs_to_go() -> None:
    table = table_of(server_of("a"))
    table.cached["question"] = table.hop_ms
    table.refresh(2.0)
    assert table.cached == {}


@pytest.mark.parametrize(
    ("steps_ms", "median"),
    [
        ((), DEFAULT_BLOCK_MS),
        ((8.0,), 2.0),
        ((8.0, 16.0), 4.0),
        ((40.0, 8.0, 16.0), 4.0),
        ((1e-9,), 0.001),
    ],
)
def test_median_block_time_is_of_the_measured_servers(
    steps_ms: tuple[float, ...], median: float
) -> None:
    measured = [server_of(f"s{number}", ms) for number, ms in enumerate(steps_ms)]
    assert table_of(server_of("new"), *measured).median_block_ms == median


def test_median_block_time_follows_costs_that_are_set() -> None:
    server = server_of("a", 8.0)
    table = table_of(server)
    server.on_heartbeat(replace(IDLE, step_ms=20.0), 2.0)
    table.set_cost(0, *COST, last_resort=False)
    assert table.median_block_ms == 2.0, "it is read at the next refresh"
    table.refresh(2.0)
    assert table.median_block_ms == 5.0


def test_rows_are_updated_in_turn_besides_those_that_changed() -> None:
    count = UPDATES_PER_CHOICE + 3
    servers = [server_of(f"s{number}") for number in range(count)]
    table = table_of(*servers)
    last = servers[-1].hello.peer
    assert table.rows_to_update([last]) == {*range(UPDATES_PER_CHOICE), count - 1}
    after = {*range(UPDATES_PER_CHOICE, count), *range(UPDATES_PER_CHOICE - 3)}
    assert table.rows_to_update([]) == after


def test_empty_rows_are_not_updated() -> None:
    servers = [server_of(name) for name in "abc"]
    table = table_of(*servers)
    table.remove_server(servers[1].hello.peer)
    assert table.apply_membership() == []
    rows = table.rows_to_update([])
    assert rows == {table.row_of[servers[0].hello.peer], table.row_of[servers[2].hello.peer]}
    assert [server for _, server in table.occupied(range(3))] == [servers[0], servers[2]]
    assert table.must_refresh


def test_empty_row_counts_nowhere() -> None:
    servers = [server_of(name, 8.0, max_length=64) for name in "abc"]
    table = table_of(*servers)
    table.set_cost(1, *COST, last_resort=True)
    table.remove_server(servers[1].hello.peer)
    table.apply_membership()
    [row] = {0, 1, 2} - {table.row_of[servers[index].hello.peer] for index in (0, 2)}
    assert (table.last_resort_ms[row], table.score[row]) == (0.0, 1.0)
    assert math.isnan(table.measured_ms[row]) and table.max_length[row] == math.inf
    assert table.free_pages[row] == table.total_pages[row] == table.page_size[row] == 0.0
    assert table.grammar[row] == table.numerics[row] == 0


def test_server_that_comes_gets_a_row_with_its_fields() -> None:
    first, second = server_of("a"), server_of("b", 8.0, grammar="g/1", numerics="n/1")
    table = table_of(first)
    table.add_server(second)
    [row] = table.apply_membership() or []
    hello = second.hello
    assert table.row_of[hello.peer] == row and table.servers[row] is second
    assert (table.measured_ms[row], table.free_pages[row]) == (2.0, second.free_pages)
    assert (table.total_pages[row], table.page_size[row]) == (hello.total_pages, hello.page_size)
    assert table.max_length[row] == hello.max_length
    assert table.grammar[row] == table.grammar_id("g/1") != table.grammar_id("")
    assert table.numerics[row] == table.numerics_id("n/1") != table.numerics_id("")
    assert table.must_refresh


def test_server_gone_again_before_a_choice_changes_nothing() -> None:
    table = table_of(server_of("a"))
    table.add_server(server_of("b"))
    table.remove_server("b/1/b")
    assert table.apply_membership() == [] and not table.must_refresh
    assert list(table.row_of) == ["a/1/b"]


def test_server_that_is_back_before_a_choice_has_one_row() -> None:
    old, new = server_of("a"), server_of("a", 8.0)
    table = table_of(old, server_of("b"))
    table.remove_server("a/1/b")
    table.add_server(new)
    [row] = table.apply_membership() or []
    assert table.servers[row] is new and len(table.row_of) == 2


def test_server_of_an_unknown_zone_needs_a_new_table() -> None:
    table = table_of(server_of("a", zone="x"))
    table.add_server(server_of("b", zone="y"))
    assert table.apply_membership() is None


def test_versions_and_classes_keep_their_numbers() -> None:
    table = table_of(server_of("a"))
    for number_of in (table.grammar_id, table.numerics_id):
        one, two = number_of("one"), number_of("two")
        assert len({0, one, two}) == 3
        assert (number_of(""), number_of("one"), number_of("two")) == (0, one, two)
