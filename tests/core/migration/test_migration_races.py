"""Migrations that coincide with another event (R13, migration). Each test found a bug."""

from __future__ import annotations

from support.core.scripted_server import PROMPT, Script, outcomes
from support.core.server import MODEL

from modelswarm.protocol.messages import (
    Close,
    FaultKind,
    FaultReport,
    Fence,
    Finish,
    Refusal,
    StartEpoch,
    Token,
)
from modelswarm_gateway.core.interface.effects import Refused, Rerouted, SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migration import RECOVERY_SECONDS


def test_irreplaceable_hop_does_not_block_other_migration() -> None:
    script = Script()
    only = script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    new = script.add_server("c", 2, 4)
    script.core.migrations.drain(only, "shutdown", script.now)
    script.core.migrations.drain(old, "shutdown", script.now)
    script.wait(0.2)
    assert [go.standby for go in script.sent_to(new, StartEpoch)] == [True]


def test_hop_opened_after_last_token_does_not_restart_turn() -> None:
    script = Script(
        settings=GatewaySettings(copy_attempts=0)
    )  # migrated without a copy once it is open
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    new = script.add_server("c", 2, 4)
    script.server(new).silent = True
    script.core.migrations.drain(old, "drain", script.now)
    script.run()
    tail, length = script.hop(old), script.length("s")
    script.send(old, Token(tail.reply, script.gateway.view("s").epoch, length, 9, 0.0, Finish.STOP))
    script.server(new).silent = False
    script.grant(new)
    assert script.gateway.view("s").state == "parked"
    assert not script.sent_to(new, StartEpoch)
    script.wait(0.1)
    assert outcomes(script) == ["superseded"] and len(script.sent_to(new, Close)) == 1


def test_superseded_copies_do_not_count_as_failures() -> None:
    script = Script(settings=GatewaySettings(migration_retry_seconds=0.1))
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    new = script.add_server("c", 2, 4)
    for _ in range(4):
        script.core.migrations.drain(old, "drain", script.now)
        script.wait(0.2)
        script.core.migrations.undrain(old, "drain", script.now)
        script.wait(0.2)
    begun = len(script.sent_to(new, StartEpoch))
    script.core.migrations.drain(old, "drain", script.now)
    script.wait(0.2)
    assert outcomes(script) == ["superseded"] * 4
    gos = script.sent_to(new, StartEpoch)
    assert len(gos) == begun + 1, "a fifth copy"
    assert all(go.standby for go in gos), "without a copy, the reader would notice the migration"


def test_new_tail_avoids_failing_link_to_the_head() -> None:
    for seed in range(8):
        script = Script()
        head = script.add_server("a", 0, 2)
        script.add_server("b", 2, 3)
        tail = script.add_server("c", 3, 4)
        script.start_turn("s", PROMPT)
        script.token("s")
        bad = script.add_server("d", 3, 4)
        good = script.add_server("e", 3, 4)
        for generation in range(2):
            script.core._registry.on_link_failed(bad, head, generation, script.now)
        for number in range(seed):
            script.core._registry.add_hop(good, number, 2000)  # so that the other server is cheaper
        script.core.migrations.drain(tail, "drain", script.now)
        script.run()
        assert script.sent_to(good, StartEpoch) and not script.sent_to(bad, StartEpoch)


def test_held_recovery_keeps_kv_when_servers_are_draining() -> None:
    script = Script()
    script.add_server("a", 0, 2)
    dies = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    stops = script.add_server("c", 2, 4)
    script.server(stops).refusing = Refusal.DRAINING
    script.kill(dies)
    script.wait(3.0)
    view = script.gateway.view("s")
    assert view.state == "held"
    assert "stop" in view.hold_reason and "KV" not in view.hold_reason
    assert not script.sent_to("a/1/0", Close), "the session keeps its KV at the other hop"
    script.add_server("d", 2, 4)
    assert script.names("s") == ["a", "d"]


def test_turn_refusal_names_draining_servers() -> None:
    script = Script()
    script.server(script.add_server("a", 0, 4)).refusing = Refusal.DRAINING
    script.start_turn("s", PROMPT)
    [refused] = script.gateway.all(Refused)
    assert refused.detail == f"the servers of {MODEL} for blocks 0:4 are about to stop"
    assert not script.gateway.all(SessionLost)


def test_failed_copy_to_server_on_route_causes_no_rerouting() -> None:
    script = Script()
    script.add_server("a", 0, 1)
    old = script.add_server("b", 1, 2)
    wide = script.add_server("c", 2, 3)
    script.add_server("d", 3, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    script.core.on_peer_lost(wide, script.now)
    script.add_server("c", 1, 3)  # it also holds the blocks of b, and serves 2:3
    script.run()
    script.token("s")
    script.wait(0.1)
    assert script.names("s") == ["a", "b", "c", "d"]
    script.effects.clear()
    script.core.migrations.drain(old, "drain", script.now)
    script.run()
    script.reports("s", old, FaultKind.FAILED, wide)
    script.wait(0.1)
    assert not script.gateway.all(Rerouted)
    assert outcomes(script) == ["aborted"]
    assert script.names("s") == ["a", "b", "c", "d"]


def test_long_recovery_of_one_session_delays_no_drain() -> None:
    """A replay of a long log takes minutes, and the drained server stops meanwhile."""
    script = Script()
    head = script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    for name in ("s", "long"):
        script.start_turn(name, PROMPT)
        script.token(name)
    new = script.add_server("c", 2, 4)
    hop, epoch = script.hop(head, "long"), script.gateway.view("long").epoch
    script.send(head, FaultReport(hop.reply, epoch, FaultKind.GAP))
    script.core.migrations.drain(old, "drain", script.now)
    script.wait(RECOVERY_SECONDS - 0.5)
    assert not script.sent_to(new, Fence)
    script.wait(1.0)
    assert [fence.create.session for fence in script.sent_to(new, Fence) if fence.create] == ["s"]
