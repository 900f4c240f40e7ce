"""Server registry: lost links, hops and sessions that are counted, drains, ejections, and the active variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.fleets import IDLE, hello
from support.core.server import MODEL

from modelswarm.protocol.identity import Adapter
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.interface.effects import CloseLink, Effect, Ejected
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE
from modelswarm_gateway.core.servers.health import (
    BASE_EJECTION_TIME,
    HEALTHY,
    MAX_DISCONNECTED,
    SLOW_EJECTION_TIME,
)
from modelswarm_gateway.core.servers.server import ROWS_PER_SESSION, Server

A, B = hello("a"), hello("b")


class Registry(ServerRegistry):
    """A registry that keeps its effects."""

    def __init__(self, *hellos: Hello) -> None:
        self.effects: list[Effect] = []
        super().__init__(30.0, lambda: 0, self.effects.append)
        for each in hellos:
            assert self.register(each)

    def server(self, hello: Hello) -> Server:
        found = self.find_server(hello.peer)
        assert found is not None
        return found

    def load(self, hello: Hello) -> float:
        """Return the load that the server's present cost is made of."""
        return self.costs.hop_cost(self.server(hello), 0.0).load


# ---- links


def test_server_that_reconnects_is_not_unlinked() -> None:
    registry = Registry(A)
    registry.deregister(A.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 2.0) == {A.peer}
    assert registry.unlinked_since("other", 2.0) == set()
    assert registry.register(A, now=4.0)
    assert registry.unlinked_since(MODEL, 2.0) == set()


def test_unlinked_server_counts_from_its_newest_loss() -> None:
    registry = Registry(A)
    registry.deregister(A.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 3.0) == set()
    assert registry.register(A, now=4.0)
    registry.deregister(A.peer, now=5.0)
    assert registry.unlinked_since(MODEL, 3.0) == {A.peer}


def test_server_that_announced_its_stop_is_not_unlinked() -> None:
    registry = Registry(A)
    registry.on_heartbeat(A.peer, replace(IDLE, draining=True), 1.0)
    registry.deregister(A.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 2.0) == set()
    assert registry.register(A) and not registry.server(A).draining


def test_server_that_was_never_connected_is_not_unlinked() -> None:
    registry = Registry()
    registry.deregister(A.peer, now=3.0)
    assert registry.unlinked_since(MODEL, 2.0) == set()


def test_oldest_of_too_many_unlinked_servers_is_forgotten() -> None:
    many = [hello(f"s{number}") for number in range(MAX_DISCONNECTED + 1)]
    registry = Registry(*many)
    for number, each in enumerate(many):
        registry.deregister(each.peer, now=1.0 + number)
    assert registry.unlinked_since(MODEL, 0.0) == {each.peer for each in many[1:]}


def test_invalid_hello_is_ignored() -> None:
    registry = Registry()
    assert not registry.register(replace(A, last=9))
    assert not registry.is_connected(A.peer) and registry.active_variant(MODEL) is None


def test_server_that_connects_again_replaces_its_old_span() -> None:
    registry = Registry(A)
    assert registry.register(replace(A, first=2))
    assert registry.uncovered_blocks(MODEL) == [0, 1]
    assert len(list(registry)) == 1


# ---- variants


def test_revision_with_readable_prompts_precedes_the_larger_one() -> None:
    new = [replace(each, revision="new") for each in (B, hello("c"))]
    registry = Registry(A, *new)
    active = registry.active_variant(MODEL)
    assert active is not None and active.revision == "new"
    registry.set_readable(MODEL, frozenset({A.revision}))
    active = registry.active_variant(MODEL)
    assert active is not None and active.revision == A.revision
    assert [each.peer for each in registry.hellos_of(MODEL)] == [A.peer]
    registry.set_readable(MODEL, frozenset({A.revision, "new"}))
    active = registry.active_variant(MODEL)
    assert active is not None and active.revision == "new"


def test_present_variant_stays_beside_an_equal_one() -> None:
    other = replace(B, revision="new")
    for first, second in ((A, other), (other, A)):
        registry = Registry(first)
        assert registry.active_variant(MODEL) is not None
        registry.register(second)
        active = registry.active_variant(MODEL)
        assert active is not None and active.revision == first.revision


def test_whole_variant_precedes_one_with_readable_prompts() -> None:
    registry = Registry(replace(A, last=2), replace(B, revision="new"))
    registry.set_readable(MODEL, frozenset({A.revision}))
    active = registry.active_variant(MODEL)
    assert active is not None and active.revision == "new"


def test_variant_that_is_whole_only_by_draining_servers_yields() -> None:
    """Servers that drain refuse new sessions, for as long as the last old one runs."""
    new = [replace(hello("c"), first=2, revision="new"), replace(B, last=2, revision="new")]
    registry = Registry(replace(A, last=2), replace(hello("d"), first=2), hello("e"), *new)
    registry.set_readable(MODEL, frozenset({A.revision, "new"}))

    def active() -> str:
        found = registry.active_variant(MODEL)
        assert found is not None
        return found.revision

    before = registry.variant_changes()
    assert active() == A.revision
    registry.drain("e/1/b", SHUTDOWN_CAUSE)
    assert active() == A.revision, "both are whole, with two servers each"
    registry.drain(A.peer, SHUTDOWN_CAUSE)
    assert active() == "new" and registry.variant_changes() > before
    registry.set_readable(MODEL, frozenset({A.revision}))
    assert active() == A.revision
    registry.set_readable(MODEL, frozenset({A.revision, "new"}))
    registry.undrain(A.peer, SHUTDOWN_CAUSE)
    registry.undrain("e/1/b", SHUTDOWN_CAUSE)
    assert active() == A.revision


def test_name_of_a_model_and_an_adapter_stands_for_the_model() -> None:
    """The adapter's base model has more servers."""
    adapter = Adapter("both", "0" * 16)
    bases = [replace(each, model="base", adapters=(adapter,)) for each in (B, hello("c"))]
    registry = Registry(*bases, replace(A, model="both"))
    active = registry.active_variant("both")
    assert active is not None and active.adapter is None
    registry.deregister(A.peer)
    active = registry.active_variant("both")
    assert active is not None and active.adapter == adapter


# ---- load


def test_hops_raise_the_load_until_they_are_removed() -> None:
    registry = Registry(A, B)
    registry.on_heartbeat(A.peer, IDLE, 0.0)
    registry.add_hop(A.peer, 64, 0)
    registry.add_hop(A.peer, 64, ROWS_PER_SESSION)
    assert (registry.hops[A.peer], registry.load(A)) == (2, 3.0)
    assert (registry.hops[B.peer], registry.load(B)) == (0, 0.0)
    registry.remove_hop(A.peer)
    assert (registry.hops[A.peer], registry.load(A)) == (1, 2.0)
    registry.remove_hop(A.peer)
    assert A.peer not in registry.hops, "or every server that ever was would be remembered"


def test_hop_on_a_lost_server_is_counted() -> None:
    registry = Registry()
    registry.add_hop(A.peer, 64, 0)
    assert registry.hops == {A.peer: 1}
    registry.remove_hop(A.peer)
    assert registry.hops == {}


@pytest.mark.parametrize(("sessions", "others"), [(5, 3), (2, 0), (1, 0), (0, 0)])
def test_sessions_of_other_gateways_are_those_beyond_own_hops(sessions: int, others: int) -> None:
    registry = Registry(A)
    registry.add_hop(A.peer, 64, 0)
    registry.add_hop(A.peer, 64, 0)
    registry.on_heartbeat(A.peer, replace(IDLE, sessions=sessions), 0.0)
    assert registry.server(A).other_sessions == others


def test_messages_of_unknown_servers_change_nothing() -> None:
    registry = Registry()
    registry.on_heartbeat(A.peer, IDLE, 0.0)
    registry.record_round_trip(A.peer, 1.0)
    registry.on_step_failed(A.peer, 0.0)
    registry.eject(A.peer, "silent", 0.0)
    assert registry.effects == [] and not registry.health_status(A.peer, 0.0).ejected
    assert registry.costs.zones.version == 0


def test_round_trip_counts_for_server_and_zone() -> None:
    registry = Registry(replace(A, zone="x"))
    registry.record_round_trip(A.peer, 0.25)
    assert registry.server(A).rtt_ms == registry.costs.zones.nearest_ms("x") == 250.0


# ---- drains


def test_server_drains_until_every_cause_is_taken_back() -> None:
    registry = Registry(A)
    registry.drain(A.peer, "admin")
    registry.drain(A.peer, "node")
    assert registry.server(A).draining
    assert registry.costs.hop_cost(registry.server(A), 0.0).last_resort
    registry.undrain(A.peer, "admin")
    registry.undrain(A.peer, "other")
    assert registry.server(A).draining
    registry.undrain(A.peer, "node")
    assert not registry.server(A).draining
    assert not registry.costs.hop_cost(registry.server(A), 0.0).last_resort


def test_drain_outlives_the_link_but_an_announced_stop_does_not() -> None:
    registry = Registry(A, B)
    registry.drain(A.peer, "admin")
    registry.drain(B.peer, SHUTDOWN_CAUSE)
    for each in (A, B):
        registry.deregister(each.peer)
        registry.register(each)
    assert registry.server(A).draining and not registry.server(B).draining


def test_block_is_sole_while_its_other_server_drains() -> None:
    registry = Registry(A, replace(B, first=2))
    assert registry.sole_blocks_of(A.peer) == [0, 1]
    assert registry.can_spare(B.peer, 0.0) and not registry.can_spare(A.peer, 0.0)
    registry.drain(A.peer, "admin")
    assert registry.sole_blocks_of(B.peer) == [2, 3]
    assert not registry.can_spare(B.peer, 0.0)


def test_ejected_or_left_out_server_spares_no_other() -> None:
    registry = Registry(A, B)
    assert registry.can_spare(B.peer, 0.0)
    assert not registry.can_spare(B.peer, 0.0, without=[A.peer])
    registry.eject(A.peer, "silent", 0.0)
    assert not registry.can_spare(B.peer, 0.0) and registry.can_spare(A.peer, 0.0)
    assert registry.uncovered_blocks(MODEL, without=frozenset({A.peer})) == []
    assert registry.uncovered_blocks(MODEL, without=frozenset({A.peer, B.peer})) == [0, 1, 2, 3]


# ---- health


@pytest.mark.parametrize(
    ("cause", "seconds"),
    [("slow", SLOW_EJECTION_TIME), ("silent", BASE_EJECTION_TIME), ("overdue", BASE_EJECTION_TIME)],
)
def test_ejection_lasts_by_its_cause_and_is_reported_once(cause: str, seconds: float) -> None:
    registry = Registry(A)
    registry.eject(A.peer, cause, 1.0)
    registry.eject(A.peer, cause, 1.0)
    assert registry.effects == [Ejected(A.peer, MODEL, cause)]
    assert registry.health.ejected_until(A.peer) == 1.0 + seconds
    assert registry.health_status(A.peer, 1.0 + seconds / 2).ejected
    assert not registry.health_status(A.peer, 1.0 + seconds).ejected, "its canary is due"


def test_server_that_reconnects_has_to_pass_a_canary() -> None:
    registry, now = Registry(A), 2 * BASE_EJECTION_TIME
    registry.set_slowness(A.peer, 4.0)
    assert registry.health_status(A.peer, 0.0).score < 0.5
    registry.deregister(A.peer, 0.0)
    assert registry.health_status(A.peer, now) == HEALTHY
    registry.register(A, now)
    status = registry.health_status(A.peer, now)
    assert status.canary and status.score == 1.0


def test_failed_step_ejects_and_makes_a_last_resort() -> None:
    registry = Registry(A)
    registry.on_step_failed(A.peer, 2.0)
    assert registry.effects == [Ejected(A.peer, MODEL, "failed")]
    later = 2.0 + 2 * BASE_EJECTION_TIME
    for now, is_last in ((later, True), (32.0, True), (32.5, False)):
        assert registry.costs.hop_cost(registry.server(A), now).last_resort == is_last


def test_canary_has_one_session_that_a_token_is_due_on() -> None:
    registry, now = Registry(A), 2 * BASE_EJECTION_TIME
    registry.eject(A.peer, "silent", 0.0)
    assert registry.health_status(A.peer, now).canary
    registry.add_hop(A.peer, 64, 0)
    assert registry.health_status(A.peer, now).ejected
    registry.set_idle_hops({A.peer: 1})
    assert registry.health_status(A.peer, now).canary
    registry.set_idle_hops({})
    assert registry.health_status(A.peer, now).ejected
    registry.on_token([B.peer, A.peer], now)
    status = registry.health_status(A.peer, now)
    assert not status.ejected and not status.canary


def test_suspected_server_counts_as_ejected_until_it_is_not() -> None:
    registry = Registry(A, B)
    registry.set_suspected(frozenset({A.peer}))
    assert [registry.health_status(each.peer, 0.0).ejected for each in (A, B)] == [True, False]
    registry.set_suspected(frozenset({B.peer}))
    assert [registry.health_status(each.peer, 0.0).ejected for each in (A, B)] == [False, True]


def test_link_failure_counts_between_connected_servers_alone() -> None:
    registry = Registry(A, B)
    for generation in (1, 2):
        for reporter, peer in ((A.peer, "gone/1/b"), ("gone/1/b", A.peer), (B.peer, A.peer)):
            registry.on_link_failed(reporter, peer, generation, 5.0)
    assert registry.links.unreliable(6.0) == {frozenset({A.peer, B.peer}): 2}


def test_closed_link_is_an_effect_with_its_reason() -> None:
    registry = Registry(A)
    registry.disconnect(A.peer, "silent for 3 s")
    assert registry.effects == [CloseLink(A.peer, "silent for 3 s")]
