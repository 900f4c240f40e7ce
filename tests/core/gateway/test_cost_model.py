"""What makes a server dearer than its equal, and how evenly gateways load equal servers that they share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest
from support.core.fleets import IDLE, cover, hello, place, registry_of

from bench.routing.load_gini import gini_coefficient
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.core.routing.cost_model import HopCost, Needs
from modelswarm_gateway.core.routing.cost_table import UPDATES_PER_CHOICE
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.health import BASE_EJECTION_TIME
from modelswarm_gateway.core.servers.server import ROWS_PER_SESSION, RTT_NOISE_MS

A, B = hello("a"), hello("b")
CHOICES = 60
WORSE_MS = 100.0  # farther, or more to wait: some twelve steps


def pair() -> ServerRegistry:
    """Two servers that hold the same blocks and do equally well."""
    registry = registry_of(A, B)
    for each in (A, B):
        registry.on_heartbeat(each.peer, IDLE, 0.0)
    return registry


def prices(registry: ServerRegistry, now: float) -> tuple[HopCost, HopCost]:
    servers = [registry.find_server(each.peer) for each in (A, B)]
    one, other = (registry.costs.hop_cost(server, now) for server in servers if server is not None)
    return one, other


def taken(registry: ServerRegistry, now: float) -> Counter[PeerId]:
    return Counter(place(registry, A, now) for _ in range(CHOICES))


@pytest.mark.parametrize("what", ["faults", "slow"])
def test_a_server_that_does_badly_is_dearer_by_as_much_and_gets_clearly_less(what: str) -> None:
    """Its blocks and its hop: a server that is asked for one block only costs more as well."""
    registry, now = pair(), 2 * BASE_EJECTION_TIME
    if what == "faults":
        registry.eject(B.peer, "failed", 0.0)
        registry.on_token([B.peer], now)  # by its canary: it is no longer on trial
    else:
        registry.set_slowness(B.peer, 4.0)
    well, badly = prices(registry, now)
    assert not badly.last_resort and not badly.status.canary
    score = badly.status.score
    assert well.status.score == 1.0 and score <= 1 / 1.5
    assert badly.block_ms == pytest.approx(well.block_ms / score)
    assert badly.hop_ms == pytest.approx(well.hop_ms / score)
    found = taken(registry, now)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "dear, not banned"


def test_the_wait_for_kv_is_divided_by_health_as_all_that_a_server_costs() -> None:
    """Its pages come free when its sessions get on; the way between two zones is no matter of its health."""
    registry, now, needs = pair(), 2 * BASE_EJECTION_TIME, Needs(max_length=64, kv_positions=64)
    registry.eject(B.peer, "failed", 0.0)
    registry.on_token([B.peer], now)
    for each in (A, B):
        registry.on_heartbeat(each.peer, replace(IDLE, free_pages=0), now)
    cover(registry, A, now)  # from then on it is known what is usual
    waits = []
    for each, other, price in zip((A, B), (B, A), prices(registry, now), strict=True):
        server = registry.find_server(each.peer)
        assert server is not None and price.score == price.status.score
        alone = replace(needs, excluded=frozenset({other.peer}))
        [leg] = cover(registry, each, now, alone, cheapest=True)
        waits.append(leg.cost_to_go_ms - price.hop_ms - 4 * price.block_ms)
        assert waits[-1] == pytest.approx(
            server.predicted_wait_ms(64, for_recovery=False) / price.score
        )
    assert waits[1] > 1.5 * waits[0] > 0


def test_pages_that_come_free_at_the_far_end_count_at_the_next_choice() -> None:
    """Nothing else has changed there: costs-to-go are computed again for that alone."""
    head = hello("head", 0, 2)
    tails = [hello("t0", 2, 4), hello("t1", 2, 4)]
    needs = Needs(max_length=64, kv_positions=1500 * head.page_size)
    registry = registry_of(head, *tails)
    for each, free in zip((head, *tails), (2560, 1000, 1000), strict=True):
        registry.on_heartbeat(each.peer, replace(IDLE, steps=0, free_pages=free), 0.0)
    before = cover(registry, head, 1.0, needs, cheapest=True)[0].cost_to_go_ms
    registry.on_heartbeat(tails[1].peer, replace(IDLE, steps=0, free_pages=2000), 2.0)
    after = cover(registry, head, 2.0, needs, cheapest=True)[0].cost_to_go_ms
    assert before > 1000.0 > after


def test_a_server_without_a_fault_is_as_dear_as_its_equal_and_gets_as_much() -> None:
    registry = pair()
    one, other = prices(registry, 1.0)
    assert one == other
    assert set(taken(registry, 1.0).values()) == {CHOICES // 2}


def test_a_canary_costs_what_is_usual_whatever_its_last_steps_were() -> None:
    """It was frozen in one of them."""
    registry = pair()
    registry.eject(B.peer, "silent", 0.0)
    frozen = replace(IDLE, steps=IDLE.steps + 1, step_ms=50 * IDLE.step_ms)
    now = 2 * BASE_EJECTION_TIME
    registry.on_heartbeat(B.peer, frozen, now)
    well, canary = prices(registry, now)
    assert canary.status.canary
    assert canary.block_ms <= well.block_ms
    assert taken(registry, now)[B.peer] == 1, "and then none until that one has a token"


@pytest.mark.parametrize("what", ["far", "queue"])
def test_a_server_that_is_far_or_has_a_queue_is_dearer_and_gets_clearly_less(what: str) -> None:
    """By half of the round trip that it is farther; by what its rows wait beyond the step that they cannot join."""
    registry = pair()
    if what == "far":
        for _ in range(3):
            registry.record_round_trip(B.peer, 0.03 + 2 * WORSE_MS / 1000)
            registry.record_round_trip(A.peer, 0.03)
    else:
        registry.on_heartbeat(B.peer, replace(IDLE, oldest_ready_ms=IDLE.step_ms + WORSE_MS), 0.0)
    well, badly = prices(registry, 0.0)
    said = {"far": badly.distance_ms, "queue": badly.queue_ms}
    assert said.pop(what) == pytest.approx(WORSE_MS, abs=RTT_NOISE_MS) and set(said.values()) == {
        0.0
    }
    assert badly.hop_ms - well.hop_ms == pytest.approx(WORSE_MS, abs=RTT_NOISE_MS)
    assert badly.block_ms == well.block_ms
    found = taken(registry, 0.0)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "dear, not banned"


def tried(registry: ServerRegistry) -> None:
    """It was at fault a while ago, and now has its canary."""
    registry.eject(A.peer, "overdue", 1.0 - 2 * BASE_EJECTION_TIME)
    registry.add_hop(A.peer, 64, 5)


Change = Callable[[ServerRegistry], None]
CHANGES: dict[str, tuple[Change, Change | None]] = {
    "placed": (
        lambda f: f.add_hop(A.peer, 64, int(8.5 * ROWS_PER_SESSION)),
        lambda f: f.remove_hop(A.peer),
    ),
    "beat": (
        lambda f: f.on_heartbeat(A.peer, replace(IDLE, running=30), 1.0),
        lambda f: f.on_heartbeat(A.peer, IDLE, 1.0),
    ),
    "suspected": (
        lambda f: f.set_suspected(frozenset({A.peer})),
        lambda f: f.set_suspected(frozenset()),
    ),
    "left": (lambda f: f.drain(A.peer, "x"), lambda f: f.undrain(A.peer, "x")),
    "slow": (lambda f: f.set_slowness(A.peer, 20.0), lambda f: f.set_slowness(A.peer, 1.0)),
    "served": (tried, lambda f: f.on_token([A.peer], 1.0)),
    "rests": (tried, lambda f: f.set_idle_hops({A.peer: 1})),
    "blamed": (lambda f: f.eject(A.peer, "overdue", 1.0), None),
    "far": (lambda f: f.record_round_trip(A.peer, 0.5), None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_at_one_of_very_many_servers_counts_at_the_next_choice(what: str) -> None:
    """More than are priced again at every choice, in turn."""
    many = [hello(f"s{number}") for number in range(8 * UPDATES_PER_CHOICE)]
    registry = registry_of(A, *many)
    registry.record_round_trip(many[0].peer, 0.03)  # this is how far all are
    for each in (A, *many):
        registry.on_heartbeat(each.peer, replace(IDLE, running=0 if each is A else 9), 1.0)

    def best() -> PeerId:
        return cover(registry, A, 1.0, cheapest=True)[0].peer

    assert best() == A.peer
    worse, well_again = CHANGES[what]
    worse(registry)
    assert best() != A.peer
    if well_again is not None:
        well_again(registry)
        assert best() == A.peer


# ---- several gateways


GATEWAYS, SESSIONS = 4, 80
WAVES = 4  # a beat of every server comes before each of them; nobody hears of the others' sessions meanwhile
SERVERS = [hello(f"s{number}") for number in range(8)]


def beat(wave: int, number: int) -> Heartbeat:
    """All idle, and as good as equal: what their last steps took differs by less than two of a hundred."""
    return replace(IDLE, steps=5 * (1 + wave), step_ms=IDLE.step_ms * (1 + 0.002 * number))


def herding(seed: int, *, cheapest: bool = False, forgetful: bool = False) -> float:
    """The Gini coefficient of what eight servers get of the sessions of four gateways.

    `cheapest`: nobody draws; `forgetful`: nobody counts what it has placed itself since the last beat.
    """
    bits = random.Random(seed).getrandbits
    fleets = [registry_of(*SERVERS, draw=lambda: bits(64)) for _ in range(GATEWAYS)]
    got: Counter[PeerId] = Counter()
    for wave in range(WAVES):
        for registry in fleets:
            for number, server in enumerate(SERVERS):
                registry.on_heartbeat(server.peer, beat(wave, number), float(wave))
        for registry in fleets * (SESSIONS // WAVES // GATEWAYS):
            if forgetful:
                [leg] = cover(registry, SERVERS[0], float(wave), cheapest=cheapest)
                got[leg.peer] += 1
            else:
                got[place(registry, SERVERS[0], float(wave), cheapest=cheapest)] += 1
    return gini_coefficient([got[server.peer] for server in SERVERS])


def test_gateways_that_know_the_same_old_beats_do_not_all_take_the_same_servers() -> None:
    """Whoever takes the cheapest, by the same prices as the others, takes what they take: that is a herd."""
    assert mean(herding(seed) for seed in range(8)) <= 0.15
    assert herding(0, cheapest=True) > 0.3
    assert herding(0, cheapest=True, forgetful=True) > 0.8
    assert mean(herding(seed, forgetful=True) for seed in range(8)) > 0.15
