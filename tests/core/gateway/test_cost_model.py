"""What makes a server dearer than its equal, and how evenly gateways load equal servers that they share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest
from support.core.fleets import IDLE, cover, fleet_of, hello, place

from bench.load_gini import gini
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Beat
from modelswarm_gateway.core.routing.cost_model import Needs, Price
from modelswarm_gateway.core.routing.cost_table import SWEPT
from modelswarm_gateway.core.routing.server_registry import Fleet
from modelswarm_gateway.core.servers.health import EJECTION
from modelswarm_gateway.core.servers.server import NOISE_MS, ROWS_PER_SESSION

A, B = hello("a"), hello("b")
CHOICES = 60
WORSE_MS = 100.0  # farther, or more to wait: some twelve steps


def pair() -> Fleet:
    """Two servers that hold the same blocks and do equally well."""
    fleet = fleet_of(A, B)
    for each in (A, B):
        fleet.beat(each.peer, IDLE, 0.0)
    return fleet


def prices(fleet: Fleet, now: float) -> tuple[Price, Price]:
    servers = [fleet.get(each.peer) for each in (A, B)]
    one, other = (fleet.price(server, now) for server in servers if server is not None)
    return one, other


def taken(fleet: Fleet, now: float) -> Counter[PeerId]:
    return Counter(place(fleet, A, now) for _ in range(CHOICES))


@pytest.mark.parametrize("what", ["faults", "slow"])
def test_a_server_that_does_badly_is_dearer_by_as_much_and_gets_clearly_less(what: str) -> None:
    """Its blocks and its hop: a server that is asked for one block only costs more as well."""
    fleet, now = pair(), 2 * EJECTION
    if what == "faults":
        fleet.blame(B.peer, "failed", 0.0)
        fleet.served([B.peer], now)  # by its canary: it is no longer on trial
    else:
        fleet.compared(B.peer, 4.0)
    well, badly = prices(fleet, now)
    assert not badly.last_resort and not badly.standing.canary
    score = badly.standing.score
    assert well.standing.score == 1.0 and score <= 1 / 1.5
    assert badly.block_ms == pytest.approx(well.block_ms / score)
    assert badly.hop_ms == pytest.approx(well.hop_ms / score)
    found = taken(fleet, now)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "dear, not banned"


def test_the_wait_for_kv_is_divided_by_health_as_all_that_a_server_costs() -> None:
    """Its pages come free when its sessions get on; the way between two zones is no matter of its health."""
    fleet, now, needs = pair(), 2 * EJECTION, Needs(length=64, positions=64)
    fleet.blame(B.peer, "failed", 0.0)
    fleet.served([B.peer], now)
    for each in (A, B):
        fleet.beat(each.peer, replace(IDLE, free_pages=0), now)
    cover(fleet, A, now)  # from then on it is known what is usual
    waits = []
    for each, other, price in zip((A, B), (B, A), prices(fleet, now), strict=True):
        server = fleet.get(each.peer)
        assert server is not None and price.score == price.standing.score
        alone = replace(needs, without=frozenset({other.peer}))
        [leg] = cover(fleet, each, now, alone, cheapest=True)
        waits.append(leg.to_go_ms - price.hop_ms - 4 * price.block_ms)
        assert waits[-1] == pytest.approx(server.wait_ms(64, repair=False) / price.score)
    assert waits[1] > 1.5 * waits[0] > 0


def test_pages_that_come_free_at_the_far_end_count_at_the_next_choice() -> None:
    """Nothing else has changed there: costs-to-go are computed again for that alone."""
    head = hello("head", 0, 2)
    tails = [hello("t0", 2, 4), hello("t1", 2, 4)]
    needs = Needs(length=64, positions=1500 * head.page_size)
    fleet = fleet_of(head, *tails)
    for each, free in zip((head, *tails), (2560, 1000, 1000), strict=True):
        fleet.beat(each.peer, replace(IDLE, steps=0, free_pages=free), 0.0)
    before = cover(fleet, head, 1.0, needs, cheapest=True)[0].to_go_ms
    fleet.beat(tails[1].peer, replace(IDLE, steps=0, free_pages=2000), 2.0)
    after = cover(fleet, head, 2.0, needs, cheapest=True)[0].to_go_ms
    assert before > 1000.0 > after


def test_a_server_without_a_fault_is_as_dear_as_its_equal_and_gets_as_much() -> None:
    fleet = pair()
    one, other = prices(fleet, 1.0)
    assert one == other
    assert set(taken(fleet, 1.0).values()) == {CHOICES // 2}


def test_a_canary_costs_what_is_usual_whatever_its_last_steps_were() -> None:
    """It was frozen in one of them."""
    fleet = pair()
    fleet.blame(B.peer, "silent", 0.0)
    frozen = replace(IDLE, steps=IDLE.steps + 1, step_ms=50 * IDLE.step_ms)
    now = 2 * EJECTION
    fleet.beat(B.peer, frozen, now)
    well, canary = prices(fleet, now)
    assert canary.standing.canary
    assert canary.block_ms <= well.block_ms
    assert taken(fleet, now)[B.peer] == 1, "and then none until that one has a token"


@pytest.mark.parametrize("what", ["far", "queue"])
def test_a_server_that_is_far_or_has_a_queue_is_dearer_and_gets_clearly_less(what: str) -> None:
    """By half of the round trip that it is farther; by what its rows wait beyond the step that they cannot join."""
    fleet = pair()
    if what == "far":
        for _ in range(3):
            fleet.round_trip(B.peer, 0.03 + 2 * WORSE_MS / 1000)
            fleet.round_trip(A.peer, 0.03)
    else:
        fleet.beat(B.peer, replace(IDLE, oldest_ready_ms=IDLE.step_ms + WORSE_MS), 0.0)
    well, badly = prices(fleet, 0.0)
    said = {"far": badly.far_ms, "queue": badly.queue_ms}
    assert said.pop(what) == pytest.approx(WORSE_MS, abs=NOISE_MS) and set(said.values()) == {0.0}
    assert badly.hop_ms - well.hop_ms == pytest.approx(WORSE_MS, abs=NOISE_MS)
    assert badly.block_ms == well.block_ms
    found = taken(fleet, 0.0)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "dear, not banned"


def tried(fleet: Fleet) -> None:
    """It was at fault a while ago, and now has its canary."""
    fleet.blame(A.peer, "overdue", 1.0 - 2 * EJECTION)
    fleet.placed(A.peer, 64, 5)


Change = Callable[[Fleet], None]
CHANGES: dict[str, tuple[Change, Change | None]] = {
    "placed": (
        lambda f: f.placed(A.peer, 64, int(8.5 * ROWS_PER_SESSION)),
        lambda f: f.freed(A.peer),
    ),
    "beat": (
        lambda f: f.beat(A.peer, replace(IDLE, running=30), 1.0),
        lambda f: f.beat(A.peer, IDLE, 1.0),
    ),
    "suspected": (lambda f: f.suspect(frozenset({A.peer})), lambda f: f.suspect(frozenset())),
    "left": (lambda f: f.leave_alone(A.peer, "x"), lambda f: f.use_again(A.peer, "x")),
    "slow": (lambda f: f.compared(A.peer, 20.0), lambda f: f.compared(A.peer, 1.0)),
    "served": (tried, lambda f: f.served([A.peer], 1.0)),
    "rests": (tried, lambda f: f.rests({A.peer: 1})),
    "blamed": (lambda f: f.blame(A.peer, "overdue", 1.0), None),
    "far": (lambda f: f.round_trip(A.peer, 0.5), None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_at_one_of_very_many_servers_counts_at_the_next_choice(what: str) -> None:
    """More than are priced again at every choice, in turn."""
    many = [hello(f"s{number}") for number in range(8 * SWEPT)]
    fleet = fleet_of(A, *many)
    fleet.round_trip(many[0].peer, 0.03)  # this is how far all are
    for each in (A, *many):
        fleet.beat(each.peer, replace(IDLE, running=0 if each is A else 9), 1.0)

    def best() -> PeerId:
        return cover(fleet, A, 1.0, cheapest=True)[0].peer

    assert best() == A.peer
    worse, well_again = CHANGES[what]
    worse(fleet)
    assert best() != A.peer
    if well_again is not None:
        well_again(fleet)
        assert best() == A.peer


# ---- several gateways


GATEWAYS, SESSIONS = 4, 80
WAVES = 4  # a beat of every server comes before each of them; nobody hears of the others' sessions meanwhile
SERVERS = [hello(f"s{number}") for number in range(8)]


def beat(wave: int, number: int) -> Beat:
    """All idle, and as good as equal: what their last steps took differs by less than two of a hundred."""
    return replace(IDLE, steps=5 * (1 + wave), step_ms=IDLE.step_ms * (1 + 0.002 * number))


def herding(seed: int, *, cheapest: bool = False, forgetful: bool = False) -> float:
    """The Gini coefficient of what eight servers get of the sessions of four gateways.

    `cheapest`: nobody draws; `forgetful`: nobody counts what it has placed itself since the last beat.
    """
    bits = random.Random(seed).getrandbits
    fleets = [fleet_of(*SERVERS, draw=lambda: bits(64)) for _ in range(GATEWAYS)]
    got: Counter[PeerId] = Counter()
    for wave in range(WAVES):
        for fleet in fleets:
            for number, server in enumerate(SERVERS):
                fleet.beat(server.peer, beat(wave, number), float(wave))
        for fleet in fleets * (SESSIONS // WAVES // GATEWAYS):
            if forgetful:
                [leg] = cover(fleet, SERVERS[0], float(wave), cheapest=cheapest)
                got[leg.peer] += 1
            else:
                got[place(fleet, SERVERS[0], float(wave), cheapest=cheapest)] += 1
    return gini([got[server.peer] for server in SERVERS])


def test_gateways_that_know_the_same_old_beats_do_not_all_take_the_same_servers() -> None:
    """Whoever takes the cheapest, by the same prices as the others, takes what they take: that is a herd."""
    assert mean(herding(seed) for seed in range(8)) <= 0.15
    assert herding(0, cheapest=True) > 0.3
    assert herding(0, cheapest=True, forgetful=True) > 0.8
    assert mean(herding(seed, forgetful=True) for seed in range(8)) > 0.15
