"""Planned moves that met something else at the wrong moment (R13); each one was a hole once."""

from __future__ import annotations

from support.core.scripted_moves import PROMPT, outcomes
from support.core.scripted_servers import MODEL, Script

from modelswarm.protocol.messages import Close, FaultKind, Finish, Refusal, StartEpoch, Token
from modelswarm_gateway.core.interface.effects import Refused, Rerouted, SessionLost
from modelswarm_gateway.core.interface.settings import GatewaySettings


def test_a_session_leaves_its_second_server_although_nobody_can_replace_the_first() -> None:
    script = Script()
    only = script.serve("a", 0, 2)
    old = script.serve("b", 2, 4)
    script.ask("s", PROMPT)
    script.token("s")
    new = script.serve("c", 2, 4)
    script.core.migrations.drain(only, "shutdown", script.now)
    script.core.migrations.drain(old, "shutdown", script.now)
    script.wait(0.2)
    assert [go.standby for go in script.told(new, StartEpoch)] == [True]


def test_a_hop_that_opens_after_the_last_token_starts_no_turn_again() -> None:
    script = Script(GatewaySettings(copy_attempts=0))  # moved without a copy, as soon as it is open
    script.serve("a", 0, 2)
    old = script.serve("b", 2, 4)
    script.ask("s", PROMPT)
    script.token("s")
    new = script.serve("c", 2, 4)
    script.silent.add(new)
    script.core.migrations.drain(old, "drain", script.now)
    script.run()
    tail, length = script.hop(old), script.length("s")
    script.says(old, Token(tail.reply, script.epoch("s"), length, 9, 0.0, Finish.STOP))
    script.silent.clear()
    script.grant(new)
    view = script.core.find_view("s")
    assert view is not None and view.state == "parked"
    assert not script.told(new, StartEpoch)
    script.wait(0.1)
    assert outcomes(script) == ["superseded"] and len(script.told(new, Close)) == 1


def test_moves_that_others_overtook_are_not_held_against_copies() -> None:
    script = Script(GatewaySettings(migration_retry_seconds=0.1))
    script.serve("a", 0, 2)
    old = script.serve("b", 2, 4)
    script.ask("s", PROMPT)
    script.token("s")
    new = script.serve("c", 2, 4)
    for _ in range(4):
        script.core.migrations.drain(old, "drain", script.now)
        script.wait(0.2)
        script.core.migrations.undrain(old, "drain", script.now)
        script.wait(0.2)
    begun = len(script.told(new, StartEpoch))
    script.core.migrations.drain(old, "drain", script.now)
    script.wait(0.2)
    assert outcomes(script) == ["superseded"] * 4
    gos = script.told(new, StartEpoch)
    assert len(gos) == begun + 1, "a fifth copy"
    assert all(go.standby for go in gos), "the reader would notice a move without"


def test_a_new_tail_does_not_go_where_the_ring_to_the_head_keeps_failing() -> None:
    for seed in range(8):
        script = Script()
        head = script.serve("a", 0, 2)
        script.serve("b", 2, 3)
        tail = script.serve("c", 3, 4)
        script.ask("s", PROMPT)
        script.token("s")
        bad = script.serve("d", 3, 4)
        good = script.serve("e", 3, 4)
        for generation in range(2):
            script.core._registry.on_link_failed(bad, head, generation, script.now)
        for number in range(seed):
            script.core._registry.add_hop(good, number, 2000)  # so that the other looks better
        script.core.migrations.drain(tail, "drain", script.now)
        script.run()
        assert script.told(good, StartEpoch) and not script.told(bad, StartEpoch)


def test_a_repair_that_meets_only_servers_that_stop_waits_with_its_kv_for_the_next_one() -> None:
    script = Script()
    script.serve("a", 0, 2)
    dies = script.serve("b", 2, 4)
    script.ask("s", PROMPT)
    script.token("s")
    stops = script.serve("c", 2, 4)
    script.refusing[stops] = Refusal.DRAINING
    script.core.on_peer_lost(dies, script.now)
    script.run()
    script.wait(3.0)
    view = script.core.find_view("s")
    assert view is not None and view.state == "held"
    assert "stop" in view.hold_reason and "KV" not in view.hold_reason
    assert not script.told("a/1/0", Close), (
        "what it holds elsewhere is not what there is no room for"
    )
    script.serve("d", 2, 4)
    assert script.route("s") == ["a", "d"]


def test_a_turn_that_meets_only_servers_that_stop_is_told_so() -> None:
    script = Script()
    script.refusing[script.serve("a", 0, 4)] = Refusal.DRAINING
    script.ask("s", PROMPT)
    [refused] = [effect for effect in script.effects if isinstance(effect, Refused)]
    assert refused.detail == f"the servers of {MODEL} for blocks 0:4 are about to stop"
    assert not [effect for effect in script.effects if isinstance(effect, SessionLost)]


def test_a_copy_that_fails_to_a_server_of_another_hop_is_nothing_to_the_session() -> None:
    script = Script()
    script.serve("a", 0, 1)
    old = script.serve("b", 1, 2)
    wide = script.serve("c", 2, 3)
    script.serve("d", 3, 4)
    script.ask("s", PROMPT)
    script.token("s")
    script.core.on_peer_lost(wide, script.now)
    script.serve("c", 1, 3)  # it holds the blocks of b as well, and serves its own
    script.run()
    script.token("s")
    script.wait(0.1)
    assert script.route("s") == ["a", "b", "c", "d"]
    script.effects.clear()
    script.core.migrations.drain(old, "drain", script.now)
    script.run()
    script.reports("s", old, FaultKind.FAILED, wide)
    script.wait(0.1)
    assert not [effect for effect in script.effects if isinstance(effect, Rerouted)]
    assert outcomes(script) == ["aborted"]
    assert script.route("s") == ["a", "b", "c", "d"]
