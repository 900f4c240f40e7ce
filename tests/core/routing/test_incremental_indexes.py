"""Indexes that a registry updates as servers come and go equal a recomputation, to the bit.

The servers are few here, so that hypothesis finds the special cases; `bench/routing/route_choice.py` has ten thousand.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.core.fleets import IDLE, hello
from support.core.peer_comparison import as_costs, compare_simply

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.peer_comparison import CostBySize, PeerGroup
from modelswarm_gateway.core.routing.cost_model import CostModel, Needs
from modelswarm_gateway.core.routing.cost_table import UPDATES_PER_CHOICE, CostTable
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.routing.zones import ZoneDelays
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.servers.step_times import StepCost
from modelswarm_gateway.core.servers.variant import ModelVariant, variant_of

BLOCKS = 4
SPANS = [(0, 4), (0, 2), (2, 4), (1, 3), (0, 1), (3, 4), (1, 4)]
BASE = hello("s0")
MODEL, KIND = BASE.model, variant_of(BASE)


def server(name: int, span: int, zone: int, length: int, revision: int) -> Hello:
    first, last = SPANS[span]
    return replace(
        BASE,
        peer=f"s{name}/1/b",
        first=first,
        last=last,
        n_blocks=BLOCKS,
        zone=f"z{zone}",
        max_length=(64, 128, 256)[length],
        revision="new" if revision else BASE.revision,
    )


NAMES = st.integers(0, 7)
HELLOS = st.builds(
    server, NAMES, st.integers(0, len(SPANS) - 1), st.integers(0, 2), st.integers(0, 2), st.just(0)
)
CHANGES = st.one_of(
    st.tuples(st.just("join"), HELLOS),
    st.tuples(st.just("leave"), NAMES),
    st.tuples(st.just("heartbeat"), st.tuples(NAMES, st.integers(0, 6), st.integers(0, 40))),
    st.tuples(st.just("eject"), NAMES),
    st.tuples(st.just("far"), NAMES),
    st.tuples(st.just("choose"), st.none()),
)
NEEDS = [
    Needs(max_length=64, kv_positions=64),
    Needs(max_length=200, kv_positions=2000),
    Needs(max_length=64, kv_positions=64, for_recovery=True, lost_domains=frozenset({"z1"})),
    Needs(max_length=64, kv_positions=64, excluded=frozenset({"s0/1/b", "s3/1/b"})),
]


def peer(name: int) -> PeerId:
    return f"s{name}/1/b"


def change(registry: ServerRegistry, draws: Draws, what: str, argument: object, now: float) -> None:
    match what, argument:
        case "join", Hello() as came:
            registry.register(came, now)
        case "leave", int(name):
            registry.deregister(peer(name))
        case "heartbeat", (int(name), int(running), int(free)):
            heartbeat = replace(IDLE, steps=int(10 * now), step_ms=5.0 + name, running=running)
            registry.on_heartbeat(peer(name), replace(heartbeat, free_pages=free), now)
        case "eject", int(name):
            registry.eject(peer(name), "failed", now)
        case "far", int(name):
            registry.record_round_trip(peer(name), 0.001 * (1 + name))
        case _:
            choices(registry.costs, draws, now)


class Draws:
    """A source of 64 random bits at a time. It gives the same ones after every `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._rng = random.Random(7)

    def __call__(self) -> int:
        return self._rng.getrandbits(64)


def choices(costs: CostModel, draws: Draws, now: float) -> list[object]:
    """Return all answers of the cost model, with the same draws each time."""
    found: list[object] = []
    for needs in NEEDS:
        for blocks in ((0, 4), (1, 3)):
            for cheapest in (True, False):
                draws.restart()
                hops = costs.choose_hops(
                    MODEL,
                    KIND,
                    blocks,
                    now,
                    between=("s1/1/b", None),
                    needs=needs,
                    cheapest=cheapest,
                )
                found.append(hops)
                if hops:
                    route = [(hop.peer, hop.first, hop.last) for hop in hops]
                    found.append(costs.route_cost(MODEL, KIND, route, now))
    return found


@given(st.lists(CHANGES, max_size=30))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_incremental_costs_equal_recomputed_costs(changes: Sequence[tuple[str, object]]) -> None:
    draws, now = Draws(), 1.0
    registry = ServerRegistry(30.0, draws, lambda _: None)
    for number in range(4):
        registry.register(server(number, number % 3, number % 3, 2, 0), now)
    choices(registry.costs, draws, now)
    for what, argument in changes:
        now += 0.01
        change(registry, draws, what, argument, now)
    anew = CostModel(registry.servers_of, registry.health_status, draws, 30.0)
    anew.zones = registry.costs.zones
    for _ in range(3):  # a new median block time counts from the next choice on
        now += 0.1
        kept, fresh = choices(registry.costs, draws, now), choices(anew, draws, now)
    assert kept == fresh


@pytest.mark.parametrize("change", ["leaves", "comes", "is ejected"])
def test_choice_after_change_uses_new_costs_to_go(change: str) -> None:
    """Costs-to-go are cached, but not across such a change: the route behind a head would keep its old cost."""
    registry, now = ServerRegistry(30.0, lambda: 0, lambda _: None), 1.0
    head, tail, whole = server(0, 1, 0, 0, 0), server(1, 2, 0, 0, 0), server(2, 0, 0, 0, 0)
    for each in (head, whole, *([] if change == "comes" else [tail])):
        registry.register(each, now)
        running = 90 if each is whole else 0
        registry.on_heartbeat(each.peer, replace(IDLE, running=running), now)
    choices(registry.costs, Draws(), now)
    match change:
        case "leaves":
            registry.deregister(tail.peer)
        case "comes":
            registry.register(tail, now)
        case _:
            registry.eject(tail.peer, "failed", now)
    legs = cheapest(registry, now)
    assert [leg.peer for leg in legs] == [
        head.peer,
        tail.peer if change == "comes" else whole.peer,
    ]
    route = [(leg.peer, leg.first, leg.last) for leg in legs]
    assert legs[0].cost_to_go_ms == pytest.approx(
        registry.costs.route_cost(MODEL, KIND, route, now)
    )


def test_costs_to_go_are_computed_once_per_question(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, compute = [], CostTable.cost_to_go

    def counted(table: CostTable, *arguments: object) -> object:
        computed.append(arguments)
        return compute(table, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CostTable, "cost_to_go", counted)
    registry, now = ServerRegistry(30.0, lambda: 0, lambda _: None), 1.0
    registry.register(server(0, 0, 0, 0, 0), now)
    choices(registry.costs, Draws(), now)
    first = len(computed)
    assert first > 2
    choices(registry.costs, Draws(), now)
    assert len(computed) == first


@pytest.mark.parametrize("zone", [0, 1])
@pytest.mark.parametrize("is_before", [True, False])
def test_replacement_is_near_the_neighbour_that_stays(zone: int, is_before: bool) -> None:
    registry = ServerRegistry(30.0, lambda: 0, lambda _: None)
    stays = server(0, 1 if is_before else 2, zone, 0, 0)
    for each in (stays, server(1, 0, 0, 0, 0), server(2, 0, 1, 0, 0)):
        registry.register(each, 1.0)
    blocks, between = ((2, 4), (stays.peer, None)) if is_before else ((0, 2), (None, stays.peer))
    hops = registry.costs.choose_hops(
        MODEL, KIND, blocks, 1.0, between=between, needs=NEEDS[0], cheapest=True
    )
    [hop] = hops or []
    assert hop.peer == peer(1 + zone)


def test_draws_choose_among_all_equal_servers() -> None:
    """64 random bits become a number in [0, 1)."""
    bits = 0
    registry = ServerRegistry(30.0, lambda: bits, lambda _: None)
    chosen: set[PeerId] = set()
    for number in range(8):
        registry.register(server(number, 0, 0, 0, 0), 1.0)
    for eighth in range(8):
        bits = (eighth << 61) + (1 << 60)
        hops = registry.costs.choose_hops(
            MODEL, KIND, (0, 4), 1.0, between=(None, None), needs=NEEDS[0]
        )
        chosen.update(hop.peer for hop in hops or ())
    assert chosen == {peer(number) for number in range(8)}


def test_costs_of_all_servers_are_computed_again_in_turn() -> None:
    registry, count = ServerRegistry(30.0, lambda: 0, lambda _: None), 3 * UPDATES_PER_CHOICE
    for number in range(count):
        registry.register(server(number, 0, 0, 0, 0), 1.0)
    table = CostTable(list(registry), ZoneDelays())
    turns = [table.rows_to_update(()) for _ in range(3)]
    assert [len(turn) for turn in turns] == [UPDATES_PER_CHOICE] * 3
    assert set().union(*turns) == set(range(count))


def test_cost_table_grows_and_shrinks_with_its_servers() -> None:
    registry, count = ServerRegistry(30.0, lambda: 0, lambda _: None), 100
    for number in range(count):
        registry.register(server(number, 0, 0, 0, 0))
        [leg] = cheapest(registry, float(number))
        assert leg.options == number + 1
    for number in range(count):
        registry.deregister(peer(number))
        legs = cheapest(registry, float(count + number))
        left = count - number - 1
        assert [leg.options for leg in legs] == ([left] if left else [])
        assert all(leg.peer != peer(number) for leg in legs)


def cheapest(registry: ServerRegistry, now: float) -> Sequence[RouteHop]:
    found = registry.costs.choose_hops(
        MODEL, KIND, (0, 4), now, between=(None, None), needs=NEEDS[0], cheapest=True
    )
    return found or []


# ---- blocks and lengths of servers


def of_kind(registry: ServerRegistry, kind: ModelVariant) -> list[Server]:
    return [each for each in registry if variant_of(each.hello) == kind]


def longest(servers: Sequence[Server]) -> int:
    for length in sorted({each.hello.max_length for each in servers}, reverse=True):
        if len(held(each for each in servers if each.hello.max_length >= length)) == BLOCKS:
            return length
    return min((each.hello.max_length for each in servers), default=0)


def held(servers: Iterable[Server]) -> set[int]:
    return {block for each in servers for block in range(each.hello.first, each.hello.last)}


MIXED = st.builds(
    server,
    NAMES,
    st.integers(0, len(SPANS) - 1),
    st.just(0),
    st.integers(0, 2),
    st.integers(0, 1),
)


@given(
    st.lists(
        st.one_of(st.tuples(st.just("join"), MIXED), st.tuples(st.just("leave"), NAMES)),
        max_size=30,
    ),
    st.frozensets(NAMES, max_size=4),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_incremental_coverage_equals_recomputed_coverage(
    changes: Sequence[tuple[str, object]], out: frozenset[int]
) -> None:
    registry = ServerRegistry(30.0, lambda: 0, lambda _: None)
    without = frozenset(peer(name) for name in out)
    for what, argument in changes:
        change(registry, Draws(), what, argument, 1.0)
        kinds = {variant_of(each.hello) for each in registry}
        leading = registry.active_variant(MODEL)
        assert (leading in kinds) if kinds else leading is None
        if leading is None:
            assert registry.max_length(MODEL) == 0 and registry.uncovered_blocks(MODEL) == []
            continue

        def rank(kind: ModelVariant) -> tuple[bool, int]:
            servers = of_kind(registry, kind)
            return len(held(servers)) == BLOCKS, len(servers)

        assert rank(leading) == max(map(rank, kinds))
        servers = of_kind(registry, leading)
        assert list(registry.servers_of(MODEL, leading)) == servers
        assert registry.max_length(MODEL) == longest(servers)
        there = held(each for each in servers if each.hello.peer not in without)
        assert registry.uncovered_blocks(MODEL, without) == [
            b for b in range(BLOCKS) if b not in there
        ]
        for each in servers:
            first, last = span = each.hello.first, each.hello.last
            others = held(other for other in servers if other is not each)
            alone = [block for block in range(first, last) if block not in others]
            assert registry.sole_blocks_of(each.hello.peer) == alone
            equals = [s for s in servers if (s.hello.first, s.hello.last) == span]
            assert list(registry.replicas_of(each)) == equals


# ---- step times


SECONDS = st.sampled_from([0.00001, 0.0001, 0.01, 0.011, 0.012, 0.02, 0.2, 0.25, 4.0])
READ_BYTES = st.sampled_from([0.0, 1e6, 1.1e6, 3e6, 1e8])
COSTS = st.dictionaries(st.integers(0, 3), st.builds(StepCost, SECONDS, READ_BYTES), max_size=4)


@given(st.lists(st.tuples(NAMES, COSTS), min_size=1, max_size=30), st.frozensets(NAMES))
@example(
    [
        (0, as_costs({0: 0.01, 2: 0.01})),
        (1, as_costs({1: 1e-05, 3: 0.0001})),
    ],
    frozenset(),
)  # equal ratios
@settings(max_examples=300, deadline=None, derandomize=True)
def test_group_comparison_equals_one_by_one_comparison(
    costs_by_name: Sequence[tuple[int, CostBySize]], gone: frozenset[int]
) -> None:
    group, known = PeerGroup(), dict[str, CostBySize]()
    for name, costs in costs_by_name:
        if peer(name) not in known:
            group.add_peer(peer(name))
        group.set_costs(peer(name), costs, 0.0)
        known[peer(name)] = costs
    for name in gone & {int(each[1]) for each in known}:
        group.remove_peer(peer(name))
        del known[peer(name)]
    look = group.compare()
    for each, costs in known.items():
        row = group.peers.index(each)
        others = [those for other, those in known.items() if other != each]
        simple = compare_simply(costs, others)
        if simple is None:
            assert look.ratios[row] != look.ratios[row], (
                "NaN: there is no other server to compare with"
            )
        else:
            assert look.ratios[row] == simple.ratio
            assert look.deviations[row] == simple.deviations


@pytest.mark.parametrize(("left", "is_new"), [(5, False), (4, True)])
def test_table_of_mostly_empty_rows_is_made_anew(left: int, is_new: bool) -> None:
    servers = [Server(server(name, 0, 0, 0, 0)) for name in range(10)]
    table = CostTable(servers, ZoneDelays())
    for each in servers[left:]:
        table.remove_server(each.hello.peer)
    assert (table.apply_membership() is None) == is_new


def test_server_without_pages_announces_no_wait() -> None:
    bare = Server(replace(BASE, total_pages=0))
    assert bare.predicted_wait_ms(64, for_recovery=False) == 0.0
