"""Cutover of sessions to their KV copies (R13, migration): together, quiescent, and after bounded waits."""

from __future__ import annotations

import pytest
from support.core.scripted_server import AHEAD, PROMPT, TICK, Script, leave, outcomes, two_spans

from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.cutover import LAST_POSITIONS_WAIT


def test_wait_for_quiescence_before_cutover_is_bounded() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.copied("s", new, 20)
    script.wait(1.0)
    assert script.names("s") == ["a", "b"]
    script.wait(2.5)
    assert script.names("s") == ["a", "c"]


def test_quiescent_session_cuts_over_when_copy_is_close() -> None:
    script, old, new = two_spans()
    leave(script, old)
    for _ in range(3):
        script.token("s")
    script.copied("s", new, 20)
    script.wait(TICK)
    assert script.names("s") == ["a", "b"]
    script.copied("s", new, 21)
    script.wait(TICK)
    assert script.names("s") == ["a", "b"], "the missing positions may arrive soon"
    script.wait(LAST_POSITIONS_WAIT)
    assert script.names("s") == ["a", "c"], "they did not arrive: retained rows replace them"


def rests(script: Script) -> bool:
    return script.core._sessions["s"].is_quiescent


def test_quiescent_session_continues_if_copy_falls_behind() -> None:
    script, old, new = two_spans()
    leave(script, old)
    script.copied("s", new, 20)
    script.wait(TICK)
    session = script.core._sessions["s"]
    script.core.on_read("s", session.length, script.now)
    while not rests(script):
        script.token("s")
    assert session.length - 1 - 20 > 2, "the copy has fallen behind"
    script.wait(0.25)
    assert rests(script)
    script.core.on_read("s", session.length, script.now)
    script.wait(0.15)
    assert not rests(script) and script.names("s") == ["a", "b"]
    script.copied("s", new, session.length - 1)
    script.wait(TICK)
    while not rests(script):
        script.token("s")
    script.copied("s", new, session.length - 1)
    assert script.names("s") == ["a", "c"] and outcomes(script) == ["migrated"]


def three_that_leave(
    settings: GatewaySettings | None = None, ahead: int = AHEAD
) -> tuple[Script, str, str]:
    """Return sessions s0, s1 and s2 over `a` and `b` that all migrate from `b` to `c`."""
    script = Script(settings=settings or GatewaySettings())
    script.add_server("a", 0, 2)
    old = script.add_server("b", 2, 4)
    for name in ("s0", "s1", "s2"):
        script.start_turn(name, PROMPT, ahead=ahead)
        for _ in range(4):
            script.token(name)
    new = script.add_server("c", 2, 4)
    script.wait(1.0)
    leave(script, old)
    return script, old, new


def routes(script: Script) -> list[str]:
    return [script.names(name)[1] for name in ("s0", "s1", "s2")]


def test_sessions_of_draining_server_cut_over_together() -> None:
    script, _, new = three_that_leave()
    script.copied("s0", new, 23)
    script.copied("s1", new, 23)
    script.wait(1.0)
    assert routes(script) == ["b", "b", "b"]
    script.copied("s2", new, 22)
    script.wait(2 * TICK + LAST_POSITIONS_WAIT)
    assert routes(script) == ["c", "c", "c"]


def left(script: Script) -> list[int]:
    """Return the number of tokens that each session may still generate."""
    sessions = [script.core._sessions[name] for name in ("s0", "s1", "s2")]
    return [session.credit + 1 - session.length for session in sessions]


@pytest.mark.parametrize(("read", "granted"), [(23, 2), (21, 1), (20, 0)])
def test_last_tokens_before_cutover_are_equal_if_read(read: int, granted: int) -> None:
    script, _, new = three_that_leave(ahead=6)
    for name, tokens in (("s0", 2), ("s1", 3), ("s2", 0)):
        for _ in range(tokens):
            script.token(name)
    assert left(script) == [1, 0, 3]
    script.core.on_read("s0", read, script.now)
    assert left(script) == [1, 0, 3], "not worth a message"
    script.record.clear()
    for name in ("s0", "s1", "s2"):
        script.copied(name, new, script.length(name) - 1)
    script.wait(TICK)
    assert left(script)[::2] == [1 + granted, 3]
    assert routes(script) == ["b", "c", "b"], "a quiescent session does not wait for the others"
    for name, more in (("s0", 1 + granted), ("s2", 3)):
        for _ in range(more):
            script.token(name)
        script.copied(name, new, script.length(name) - 1)
    assert routes(script) == ["c", "c", "c"]


def test_wait_for_other_copies_before_cutover_is_bounded() -> None:
    script, _, new = three_that_leave()
    script.copied("s0", new, 23)
    at = 0
    while at < 20 and routes(script) == ["b", "b", "b"]:  # the other copies progress slowly
        at += 1
        script.copied("s1", new, at)
        script.copied("s2", new, at)
        script.wait(1.0)
    assert 9 <= at <= 11 and routes(script) == ["c", "b", "b"]


def test_stalled_copy_does_not_block_cutover_of_others() -> None:
    script, _, new = three_that_leave(GatewaySettings(copy_stall_seconds=2.0, copies_per_server=3))
    script.copied("s0", new, 23)
    script.copied("s1", new, 23)
    script.wait(2.2)
    assert routes(script) == ["c", "c", "b"] and outcomes(script).count("aborted") == 1


def test_no_session_joins_group_with_a_complete_copy() -> None:
    script, old, new = three_that_leave(GatewaySettings(copies_per_server=2))
    script.copied("s0", new, 23)
    script.wait(1.0)
    view = script.core.migrations.drain_progress(old)
    assert view is not None and (view.hops, view.migrating) == (3, 2)
    script.core.close_session("s1", script.now)
    script.wait(0.1)
    assert script.names("s0") == ["a", "c"], "alone in its group"
    view = script.core.migrations.drain_progress(old)
    assert view is not None and (view.hops, view.migrating) == (1, 1), "the next group"
