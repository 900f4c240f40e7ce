"""Turns of one session at their limits: no common prefix, nothing to sample, one token, the whole context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.core.gateway import Swarm
from support.core.server import MODEL, expected

from modelswarm_gateway.core.interface.errors import CoreError, PromptTooLong, SessionBusy


def three_hops(**settings: Any) -> Swarm:
    swarm = Swarm()
    swarm.serve(0, 1, **settings)
    swarm.serve(1, 3, **settings)
    swarm.serve(3, 4, **settings)
    swarm.core.open_session("a", MODEL, swarm.now)
    return swarm


def one_server(**settings: Any) -> Swarm:
    swarm = Swarm()
    swarm.serve(0, 4, **settings)
    swarm.core.open_session("a", MODEL, swarm.now)
    return swarm


def same_server_twice(**settings: Any) -> Swarm:
    """Return a swarm in which one server must serve all blocks, so that a recovery may route through it twice."""
    swarm = Swarm()
    swarm.serve(0, 4, **settings)
    middle = swarm.serve(1, 3, **settings)
    swarm.gateway.clear_and_start("a", [9, 9], 1)
    swarm.kill(middle.peer)
    return swarm


@pytest.mark.parametrize("make", [three_hops, one_server, same_server_twice])
def test_turns_with_any_common_prefix_give_expected_tokens(make: Callable[..., Swarm]) -> None:
    swarm = make()
    turns = [
        ([1], 3),
        ([1], 0),
        ([1], 3),
        ([2], 4),
        ([2, 3, 4, 5, 6, 7], 0),
        ([2, 3, 4, 5, 6, 7], 0),
        ([2, 3, 4, 5, 6, 7, 8], 3),
        ([2, 3, 4, 5, 6, 7, 8], 3),
        ([2, 3], 2),
        ([9, 8, 7], 1),
        ([9], 0),
        ([9, 1, 1, 1], 5),
    ]
    for prompt, new in turns:
        swarm.gateway.clear_and_start("a", prompt, new)
        assert not swarm.gateway.troubles("a")
        assert swarm.gateway.tokens("a") == (expected(prompt, new) if new else [-1]), (prompt, new)
    swarm.core.close_session("a", swarm.now)
    swarm.run()
    assert all(s.core.stats.free_pages == 256 for s in swarm.servers.values())


@pytest.mark.parametrize("make", [three_hops, one_server])
def test_prompt_may_fill_context_but_not_exceed_it(make: Callable[..., Swarm]) -> None:
    swarm = make(max_length=16)
    full = list(range(1, 17))
    swarm.gateway.clear_and_start("a", full, 0)
    assert swarm.gateway.tokens("a") == [-1]
    with pytest.raises(PromptTooLong):
        swarm.gateway.clear_and_start("a", full, 1)
    with pytest.raises(PromptTooLong):
        swarm.gateway.clear_and_start("a", [*full, 17], 0)
    swarm.gateway.clear_and_start("a", full[:15], 5)
    assert swarm.gateway.tokens("a") == expected(full[:15], 1)


def test_refused_turn_changes_nothing_for_next_turn() -> None:
    swarm = three_hops(total_pages=10)
    swarm.core.open_session("b", MODEL, swarm.now)
    swarm.gateway.clear_and_start("a", [1, 2, 3], 2)
    swarm.gateway.clear_and_start("b", list(range(1, 20)), 1)
    assert swarm.gateway.tokens("b") == expected(list(range(1, 20)), 1)
    swarm.gateway.clear_and_start("a", [1, 2, 3, *range(4, 24)], 2)
    assert [type(t).__name__ for t in swarm.gateway.troubles("a")] == ["Refused"]
    swarm.gateway.clear_and_start("a", [1, 2, 4], 2)
    assert swarm.gateway.tokens("a") == expected([1, 2, 4], 2)
    swarm.core.close_session("b", swarm.now)
    swarm.run()
    swarm.gateway.clear_and_start("a", [1, 2, 3, *range(4, 24)], 2)
    assert swarm.gateway.tokens("a") == expected([1, 2, 3, *range(4, 24)], 2)


def test_second_turn_during_turn_raises_session_busy() -> None:
    swarm = three_hops()
    swarm.gateway.begin("a", [1, 2], 500, ahead=1)
    with pytest.raises(SessionBusy):
        swarm.gateway.begin("a", [1, 2], 500, ahead=1)
    swarm.run()
    with pytest.raises(SessionBusy):
        swarm.gateway.begin("a", [1, 2], 500, ahead=1)
    with pytest.raises(CoreError):
        swarm.core.truncate_turn("a", 0, swarm.now)
    swarm.core.truncate_turn("a", 3, swarm.now)
    swarm.run()
    swarm.gateway.clear_and_start("a", [1, 2], 4)
    assert swarm.gateway.tokens("a") == expected([1, 2], 4)


def test_turn_survives_loss_of_each_gateway_link() -> None:
    swarm = three_hops()
    swarm.gateway.start("a", [1, 2], 30, ahead=5)
    for server in list(swarm.servers.values()):
        swarm.cut_link(swarm.gateway.peer, server.peer)
        swarm.wait(0.5)
        swarm.link(swarm.gateway.peer, server.peer)
        swarm.wait(3.0)
    swarm.gateway.read("a", 40)
    assert swarm.gateway.tokens("a") == expected([1, 2], 30)


def test_refusal_reports_the_silent_server() -> None:
    swarm = three_hops()
    tail = list(swarm.servers.values())[-1]
    swarm.remove(tail.peer)  # stopped: its link stays up
    swarm.gateway.clear_and_start("a", [1, 2], 2)
    swarm.wait(12.0)
    [refused] = swarm.gateway.troubles("a")
    assert "do not answer" in refused.detail


@pytest.mark.parametrize("make", [three_hops, one_server])
def test_refusal_for_want_of_room_says_how_much_fits(make: Callable[..., Swarm]) -> None:
    """9 of 10 pages are for new sessions; the first one takes 5 of them."""
    swarm = make(total_pages=10, page_size=4)
    swarm.gateway.clear_and_start("a", list(range(16)), 5)
    swarm.gateway.clear_and_start("b", list(range(24)), 5)
    [refused] = swarm.gateway.troubles("b")
    assert refused.detail == (
        f"no free KV for 28 positions on the servers of {MODEL}; at most 16 fit now"
    )
    swarm.gateway.clear_and_start("b", list(range(12)), 5)
    assert swarm.gateway.tokens("b") == expected(list(range(12)), 5)


def test_session_between_turns_runs_on_no_server() -> None:
    """Routes avoid servers with many sessions in a turn, and these send ten heartbeats a second."""
    swarm = three_hops()
    for new in (0, 5):
        swarm.gateway.clear_and_start("a", [5, 6, 7], new)
        assert swarm.gateway.view("a").state == "parked"
        swarm.wait(1.5)
        for server in swarm.servers.values():
            assert server.core.heartbeat().running == 0
            assert not server.core.busy_gateways
            assert not server.core._scheduler.has_decoding
    swarm.gateway.clear_and_start("a", [5, 6, 7, *expected([5, 6, 7], 5), 8], 5)
    assert swarm.gateway.tokens("a") == expected([5, 6, 7, *expected([5, 6, 7], 5), 8], 5)
    assert swarm.gateway.view("a").reused == 7
