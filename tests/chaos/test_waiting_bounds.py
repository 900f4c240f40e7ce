"""Long waits are allowed where a schedule takes away all servers of a span, or every way, and nowhere else."""

from __future__ import annotations

import pytest
from chaos.schedule import GATEWAY, Event, Fault
from support.chaos.waiting_bounds import BACK, SOON, always_a_way, forks, longest_wait

from modelswarm_gateway.generation.session_locator import UNREACHED_SECONDS

SPANS = (("a", "b"), ("c", "d"))
OTHER = "gateway-2"


def way(*events: Event) -> bool:
    return always_a_way(events, SPANS, (GATEWAY,))


def test_wait_includes_hold_limit_only_where_sessions_are_held() -> None:
    one, both = Event(1.0, Fault.KILL, ("a",)), Event(1.0, Fault.KILL, ("a", "b"))
    assert longest_wait((one,), SPANS, (GATEWAY,), 60.0) == SOON < 60.0
    assert longest_wait((one, both), SPANS, (GATEWAY,), 60.0) == 60.0 + SOON


@pytest.mark.parametrize("first", (Fault.KILL, Fault.LEAVE))
def test_killed_server_is_away_until_its_replacement_serves(first: Fault) -> None:
    died = Event(1.0, first, ("a",))
    assert not way(died, Event(0.5 + BACK, Fault.FREEZE, ("b",), 3.0))
    assert way(died, Event(1.5 + BACK, Fault.FREEZE, ("b",), 3.0))
    assert way(died, Event(2.0, Fault.FREEZE, ("c",), 3.0)), "another span"
    assert way(died, Event(2.0, Fault.KILL, ("a",))), "the same one"


def test_frozen_server_is_away_for_that_time() -> None:
    still = Event(1.0, Fault.FREEZE, ("a",), 2.0)
    assert not way(still, Event(2.9, Fault.SLOW_DISK, ("b",), 1.0))
    assert way(still, Event(3.1, Fault.SLOW_DISK, ("b",), 1.0))


def test_dead_links_count_only_without_another_ring() -> None:
    cut = Event(1.0, Fault.ONE_WAY, ("c", "b"), 5.0)
    assert way(cut)
    assert way(cut, Event(2.0, Fault.FREEZE, ("c",), 1.0))
    assert way(cut, Event(2.0, Fault.FREEZE, ("d",), 1.0)), "c and a"
    assert not way(cut, Event(2.0, Fault.FREEZE, ("d",), 3.0), Event(3.0, Fault.KILL, ("a",)))
    assert not way(
        Event(1.0, Fault.CUT_OFF, (GATEWAY, "a"), 5.0),
        Event(2.0, Fault.CUT_OFF, ("b", GATEWAY), 1.0),
    )


def test_gateway_without_links_has_no_way() -> None:
    servers = ("a", "b", "c", "d")
    cut = Event(1.0, Fault.GATEWAY_CUT_OFF, (GATEWAY, *servers), 5.0)
    assert not way(cut)
    assert way(Event(1.0, Fault.GATEWAY_CUT_OFF, (OTHER, *servers), 5.0))
    assert forks((cut,), SPANS, (GATEWAY, OTHER))


def test_session_restarts_only_after_long_silence_on_all_routes() -> None:
    def begins(*events: Event) -> bool:
        return forks(events, SPANS, (GATEWAY, OTHER))

    cut = Event(1.0, Fault.CUT_OFF, (GATEWAY, "a"), 5.0)
    assert not begins(cut)
    assert not begins(cut, Event(2.0, Fault.ONE_WAY, ("b", GATEWAY), 5.0)), "the same span"
    assert not begins(cut, Event(2.0, Fault.ONE_WAY, ("c", OTHER), 5.0)), "another gateway"
    assert begins(cut, Event(2.0, Fault.ONE_WAY, ("c", GATEWAY), 5.0))
    assert begins(cut, Event(2.0, Fault.FREEZE, ("d",), UNREACHED_SECONDS))
    assert not begins(cut, Event(2.0, Fault.FREEZE, ("d",), UNREACHED_SECONDS - 0.1)), (
        "it is asked again"
    )
    assert not begins(cut, Event(4.0, Fault.FREEZE, ("d",), 4.0)), "a moment at a time"
    assert not begins(cut, Event(2.0, Fault.KILL, ("d",))), "a killed server has no session"
