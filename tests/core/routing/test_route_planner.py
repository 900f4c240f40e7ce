"""Servers that a session gets, keeps and leaves: load, ejection, failure domains, affinity."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.core.fleets import IDLE, cover, hello, place, registry_of
from support.core.gateway import TWICE, Swarm, swarm_of
from support.core.server import MODEL, Server, expected

from modelswarm.protocol.identity import Adapter, Address, Epoch, PeerId
from modelswarm.protocol.messages import Grammar, Heartbeat, Hello, Sampling, Turn
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.recovery import route_planner
from modelswarm_gateway.core.recovery.route_planner import RoutePlanner, can_replace
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.ring_search import find_ring
from modelswarm_gateway.core.servers.server import RECOVERY_RESERVE
from modelswarm_gateway.core.servers.variant import variant_of, variants_of
from modelswarm_gateway.core.sessions.session import Hop, Session, SessionState
from modelswarm_serving.core.kv.admission import Admission
from modelswarm_serving.model.base import ModelShape

PROMPT = [5, 6, 7, 8, 9]


def start(swarm: Swarm, session: str, new: int | None = 3) -> list[PeerId]:
    swarm.gateway.clear_and_start(session, PROMPT, new)
    return swarm.gateway.route(session)


def send_heartbeat(swarm: Swarm, server: Server, **fields: object) -> None:
    """Send a heartbeat of the server in which the given fields are replaced."""
    heartbeat = replace(server.core.heartbeat(), **fields)  # type: ignore[arg-type]
    swarm.core.receive(server.peer, heartbeat, swarm.now)


def test_replicas_share_sessions_evenly() -> None:
    swarm = swarm_of(*TWICE)
    taken = Counter(peer for n in range(16) for peer in start(swarm, f"a{n}"))
    assert len(taken) == 4
    assert all(6 <= count <= 10 for count in taken.values())


def test_busy_server_gets_no_session_while_replica_is_idle() -> None:
    swarm = Swarm()
    busy, idle = swarm.serve(0, 4), swarm.serve(0, 4)
    for n in range(6):
        send_heartbeat(swarm, busy, running=40)
        send_heartbeat(swarm, idle, running=n)
        assert start(swarm, f"a{n}") == [idle.peer]


def test_full_server_gets_no_session_while_replica_has_pages() -> None:
    swarm = Swarm()
    full, other = swarm.serve(0, 4), swarm.serve(0, 4)
    for n in range(6):
        send_heartbeat(swarm, full, free_pages=1)
        assert start(swarm, f"a{n}") == [other.peer]


def test_recovery_prefers_another_failure_domain() -> None:
    for seed in range(4):
        swarm = Swarm()
        swarm.serve(0, 2)
        servers = [swarm.serve(2, 4, {"zone": zone}) for zone in ("east", "east", "west", "west")]
        zones = {server.peer: server.hello.zone for server in servers}
        for n in range(seed):
            start(swarm, f"b{n}")
        swarm.gateway.start("a", PROMPT, 20, ahead=4)
        lost = swarm.gateway.route("a")[1]
        swarm.kill(lost)
        assert zones[swarm.gateway.route("a")[1]] != zones[lost]
        swarm.gateway.read("a", 1 << 40)
        assert swarm.gateway.tokens("a") == expected(PROMPT, 20)


def test_recovery_uses_lost_domain_if_it_has_the_only_server() -> None:
    swarm = Swarm()
    server = swarm.serve(0, 4, {"zone": "east"})
    legs = swarm.core._registry.costs.choose_hops(
        MODEL,
        variant_of(server.hello),
        (0, 4),
        swarm.now,
        between=(None, None),
        needs=Needs(for_recovery=True, lost_domains=frozenset({"east"})),
    )
    assert legs is not None and legs[0].peer == server.peer


def test_session_keeps_healthy_route_between_turns() -> None:
    swarm = swarm_of(*TWICE)
    kept = start(swarm, "a")
    log = [*PROMPT, *swarm.gateway.tokens("a")]
    for n in range(4):
        start(swarm, f"b{n}")
        swarm.gateway.clear_and_start("a", [*log, 3], 3)
        log = [*log, 3, *swarm.gateway.tokens("a")]
        assert swarm.gateway.route("a") == kept


def test_new_turn_leaves_server_without_free_pages() -> None:
    swarm = Swarm()
    one, other = swarm.serve(0, 4), swarm.serve(0, 4)
    [kept] = start(swarm, "a")
    log = [*PROMPT, *swarm.gateway.tokens("a"), 3]
    full, free = (one, other) if kept == one.peer else (other, one)
    send_heartbeat(swarm, full, free_pages=0)
    swarm.gateway.clear_and_start("a", log, 60)
    assert swarm.gateway.route("a") == [free.peer]
    assert swarm.gateway.tokens("a") == expected(log, 60)


def test_new_turn_stays_if_no_replica_has_free_pages() -> None:
    swarm = Swarm()
    one, other = swarm.serve(0, 4), swarm.serve(0, 4)
    [kept] = start(swarm, "a")
    log = [*PROMPT, *swarm.gateway.tokens("a"), 3]
    for server in (one, other):
        send_heartbeat(swarm, server, free_pages=0)
    swarm.gateway.clear_and_start("a", log, 60)
    assert swarm.gateway.route("a") == [kept]


# ---- the registry alone


def test_sessions_since_last_heartbeat_count_as_load() -> None:
    a, b = hello("a"), hello("b")
    registry = registry_of(a, b)
    for each in (a, b):
        registry.on_heartbeat(each.peer, IDLE, 0.0)
    assert Counter(place(registry, a, cheapest=True) for _ in range(40)) == {a.peer: 20, b.peer: 20}


def test_replay_counts_as_load_of_its_server() -> None:
    a, b = hello("a"), hello("b")
    registry = registry_of(a, b)
    registry.add_hop(a.peer, 64, 8_192)
    assert {cover(registry, a)[0].peer for _ in range(10)} == {b.peer}


def test_step_times_of_idle_server_expire() -> None:
    a, b = hello("a"), hello("b")
    registry = registry_of(a, b)
    slow = Heartbeat(steps=5, step_ms=400.0, free_pages=256, total_pages=256)
    registry.on_heartbeat(a.peer, slow, 0.0)
    registry.on_heartbeat(b.peer, replace(slow, step_ms=4.0), 0.0)
    assert {cover(registry, a)[0].peer for _ in range(20)} == {b.peer}
    for each, last in ((a, slow), (b, replace(slow, step_ms=4.0))):
        registry.on_heartbeat(each.peer, last, 200.0)
    assert {cover(registry, a, 200.0)[0].peer for _ in range(60)} == {a.peer, b.peer}


def test_suspected_server_is_used_only_as_last_resort() -> None:
    a, b = hello("a"), hello("b")
    registry = registry_of(a, b)
    registry.suspected = frozenset({a.peer})
    assert {cover(registry, a)[0].peer for _ in range(20)} == {b.peer}
    registry.deregister(b.peer)
    assert cover(registry, a)[0].peer == a.peer


def test_server_with_short_context_is_used_as_last_resort() -> None:
    a, b = hello("a"), hello("b")
    registry = registry_of(a, replace(b, max_length=32))
    needs = Needs(max_length=33)
    assert {cover(registry, a, needs=needs)[0].peer for _ in range(20)} == {a.peer}
    registry.deregister(a.peer)
    assert cover(registry, a, needs=needs)[0].peer == b.peer


NONSENSE = (float("nan"), float("inf"), -5.0)


@pytest.mark.parametrize(
    "field", ["step_ms", "step_p99_ms", "oldest_ready_ms", "stepping_ms", "busy_ms", "read_bytes"]
)
@pytest.mark.parametrize("value", NONSENSE)
def test_invalid_heartbeat_values_spoil_no_other_route(field: str, value: float) -> None:
    mad, sane, only = hello("mad", 0, 2), hello("sane", 0, 2), hello("only", 2, 4)
    registry = registry_of(mad, sane, only)
    well = Heartbeat(steps=5, rows=5, busy_ms=20, step_ms=4.0, free_pages=256, total_pages=256)
    for now in (1.0, 2.0, 3.0):
        for each in (sane, only):
            registry.on_heartbeat(each.peer, replace(well, steps=int(5 * now)), now)
        heartbeat = replace(well, steps=int(5 * now), running=1 << 63)
        registry.on_heartbeat(mad.peer, replace(heartbeat, **{field: value}), now)  # type: ignore[arg-type]
    for _ in range(20):
        legs = cover(registry, sane, 3.0)
        assert [leg.peer for leg in legs] == [sane.peer, only.peer]
        assert all(math.isfinite(leg.cost_to_go_ms) for leg in legs)
    assert math.isfinite(registry.health.step_times(mad.peer).prefill_seconds_per_row)
    assert 0 < registry.health_status(mad.peer, 3.0).score <= 1
    registry.deregister(sane.peer)
    assert [leg.peer for leg in cover(registry, only, 3.0)] == [mad.peer, only.peer], (
        "no other server is left"
    )
    registry.eject(only.peer, "silent", 3.0)
    assert math.isfinite(
        registry.costs.route_cost(MODEL, variant_of(only), [(mad.peer, 0, 2)], 3.0)
    )


def test_zero_step_time_does_not_attract_all_sessions() -> None:
    liar, honest = hello("liar"), hello("honest")
    registry = registry_of(liar, honest)
    for each, step in ((liar, 0.0), (honest, 8.0)):
        heartbeat = Heartbeat(steps=5, step_ms=step, free_pages=2560, total_pages=2560)
        registry.on_heartbeat(each.peer, heartbeat, 0.0)
    taken = Counter(place(registry, liar) for _ in range(100))
    assert taken[honest.peer] >= 8  # 5 if the value 0 were used


def test_new_process_does_not_inherit_load_or_ejection() -> None:
    old, other, new = hello("a"), hello("b"), replace(hello("a"), peer="a/1/c")
    registry = registry_of(old, other)
    slow = Heartbeat(steps=5, step_ms=400.0, running=30, free_pages=0, total_pages=256)
    registry.on_heartbeat(old.peer, slow, 0.0)
    registry.eject(old.peer, "overdue", 0.0)
    assert {cover(registry, other)[0].peer for _ in range(20)} == {other.peer}
    registry.deregister(old.peer)
    assert registry.register(new)
    assert {cover(registry, other)[0].peer for _ in range(60)} == {new.peer, other.peer}


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("free", [0, 9, 10, 16, 17, 100])
def test_predicted_wait_matches_admission_refusals(free: int, repair: bool) -> None:
    server = hello("a")
    shape = ModelShape(0, 4, 4, 8, 16, 100, 4096, 97)
    pool = Admission(shape, RECOVERY_RESERVE)
    pool.pages.allocate(100 - free)
    registry = registry_of(replace(server, total_pages=100, page_size=16))
    registry.on_heartbeat(server.peer, Heartbeat(free_pages=free, total_pages=100), 0.0)
    known = registry.find_server(server.peer)
    assert known is not None
    for positions in (1, 16, 17, 100, 112, 113, 1440):
        missing = pool.missing_pages(Turn(positions, positions + 1, Sampling()), 0, repair)
        assert (known.predicted_wait_ms(positions, repair) > 0) == (missing > 0), positions
    assert known.predicted_wait_ms(0, repair) == 0.0


def test_fence_ack_after_new_plan_does_not_shorten_round_trip() -> None:
    swarm = Swarm()
    first, second, tail = swarm.serve(0, 2), swarm.serve(0, 2), swarm.serve(2, 4)
    send_heartbeat(swarm, second, running=40)
    first.core.start_draining(swarm.now)  # it refuses creates, without a heartbeat so far
    for server in (first, tail):
        server.frozen = True
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    swarm.now += 0.1
    first.frozen = False
    swarm.run()
    swarm.now += 0.1
    tail.frozen = False
    swarm.run()
    assert swarm.gateway.route("a") == [second.peer, tail.peer]
    known = swarm.core._registry.find_server(tail.peer)
    assert known is not None and (known.rtt_ms is None or known.rtt_ms >= 200)
    assert swarm.gateway.tokens("a") == expected(PROMPT, 3)


def test_replica_without_the_adapter_takes_no_migration() -> None:
    adapter = Adapter("lora", "0" * 16)
    able, same = [replace(hello(name, 2, 4), adapters=(adapter,)) for name in "ab"]
    newer = replace(hello("c", 2, 4), adapters=(adapter._replace(revision="1" * 16),))
    servers = [able, same, newer, hello("d", 2, 4)]
    registry = registry_of(*servers)
    session = Session("s", adapter.name, Epoch(1, 1), variants_of(able)[adapter.name])
    hop = Hop(Address(able.peer, able.target), 2, 4, gateway_handle=1)
    taken = [each.peer for each in servers if can_replace(registry, session, hop, each.peer)]
    assert taken == [able.peer, same.peer]


def plan_without_link(heads: list[Hello], tails: list[Hello]) -> list[PeerId]:
    """Return the route of a session with a grammar, after its link between the first head and tail has failed."""
    registry = registry_of(*heads, *tails)
    turn = Turn(64, 64, Sampling(grammar=Grammar("{}", "g/1")), 1)
    hops = [
        Hop(Address(each.peer, each.target), each.first, each.last, gateway_handle=1)
        for each in (heads[0], tails[0])
    ]
    variant = variant_of(heads[0])
    session = Session("s", MODEL, Epoch(1, 1), variant, turn=turn, hops=hops)
    session.state, session.has_run = SessionState.FENCING, True
    for generation in (1, 2):
        registry.links.record_failure(heads[0].peer, tails[0].peer, generation, 1.0)
    plan = RoutePlanner(GatewaySettings(), registry).plan_route(session, frozenset(), 1.0)
    assert plan is not None
    return [hop.peer for hop in plan]


def test_unreliable_link_is_left_for_a_tail_with_grammars() -> None:
    """The first ring without that link ends at a server without grammars."""
    heads = [hello("h0", 0, 2), hello("h1", 0, 2)]
    tails = [replace(hello("t0", 2, 4), grammar="g/1"), hello("t1", 2, 4)]
    assert plan_without_link(heads, tails) == [heads[1].peer, tails[0].peer]


def test_one_search_leaves_all_tails_without_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each of 900 such tails took 3 s, in which no stream got a token."""
    searches = []

    def search(*given: Any) -> Any:
        searches.append(given)
        return find_ring(*given)

    monkeypatch.setattr(route_planner, "find_ring", search)
    tails = [hello(f"t{number}", 2, 4) for number in range(9)]
    able = [replace(tails[at], grammar="g/1") for at in (0, -1)]
    assert plan_without_link([hello("h0", 0, 2)], [able[0], *tails[1:-1], able[1]]) == [
        "h0/1/b",
        able[1].peer,
    ]
    assert len(searches) == 1


def test_spans_are_in_order_of_preference_and_cost() -> None:
    servers = [hello(name, 0, 2) for name in ("drained", "slow", "fast", "mine", "mine drained")]
    drained, slow, fast, mine, both = servers
    registry = registry_of(*servers)
    registry.on_heartbeat(slow.peer, replace(IDLE, running=9), 0.0)
    for each in (drained, both):
        registry.drain(each.peer, "test")
    found = registry.costs.spans_by_cost(MODEL, variant_of(fast), {mine.peer, both.peer}, 1.0)
    assert list(found) == [each.peer for each in (mine, fast, slow, both, drained)]
    assert set(found.values()) == {(0, 2)}
