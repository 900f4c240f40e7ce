"""Migrations at the gateway (R13, migration): messages while a session leaves a server, and outcomes of a KV copy."""

from __future__ import annotations

import pytest
from support.core.scripted_server import (
    AHEAD,
    PROMPT,
    TICK,
    Script,
    leave,
    outcomes,
    reroutes,
    two_spans,
)

from modelswarm.protocol.messages import (
    Close,
    CopyKv,
    FaultKind,
    Fence,
    Finish,
    Heartbeat,
    Input,
    Refusal,
    StartEpoch,
    Token,
    Window,
)
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migrations import NO_TARGET_SECONDS, STARTS_PER_TICK


def test_search_for_a_target_is_repeated_after_a_pause() -> None:
    """Without the pause, each tick would search routes for all sessions of the drained server."""
    script = Script(settings=GatewaySettings())
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT, AHEAD)
    script.token("s")
    leave(script, old)
    script.wait(TICK)
    new = script.add_server("c", 2, 4)
    script.wait(TICK)
    assert not script.sent_to(new, Fence), "the last search was just now"
    script.wait(NO_TARGET_SECONDS)
    assert script.sent_to(new, Fence)


def test_tail_serves_during_kv_copy_and_is_then_replaced() -> None:
    script, old, new = two_spans()
    leave(script, old)
    [create] = script.sent_to(new, Fence)
    assert create.create is not None and create.create.for_recovery
    assert create.epoch == script.gateway.view("s").epoch, (
        "the copy stands in the session's own epoch"
    )
    [warm] = script.sent_to(new, StartEpoch)
    assert warm.standby and warm.successor is None and warm.ring is None and warm.credit == 0
    assert warm.predecessor is not None and warm.predecessor.address.peer == old
    [copy] = script.sent_to(old, CopyKv)
    assert copy.to is not None and copy.to.handle == script.hop(new).own
    assert (copy.start, copy.first, copy.last) == (0, 2, 4)
    assert [len(each.tokens) for each in script.sent_to(new, Input)] == [21]

    script.token("s")
    script.token("s")
    assert script.names("s") == ["a", "b"], "the old hop serves while the copy is behind"
    assert len(script.sent_to(new, Input)) == 3
    script.copied("s", new, 20)
    script.record.clear()
    script.copied("s", new, 22)
    script.wait(TICK)
    assert script.names("s") == ["a", "b"], "a token is in flight"
    script.token("s")
    assert script.names("s") == ["a", "b"], "the copy of the last position is in flight"
    script.copied("s", new, 23)
    assert script.names("s") == ["a", "c"]
    assert [fence.create for fence in script.sent_to(new, Fence)] == [None]
    assert not script.sent_to(old, Close) and not script.sent_to(old, Fence)
    [go] = script.sent_to(new, StartEpoch)
    assert not go.standby and go.start == 23 and go.length == 24
    assert outcomes(script) == ["migrated"] and not reroutes(script)
    before = script.length("s")
    script.token("s")
    assert script.length("s") == before + 1
    assert len(script.sent_to(old, Close)) == 1, "the new hop has run"


def test_undrained_session_gets_its_credit_back() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.core.on_read("s", 21, script.now)
    script.copied("s", new, 20)
    script.wait(TICK)
    script.record.clear()
    script.core.on_read("s", 22, script.now)
    script.run()
    assert not script.sent_to(old, Window), "the session is to become quiescent"
    script.core.migrations.undrain(old, "drain", script.now)
    script.run()
    assert [window.limit for window in script.sent_to(old, Window)] == [25]


def test_aborted_rebalancing_leaves_session_its_credit() -> None:
    script = Script()
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT, ahead=64)
    new = script.add_server("c", 2, 4)
    session = script.core._sessions["s"]
    assert script.core.migrations.migrate(session, session.hops[1], new, script.now)
    script.run()
    script.reports("s", new, FaultKind.FAILED)
    assert outcomes(script) == ["aborted"]
    script.wait(TICK)
    script.record.clear()
    for _ in range(60):
        script.token("s")
    script.core.on_read("s", 80, script.now)
    script.run()
    assert [window.limit for window in script.sent_to(old, Window)] == [80 + 64]


def test_new_head_gets_its_log_from_the_gateway() -> None:
    script = Script()
    old = script.add_server("a", 0, 2)
    script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT, ahead=AHEAD)
    script.token("s")
    new = script.add_server("c", 0, 2)
    leave(script, old)
    [warm] = script.sent_to(new, StartEpoch)
    assert warm.standby and len(script.sent_to(old, CopyKv)) == 1
    assert not script.sent_to("b/1/0", CopyKv)
    script.token("s")
    assert [(each.start, len(each.tokens)) for each in script.sent_to(new, Input)] == [
        (0, 21),
        (21, 1),
    ]
    script.token("s")
    script.token("s")
    script.copied("s", new, 23)
    script.wait(TICK)
    assert script.names("s") == ["c", "b"]


def test_copies_per_server_are_limited() -> None:
    script = Script(settings=GatewaySettings(copies_per_server=2))
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    names = [f"s{number}" for number in range(5)]
    for name in names:
        script.start_turn(name, PROMPT)
        script.token(name)
    script.add_server("c", 2, 4)
    script.wait(1.0)
    leave(script, old)
    script.wait(1.0)
    view = script.core.migrations.drain_progress(old)
    assert view is not None and (view.hops, view.migrating) == (5, 2)


def test_copies_to_one_target_are_limited() -> None:
    script = Script(settings=GatewaySettings(copies_per_server=2))
    script.add_server("a", 0, 2)
    olds = [script.add_server(name, 2, 4) for name in ("b", "c")]
    for number in range(6):
        script.send(olds[number % 2 - 1], Heartbeat(running=90, steps=1, step_ms=9.0))
        script.send(olds[number % 2], Heartbeat(steps=1, step_ms=9.0))
        script.start_turn(f"s{number}", PROMPT)
        script.token(f"s{number}")
        script.wait(1.0)
    script.add_server("d", 2, 4)
    script.wait(1.0)
    for old in olds:
        leave(script, old)
    script.wait(1.0)
    views = [script.core.migrations.drain_progress(old) for old in olds]
    assert [view.hops >= 2 for view in views if view is not None] == [True, True]
    assert sum(view.migrating for view in views if view is not None) == 2


def test_sessions_that_wait_for_a_target_delay_no_others() -> None:
    """The only target of one drained server is busy. Its sessions come first, and are more than a tick searches for."""
    script = Script(settings=GatewaySettings(copies_per_server=1))
    script.add_server("a", 0, 2)
    busy, other = script.add_server("b", 2, 3), script.add_server("c", 3, 4)
    names = [f"s{number}" for number in range(STARTS_PER_TICK + 1)]
    for name in ("first", *names):
        script.start_turn(name, PROMPT)
        script.token(name)
        if name == "first":
            waits = script.add_server("d", 2, 3)
        script.send(busy, Heartbeat(running=90, steps=1, step_ms=9.0))
    script.add_server("e", 2, 3)
    script.add_server("f", 3, 4)
    for drained in (busy, waits, other):
        leave(script, drained)
    script.wait(1.0)
    views = [script.core.migrations.drain_progress(peer) for peer in (busy, waits, other)]
    assert [view.migrating for view in views if view is not None] == [1, 0, 1]


def test_stalled_copy_is_aborted_and_retried() -> None:
    script, old, new = two_spans(
        GatewaySettings(copy_stall_seconds=1.0, migration_retry_seconds=0.5)
    )
    leave(script, old)
    script.wait(1.2)
    assert outcomes(script) == ["aborted"]
    assert len(script.sent_to(new, Close)) == 1
    assert [copy.to for copy in script.sent_to(old, CopyKv)][-1] is None
    assert script.names("s") == ["a", "b"] and not reroutes(script)
    script.wait(0.5)
    assert len(script.sent_to(new, StartEpoch)) == 2


def test_session_is_recomputed_after_repeated_copy_failures() -> None:
    settings = GatewaySettings(copy_stall_seconds=0.5, migration_retry_seconds=0.1, copy_attempts=2)
    script, old, _ = two_spans(settings)
    leave(script, old)
    script.wait(3.0)
    assert outcomes(script) == ["aborted", "aborted", "recomputed"]
    assert script.names("s") == ["a", "c"]
    script.token("s")
    assert not reroutes(script)


@pytest.mark.parametrize("trouble", [FaultKind.FAILED, FaultKind.GAP, FaultKind.UNKNOWN_HANDLE])
def test_fault_at_new_hop_aborts_only_the_migration(trouble: FaultKind) -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.reports("s", new, trouble)
    assert outcomes(script) == ["aborted"]
    assert script.names("s") == ["a", "b"] and not reroutes(script)
    before = script.length("s")
    script.token("s")
    assert script.length("s") == before + 1


def test_broken_link_to_copy_target_aborts_only_migration() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.reports("s", old, FaultKind.LINK_DOWN, new)
    script.reports("s", old, FaultKind.LINK_DOWN, new)
    assert outcomes(script) == ["aborted"]
    assert not reroutes(script), "a late report about an ended copy causes no rerouting"


def test_refused_migration_is_retried() -> None:
    script, old, new = two_spans(GatewaySettings(migration_retry_seconds=0.5))
    script.server(new).refusing = Refusal.NO_PAGES
    leave(script, old)
    assert outcomes(script) == ["aborted"]
    assert script.names("s") == ["a", "b"]
    script.server(new).refusing = None
    script.wait(0.7)
    assert script.sent_to(new, StartEpoch)


def test_another_target_is_tried_after_refusal() -> None:
    script, old, new = two_spans(GatewaySettings(migration_retry_seconds=0.1))
    script.server(new).refusing = Refusal.NO_PAGES
    leave(script, old)
    other = script.add_server("d", 2, 4)
    script.wait(0.3)
    assert script.sent_to(other, StartEpoch)


def test_recovery_supersedes_copy_and_uses_its_hop() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.copied("s", new, 15)
    script.record.clear()
    script.kill(old)
    assert reroutes(script) == ["link_down"]
    assert script.names("s") == ["a", "c"]
    [fence] = script.sent_to(new, Fence)
    assert fence.create is None, "the copied KV is used"
    assert not script.sent_to(new, Close)
    script.token("s")
    script.wait(0.1)
    assert outcomes(script) == ["superseded"]


def test_copy_restarts_after_recovery_from_another_fault() -> None:
    script, old, new = two_spans(GatewaySettings(migration_retry_seconds=0.1))
    leave(script, old)
    script.reports("s", old, FaultKind.GAP, "a/1/0")
    assert reroutes(script) == ["gap"]
    assert len(script.sent_to(new, Close)) == 1
    script.wait(0.5)
    assert len([go for go in script.sent_to(new, StartEpoch) if go.standby]) == 1, (
        "recovery comes before migration"
    )
    script.token("s")
    script.wait(0.5)
    assert len([go for go in script.sent_to(new, StartEpoch) if go.standby]) == 2


def test_turn_end_ends_copy_and_next_turn_uses_new_server() -> None:
    script, old, new = two_spans()
    leave(script, old)
    tail = script.hop(old)
    length = script.length("s")
    script.send(old, Token(tail.reply, script.gateway.view("s").epoch, length, 9, 0.0, Finish.STOP))
    script.wait(0.1)
    assert outcomes(script) == ["superseded"]
    assert script.sent_to(new, Close) and script.sent_to(old, Close)
    assert script.names("s") == ["a"], "its KV at the drained server is freed"
    script.start_turn("s", (*PROMPT, 7, 9, 5))
    assert script.names("s") == ["a", "c"]


def test_draining_heartbeat_starts_migration() -> None:
    script, old, new = two_spans()
    script.send(old, Heartbeat(draining=True))
    script.wait(0.1)
    assert script.sent_to(new, StartEpoch)
    assert [view.drain_cause for view in script.core.server_views()] == ["", "shutdown", ""]


def test_draining_report_starts_migration_without_rerouting() -> None:
    script, old, new = two_spans()
    script.reports("s", old, FaultKind.DRAINING)
    script.wait(0.1)
    assert script.sent_to(new, StartEpoch) and not reroutes(script)


def test_drain_of_sole_blocks_waits_for_a_replica() -> None:
    script = Script()
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    view = script.core.migrations.drain_progress(old)
    assert view is not None and view.sole_blocks == (2, 3)
    leave(script, old)
    script.wait(1.0)
    assert script.names("s") == ["a", "b"] and not outcomes(script)
    new = script.add_server("c", 2, 4)
    script.wait(1.0)
    assert script.sent_to(new, StartEpoch)


def test_new_sessions_avoid_draining_server() -> None:
    script, old, _ = two_spans()
    leave(script, old)
    for number in range(6):
        script.start_turn(f"n{number}", PROMPT)
        assert script.names(f"n{number}") == ["a", "c"]


def test_undrain_ends_copies() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.core.migrations.undrain(old, "drain", script.now)
    script.run()
    assert outcomes(script) == ["superseded"]
    assert len(script.sent_to(new, Close)) == 1
    assert script.names("s") == ["a", "b"]
    assert [view.drain_cause for view in script.core.server_views()] == ["", "", ""]


def test_hop_is_replaced_by_chain_when_all_parts_are_copied() -> None:
    script = Script()
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT, ahead=AHEAD)
    script.token("s")
    first, second = script.add_server("c", 2, 3), script.add_server("d", 3, 4)
    leave(script, old)
    script.wait(0.1)
    assert [(c.first, c.last) for c in script.sent_to(old, CopyKv)] == [(2, 3), (3, 4)]
    assert not script.sent_to(first, Input) and len(script.sent_to(second, Input)) == 1
    for _ in range(3):
        script.token("s")
    script.copied("s", first, 23)
    script.wait(0.1)
    assert script.names("s") == ["a", "b"], "one part of the chain is missing"
    script.copied("s", second, 23)
    script.wait(TICK)
    assert script.names("s") == ["a", "c", "d"]
    assert outcomes(script) == ["migrated"]


def test_closed_session_ends_its_copy() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.core.close_session("s", script.now)
    script.wait(0.1)
    assert len(script.sent_to(new, Close)) == 1
    assert not script.core._recovery.hops.by_handle and not script.core._registry.hops.total()


def test_late_answer_for_aborted_copy_closes_its_hop() -> None:
    script, old, new = two_spans(GatewaySettings(copy_stall_seconds=0.5))
    script.server(new).silent = True
    leave(script, old)
    script.wait(0.6)
    assert outcomes(script) == ["aborted"]
    assert script.core._recovery.hops.closing
    [create] = script.sent_to(new, Fence)
    script.server(new).silent = False
    script.send(new, script.server(new).answer(create))
    assert len(script.sent_to(new, Close)) == 1
    assert not script.core._recovery.hops.closing


def test_drain_lasts_until_all_causes_are_removed() -> None:
    script, old, _ = two_spans()
    script.core.migrations.drain(old, "slow", script.now)
    script.core.migrations.drain(old, "drain", script.now)
    script.core.migrations.undrain(old, "slow", script.now)
    assert [view.drain_cause for view in script.core.server_views()] == ["", "drain", ""]
    script.core.migrations.undrain(old, "drain", script.now)
    script.core.migrations.undrain(old, "drain", script.now)
    assert [view.drain_cause for view in script.core.server_views()] == ["", "", ""]


def test_hop_fenced_in_an_older_epoch_waits_for_its_new_fence() -> None:
    """The copy would start before its server has opened the hop in the session's epoch."""
    script, _, new = two_spans()
    core = script.gateway.core
    session = core._sessions["s"]
    hop = core._recovery.hops.find_or_create(session, new, 2, 4)
    hop.is_fenced = True
    core._recovery.open_copy_target(session, hop)
    assert not hop.is_fenced and session.copy_targets == [hop]
