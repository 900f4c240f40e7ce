"""Swarms of several variants, servers that fail, and the isolation of sessions from each other."""

from __future__ import annotations

import pytest
from support.core.gateway import Swarm
from support.core.server import MODEL, Options, expected

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.core.interface.effects import Rerouted
from modelswarm_gateway.core.interface.turn import TurnRequest

PROMPT = [5, 6, 7, 8, 9]
VARIANTS: dict[str, Options] = {
    "revision": {"revision": "r2"},
    "dtype": {"dtype": "bfloat16"},
    "row size": {"row_bytes": 16},
    "dtype and row size": {"dtype": "bfloat16", "row_bytes": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_route_never_mixes_variants(variant: str) -> None:
    swarm = Swarm()
    old = {swarm.serve(first, first + 2).peer for first in (0, 2)}
    new = {swarm.serve(first, first + 2, **VARIANTS[variant]).peer for first in (0, 2)}
    for number in range(16):
        name = f"a{number}"
        swarm.gateway.clear_and_start(name, PROMPT, 3)
        assert not swarm.gateway.troubles(name)
        assert not swarm.gateway.all(Rerouted), "a mixed route was tried, and failed"
        assert swarm.gateway.tokens(name) == expected(PROMPT, 3)
        assert set(swarm.gateway.route(name)) in (old, new)


def test_server_of_another_depth_does_not_break_the_model() -> None:
    swarm = Swarm()
    swarm.serve(0, 2, n_blocks=2)  # first, so that the registry asks it for the depth
    swarm.serve(0, 2), swarm.serve(2, 4)
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    assert swarm.gateway.tokens("a") == expected(PROMPT, 3)


def test_invalid_hello_does_not_break_the_model() -> None:
    for lie in (
        {"max_length": 0},
        {"n_blocks": 0},
        {"first": 3, "last": 3},
        {"first": 4, "last": 2},
        {"last": 1 << 40},
        {"n_blocks": 1 << 40, "last": 1 << 40},
        {"row_bytes": 0},
    ):
        swarm = Swarm()
        swarm.serve(0, 4, lie)
        swarm.serve(0, 2), swarm.serve(2, 4)
        swarm.gateway.clear_and_start("a", PROMPT, 3)
        assert swarm.gateway.tokens("a") == expected(PROMPT, 3), lie


def test_small_server_does_not_limit_session_length() -> None:
    swarm = Swarm()
    swarm.serve(0, 2), swarm.serve(2, 4)
    swarm.serve(0, 2, total_pages=3)
    assert swarm.core.max_length(MODEL) > 20
    swarm.core.open_session("a", MODEL, swarm.now)
    long = [1 + i % 50 for i in range(40)]
    swarm.gateway.clear_and_start("a", long, 3)
    assert swarm.gateway.tokens("a") == expected(long, 3)


def test_server_whose_steps_fail_costs_no_session() -> None:
    swarm = Swarm()
    swarm.serve(0, 2)
    bad = swarm.serve(2, 4)
    bad.broken = True
    swarm.serve(2, 4)
    for number in range(12):
        name = f"b{number}"
        swarm.gateway.clear_and_start(name, PROMPT, 3)
        swarm.wait(1.0)
        assert not swarm.gateway.troubles(name)
        assert swarm.gateway.tokens(name) == expected(PROMPT, 3)
        swarm.core.close_session(name, swarm.now)
        swarm.run()


def test_session_changes_revision_as_a_whole_between_turns() -> None:
    swarm = Swarm()
    swarm.serve(0, 2)
    tail = swarm.serve(2, 4)
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    swarm.kill(tail.peer)
    swarm.serve(2, 4, revision="r2")
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    [refused] = swarm.gateway.troubles("a")
    assert "no server holds block" in refused.detail
    swarm.serve(0, 2, revision="r2")
    assert swarm.core.active_revision(MODEL) == "r2"
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    assert swarm.gateway.tokens("a") == expected(PROMPT, 3)
    [view] = swarm.core.session_views()
    revisions = {swarm.servers[hop.peer].hello.revision for hop in view.route}
    assert revisions == {"r2"}


def test_turns_stay_on_a_revision_whose_prompts_can_be_read() -> None:
    """A new revision with more servers gets the turns once its tokenizer is loaded, or the old one lacks blocks."""
    swarm = Swarm()
    swarm.core.set_readable(MODEL, frozenset({"r1"}))
    swarm.serve(0, 2)
    tail = swarm.serve(2, 4)
    for first, last in ((0, 2), (2, 4), (0, 2)):
        swarm.serve(first, last, revision="r2")
    assert swarm.core.active_revision(MODEL) == "r1"
    swarm.core.set_readable(MODEL, frozenset({"r1", "r2"}))
    assert swarm.core.active_revision(MODEL) == "r2"
    swarm.core.set_readable(MODEL, frozenset({"r1"}))
    assert swarm.core.active_revision(MODEL) == "r1"
    swarm.kill(tail.peer)
    assert swarm.core.active_revision(MODEL) == "r2"


def test_turns_leave_a_revision_whose_servers_drain() -> None:
    """The last session there may run for minutes, while its servers refuse all others."""
    swarm = Swarm()
    old = [swarm.serve(0, 2), swarm.serve(2, 4)]
    swarm.gateway.start("long", PROMPT, 30, ahead=4)
    new = {swarm.serve(first, first + 2, revision="r2").peer for first in (0, 2)}
    for server in old:
        server.core.start_draining(swarm.now)
    swarm.wait(10.0)
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    assert not swarm.gateway.troubles("a")
    assert set(swarm.gateway.route("a")) == new
    swarm.gateway.read("long")
    assert not swarm.gateway.troubles("long")
    assert swarm.gateway.route("long") == [server.peer for server in old]


def resume(swarm: Swarm, session: str, begin: int) -> set[str]:
    """Begin the rest of an answer, as for a client that reconnects; return the revisions of its route."""
    log = swarm.core.parked_turn(session)
    assert log is not None
    request = TurnRequest(log.tokens, 20, Sampling(), is_resumed=True, begin=begin)
    swarm.core.start_turn(session, request, swarm.now)
    swarm.run()
    return {swarm.servers[peer].hello.revision for peer in swarm.gateway.route(session)}


@pytest.mark.parametrize("drains", [False, True])
def test_resumed_answer_stays_on_its_revision(drains: bool) -> None:
    swarm = Swarm()
    old = [swarm.serve(0, 2), swarm.serve(2, 4)]
    swarm.gateway.start("a", PROMPT, 30, ahead=4)
    for first in (0, 2, 0, 2):
        swarm.serve(first, first + 2, revision="r2")
    assert swarm.core.active_revision(MODEL) == "r2"
    swarm.core.cancel_turn("a", swarm.now)
    if drains:
        for server in old:
            server.core.start_draining(swarm.now)
        swarm.wait(10.0)  # parked hops leave the servers that drain
    assert resume(swarm, "a", len(PROMPT)) == ({"r2"} if drains else {"r1"})
    assert not swarm.gateway.troubles("a")
    swarm.gateway.clear_and_start("a", [*PROMPT, 1], 3)
    assert {swarm.servers[peer].hello.revision for peer in swarm.gateway.route("a")} == {"r2"}


def test_resumed_answer_leaves_blocks_that_only_drain() -> None:
    """A server has all blocks, and a hop for some. It drains, so it takes no hop for the others."""
    swarm = Swarm()
    head, tail = swarm.serve(0, 2), swarm.serve(2, 4)
    swarm.gateway.start("a", PROMPT, 30, ahead=4)
    whole = swarm.serve(0, 4)
    swarm.kill(tail.peer)
    swarm.gateway.read("a", len(PROMPT) + 5)
    assert swarm.gateway.route("a") == [head.peer, whole.peer]
    for first in (0, 2):
        swarm.serve(first, first + 2, revision="r2")
    swarm.core.cancel_turn("a", swarm.now)
    for server in (head, whole):
        server.core.start_draining(swarm.now)
    swarm.kill(head.peer)
    assert resume(swarm, "a", len(PROMPT)) == {"r2"}


def test_fork_runs_on_the_revision_of_its_parent() -> None:
    swarm = Swarm()
    swarm.serve(0, 2), swarm.serve(2, 4)
    swarm.gateway.start("a", PROMPT, 30, ahead=4)
    for first in (0, 2, 0, 2):
        swarm.serve(first, first + 2, revision="r2")
    swarm.gateway.start("b", PROMPT, 3, parent="a")
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert {swarm.servers[peer].hello.revision for peer in swarm.gateway.route("b")} == {"r1"}


def test_session_ends_with_error_of_its_only_failing_server() -> None:
    swarm = Swarm()
    swarm.serve(0, 2)
    swarm.serve(2, 4).broken = True
    swarm.gateway.clear_and_start("a", PROMPT, 3)
    swarm.wait(3.0)
    [broken] = swarm.gateway.troubles("a")
    assert "CUDA" in broken.detail
