"""Costs of a server that differs from its replica, and the balance of several gateways over shared servers."""

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
from modelswarm_gateway.core.routing.cost_model import CACHE_SECONDS, HopCost, Needs
from modelswarm_gateway.core.routing.cost_table import UPDATES_PER_CHOICE
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.health import BASE_EJECTION_TIME
from modelswarm_gateway.core.servers.server import ROWS_PER_SESSION, RTT_NOISE_MS

A, B = hello("a"), hello("b")
CHOICES = 60
WORSE_MS = 100.0  # of additional distance or wait: about twelve steps


def pair() -> ServerRegistry:
    """Return a registry of two servers that hold the same blocks and are equally healthy."""
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
def test_unhealthy_server_costs_more_and_gets_fewer_sessions(what: str) -> None:
    """Health divides the costs of blocks and of the hop, so a server with one block only costs more as well."""
    registry, now = pair(), 2 * BASE_EJECTION_TIME
    if what == "faults":
        registry.eject(B.peer, "failed", 0.0)
        registry.on_token([B.peer], now)  # of its canary: it is healthy again
    else:
        registry.set_slowness(B.peer, 4.0)
    well, badly = prices(registry, now)
    assert not badly.last_resort and not badly.status.canary
    score = badly.status.score
    assert well.status.score == 1.0 and score <= 1 / 1.5
    assert badly.block_ms == pytest.approx(well.block_ms / score)
    assert badly.hop_ms == pytest.approx(well.hop_ms / score)
    found = taken(registry, now)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "expensive, not banned"


def test_predicted_kv_wait_is_divided_by_health() -> None:
    """Pages are freed as sessions progress, so the wait depends on health. The distance between zones does not."""
    registry, now, needs = pair(), 2 * BASE_EJECTION_TIME, Needs(max_length=64, kv_positions=64)
    registry.eject(B.peer, "failed", 0.0)
    registry.on_token([B.peer], now)
    for each in (A, B):
        registry.on_heartbeat(each.peer, replace(IDLE, free_pages=0), now)
    cover(registry, A, now)  # from then on the median block time is known
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


def test_freed_pages_of_a_tail_count_at_next_choice() -> None:
    """Nothing else has changed there: this change alone makes the costs-to-go be computed again."""
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


def test_equal_servers_cost_and_get_the_same() -> None:
    registry = pair()
    one, other = prices(registry, 1.0)
    assert one == other
    assert set(taken(registry, 1.0).values()) == {CHOICES // 2}


def test_canary_is_priced_as_healthy_despite_last_step_time() -> None:
    """The server froze during one of these steps."""
    registry = pair()
    registry.eject(B.peer, "silent", 0.0)
    frozen = replace(IDLE, steps=IDLE.steps + 1, step_ms=50 * IDLE.step_ms)
    now = 2 * BASE_EJECTION_TIME
    registry.on_heartbeat(B.peer, frozen, now)
    well, canary = prices(registry, now)
    assert canary.status.canary
    assert canary.block_ms <= well.block_ms
    assert taken(registry, now)[B.peer] == 1, "no second session before a token of the canary"


@pytest.mark.parametrize("what", ["far", "queue"])
def test_far_or_queued_server_costs_more_and_gets_less(what: str) -> None:
    """Half of the longer round trip counts, and the wait of rows beyond the step that they cannot join."""
    registry = pair()
    if what == "far":
        for _ in range(3):
            registry.record_round_trip(B.peer, 0.03 + 2 * WORSE_MS / 1000)
            registry.record_round_trip(A.peer, 0.03)
    else:
        registry.on_heartbeat(B.peer, replace(IDLE, oldest_ready_ms=IDLE.step_ms + WORSE_MS), 0.0)
    well, badly = prices(registry, 0.0)
    assert badly.queue_ms == (WORSE_MS if what == "queue" else 0.0)
    assert badly.hop_ms - well.hop_ms == pytest.approx(WORSE_MS, abs=RTT_NOISE_MS)
    assert badly.block_ms == well.block_ms
    found = taken(registry, 0.0)
    assert found[A.peer] > 1.5 * found[B.peer] > 0, "expensive, not banned"


def tried(registry: ServerRegistry) -> None:
    """Give server A an old fault, and its canary now."""
    registry.eject(A.peer, "overdue", 1.0 - 2 * BASE_EJECTION_TIME)
    registry.add_hop(A.peer, 64, 5)


Change = Callable[[ServerRegistry], None]
CHANGES: dict[str, tuple[Change, Change | None]] = {
    "placed": (
        lambda f: f.add_hop(A.peer, 64, int(8.5 * ROWS_PER_SESSION)),
        lambda f: f.remove_hop(A.peer),
    ),
    "heartbeat": (
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
    "ejected": (lambda f: f.eject(A.peer, "overdue", 1.0), None),
    "far": (lambda f: f.record_round_trip(A.peer, 0.5), None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_change_at_one_of_many_servers_counts_at_next_choice(what: str) -> None:
    """There are more servers than one choice updates in turn."""
    many = [hello(f"s{number}") for number in range(8 * UPDATES_PER_CHOICE)]
    registry = registry_of(A, *many)
    registry.record_round_trip(many[0].peer, 0.03)  # the distance of all servers
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


def test_cached_costs_to_go_are_used_for_a_while() -> None:
    registry = pair()
    needs = Needs(max_length=64)
    [first] = cover(registry, A, 100.0, needs, cheapest=True)
    registry.add_hop(first.peer, 64, 0)
    found = []
    for later in (0.0, 0.5 * CACHE_SECONDS, 2 * CACHE_SECONDS):
        [table] = registry.costs._tables.values()
        cover(registry, A, 100.0 + later, needs, cheapest=True)
        found.append(table.refreshed_at)
    assert found == [100.0, 100.0, 100.0 + 2 * CACHE_SECONDS]


def test_variant_without_servers_leaves_no_cost_table() -> None:
    """Swarms come and go under new names: each left some 25 KB, and more with cached costs-to-go."""
    registry = pair()
    cover(registry, A, 100.0)
    registry.deregister(A.peer)
    assert cover(registry, B, 101.0), "its replica goes on"
    registry.deregister(B.peer)
    assert not registry.costs._tables and not registry.costs._changed


def test_table_is_kept_for_a_server_that_reconnects() -> None:
    registry = pair()
    cover(registry, A, 100.0)
    registry.deregister(A.peer)
    assert registry.register(A)
    registry.deregister(B.peer)
    assert [leg.peer for leg in cover(registry, A, 101.0)] == [A.peer]


# ---- several gateways


GATEWAYS, SESSIONS = 4, 80
WAVES = 4  # a heartbeat of every server precedes each; between two, no gateway learns of the others' sessions
SERVERS = [hello(f"s{number}") for number in range(8)]


def idle_heartbeat(wave: int, number: int) -> Heartbeat:
    """Return the heartbeat of an idle server. The step times of all servers differ by less than two percent."""
    return replace(IDLE, steps=5 * (1 + wave), step_ms=IDLE.step_ms * (1 + 0.002 * number))


def herding(seed: int, *, cheapest: bool = False, forgetful: bool = False) -> float:
    """Return the Gini coefficient of the sessions that eight servers get from four gateways.

    `cheapest`: no gateway draws at random. `forgetful`: no gateway counts its own sessions since the last heartbeat.
    """
    bits = random.Random(seed).getrandbits
    fleets = [registry_of(*SERVERS, draw=lambda: bits(64)) for _ in range(GATEWAYS)]
    got: Counter[PeerId] = Counter()
    for wave in range(WAVES):
        for registry in fleets:
            for number, server in enumerate(SERVERS):
                registry.on_heartbeat(server.peer, idle_heartbeat(wave, number), float(wave))
        for registry in fleets * (SESSIONS // WAVES // GATEWAYS):
            if forgetful:
                [leg] = cover(registry, SERVERS[0], float(wave), cheapest=cheapest)
                got[leg.peer] += 1
            else:
                got[place(registry, SERVERS[0], float(wave), cheapest=cheapest)] += 1
    return gini_coefficient([got[server.peer] for server in SERVERS])


def test_gateways_with_same_heartbeats_spread_their_sessions() -> None:
    """Gateways that all take the cheapest server by the same costs take the same one: that is herding."""
    assert mean(herding(seed) for seed in range(8)) <= 0.15
    assert herding(0, cheapest=True) > 0.3
    assert herding(0, cheapest=True, forgetful=True) > 0.8
    assert mean(herding(seed, forgetful=True) for seed in range(8)) > 0.15
