"""What a fleet keeps up to date as servers come and go, against the simple way of working it out: the same, to the bit.

The servers are few here, so that hypothesis finds what is special about them; bench/route_choice.py has ten thousand.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core.fleets import IDLE, hello
from support.core.peer_comparison import compare_simply

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.peer_comparison import Alike, Times
from modelswarm_gateway.core.routing.cost_model import Needs, Pricing
from modelswarm_gateway.core.routing.path_search import Leg
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.server import Server
from modelswarm_gateway.core.servers.variant import Kind, kind_of

BLOCKS = 4
SPANS = [(0, 4), (0, 2), (2, 4), (1, 3), (0, 1), (3, 4), (1, 4)]
BASE = hello("s0")
MODEL, KIND = BASE.model, kind_of(BASE)


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
    st.tuples(st.just("beat"), st.tuples(NAMES, st.integers(0, 6), st.integers(0, 40))),
    st.tuples(st.just("blame"), NAMES),
    st.tuples(st.just("far"), NAMES),
    st.tuples(st.just("choose"), st.none()),
)
NEEDS = [
    Needs(length=64, positions=64),
    Needs(length=200, positions=2000),
    Needs(length=64, positions=64, repair=True, away_from=frozenset({"z1"})),
    Needs(length=64, positions=64, without=frozenset({"s0/1/b", "s3/1/b"})),
]


def peer(name: int) -> PeerId:
    return f"s{name}/1/b"


def change(fleet: Fleet, what: str, told: object, now: float) -> None:
    match what, told:
        case "join", Hello() as came:
            fleet.join(came, now)
        case "leave", int(name):
            fleet.leave(peer(name))
        case "beat", (int(name), int(running), int(free)):
            said = replace(IDLE, steps=int(10 * now), step_ms=5.0 + name, running=running)
            fleet.beat(peer(name), replace(said, free_pages=free), now)
        case "blame", int(name):
            fleet.blame(peer(name), "failed", now)
        case "far", int(name):
            fleet.round_trip(peer(name), 0.001 * (1 + name))
        case _:
            choices(fleet, fleet._pricing, now)


def choices(fleet: Fleet, pricing: Pricing, now: float) -> list[object]:
    """All that is asked of prices, with the same draws each time."""
    found: list[object] = []
    for needs in NEEDS:
        for blocks in ((0, 4), (1, 3)):
            for draw in (None, random.Random(7).random):
                legs = pricing.cover(
                    (MODEL, KIND),
                    lambda: fleet.of_kind(MODEL, KIND),
                    blocks,
                    ("s1/1/b", None),
                    needs,
                    now,
                    draw,
                )
                found.append(legs)
                if legs:
                    route = [(leg.peer, leg.first, leg.last) for leg in legs]
                    cost = pricing.cost((MODEL, KIND), lambda: [], route, now)
                    found.append(cost)
    return found


@given(st.lists(CHANGES, max_size=30))
@settings(max_examples=80, deadline=None)
def test_prices_that_follow_who_comes_and_goes_are_those_of_a_book_that_is_opened_anew(
    changes: Sequence[tuple[str, object]],
) -> None:
    fleet, now = Fleet(30.0, lambda: 0, lambda _: None), 1.0
    for number in range(4):
        fleet.join(server(number, number % 3, number % 3, 2, 0), now)
    choices(fleet, fleet._pricing, now)
    for what, told in changes:
        now += 0.01
        change(fleet, what, told, now)
    anew = Pricing(fleet.standing, 30.0)
    anew.zones = fleet._pricing.zones
    for _ in range(3):  # block times that are usual now count from the next choice on
        now += 0.1
        kept, fresh = choices(fleet, fleet._pricing, now), choices(fleet, anew, now)
    assert kept == fresh


@pytest.mark.parametrize("gone", [True, False])
def test_a_choice_right_after_a_link_went_or_came_knows_of_it_to_the_end_of_the_route(
    gone: bool,
) -> None:
    """Costs-to-go are kept for a moment, but not over that: the way behind a head would seem as cheap as it was."""
    fleet, now = Fleet(30.0, lambda: 0, lambda _: None), 1.0
    head, tail, whole = server(0, 1, 0, 0, 0), server(1, 2, 0, 0, 0), server(2, 0, 0, 0, 0)
    for each in (head, whole, *([tail] if gone else [])):
        fleet.join(each, now)
        running = 90 if each is whole else 0
        fleet.beat(each.peer, replace(IDLE, running=running), now)
    choices(fleet, fleet._pricing, now)
    if gone:
        fleet.leave(tail.peer)
    else:
        fleet.join(tail, now)
    legs = cheapest(fleet, now)
    assert [leg.peer for leg in legs] == [head.peer, whole.peer if gone else tail.peer]
    route = [(leg.peer, leg.first, leg.last) for leg in legs]
    assert legs[0].to_go_ms == pytest.approx(fleet.cost(MODEL, KIND, route, now))


def test_a_book_takes_in_many_servers_and_loses_them_all() -> None:
    fleet, count = Fleet(30.0, lambda: 0, lambda _: None), 100
    for number in range(count):
        fleet.join(server(number, 0, 0, 0, 0))
        [leg] = cheapest(fleet, float(number))
        assert leg.options == number + 1
    for number in range(count):
        fleet.leave(peer(number))
        legs = cheapest(fleet, float(count + number))
        left = count - number - 1
        assert [leg.options for leg in legs] == ([left] if left else [])
        assert all(leg.peer != peer(number) for leg in legs)


def cheapest(fleet: Fleet, now: float) -> Sequence[Leg]:
    found = fleet.cover(
        MODEL, KIND, (0, 4), now, between=(None, None), needs=NEEDS[0], cheapest=True
    )
    return found or []


# ---- who holds what


def of_kind(fleet: Fleet, kind: Kind) -> list[Server]:
    return [each for each in fleet if kind_of(each.hello) == kind]


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
@settings(max_examples=200, deadline=None)
def test_what_servers_hold_is_known_without_a_walk_over_all_of_them(
    changes: Sequence[tuple[str, object]], out: frozenset[int]
) -> None:
    fleet = Fleet(30.0, lambda: 0, lambda _: None)
    without = frozenset(peer(name) for name in out)
    for what, told in changes:
        change(fleet, what, told, 1.0)
        kinds = {kind_of(each.hello) for each in fleet}
        leading = fleet.leading(MODEL)
        assert (leading in kinds) if kinds else leading is None
        if leading is None:
            assert fleet.max_length(MODEL) == 0 and fleet.uncovered(MODEL) == []
            continue

        def rank(kind: Kind) -> tuple[bool, int]:
            servers = of_kind(fleet, kind)
            return len(held(servers)) == BLOCKS, len(servers)

        assert rank(leading) == max(map(rank, kinds))
        servers = of_kind(fleet, leading)
        assert list(fleet.of_kind(MODEL, leading)) == servers
        assert fleet.max_length(MODEL) == longest(servers)
        there = held(each for each in servers if each.hello.peer not in without)
        assert fleet.uncovered(MODEL, without) == [b for b in range(BLOCKS) if b not in there]
        for each in servers:
            first, last = span = each.hello.first, each.hello.last
            others = held(other for other in servers if other is not each)
            alone = [block for block in range(first, last) if block not in others]
            assert fleet.only_there(each.hello.peer) == alone
            equals = [s for s in servers if (s.hello.first, s.hello.last) == span]
            assert list(fleet.equals(each)) == equals


# ---- how fast they are


SECONDS = st.sampled_from([0.00001, 0.0001, 0.01, 0.011, 0.012, 0.02, 0.2, 0.25, 4.0])
TIMES = st.dictionaries(st.integers(0, 3), SECONDS, max_size=4)


@given(st.lists(st.tuples(NAMES, TIMES), min_size=1, max_size=30), st.frozensets(NAMES))
@settings(max_examples=300, deadline=None)
def test_all_servers_at_once_are_compared_as_each_with_its_others(
    told: Sequence[tuple[int, Times]], gone: frozenset[int]
) -> None:
    group, known = Alike(), dict[str, Times]()
    for name, times in told:
        if peer(name) not in known:
            group.add(peer(name))
        group.put(peer(name), times, 0.0)
        known[peer(name)] = times
    for name in gone & {int(each[1]) for each in known}:
        group.remove(peer(name))
        del known[peer(name)]
    look = group.look()
    for each, times in known.items():
        row = group.peers.index(each)
        others = [those for other, those in known.items() if other != each]
        simple = compare_simply(times, others)
        if simple is None:
            assert look.ratios[row] != look.ratios[row], "NaN: there is nobody to be compared with"
        else:
            assert look.ratios[row] == simple.ratio
            assert look.deviations[row] == simple.deviations
