"""Schedules: the same seed gives the same one, and each is one that can be carried out."""

from __future__ import annotations

from collections import Counter

import pytest
from chaos.schedule import FRAMES, GATEWAY, LEASE_SECONDS, Fault, schedule

SPANS = (("s0-r0", "s0-r1"), ("s1-r0", "s1-r1"))
SERVERS = {name for span in SPANS for name in span}


def test_schedule_is_determined_by_its_seed() -> None:
    assert schedule(7, 60, SPANS) == schedule(7, 60, SPANS)
    assert schedule(7, 60, SPANS) != schedule(8, 60, SPANS)


def test_faults_begin_in_order_and_end_in_time() -> None:
    for seed in range(200):
        events = schedule(seed, 30, SPANS)
        assert [event.at for event in events] == sorted(event.at for event in events)
        assert all(1.0 <= event.at < event.at + event.seconds + 0.001 < 30 for event in events)


def test_kinds_of_faults_follow_their_weights() -> None:
    counts = Counter(event.fault for seed in range(200) for event in schedule(seed, 60, SPANS))
    assert set(counts) == set(Fault)
    assert counts[Fault.KILL] > 3 * counts[Fault.GATEWAY_KILL]
    assert 200 * 60 / 1.5 * 0.7 < counts.total() < 200 * 60 / 1.5


def test_targets_fit_their_fault() -> None:
    for seed in range(100):
        for event in schedule(seed, 60, SPANS):
            if event.fault is Fault.GATEWAY_CUT_OFF:
                assert event.targets[0] == GATEWAY
                assert set(event.targets[1:]) == SERVERS
            elif event.fault in FRAMES:
                assert len(set(event.targets)) == 2
                assert set(event.targets) <= SERVERS | {GATEWAY}
                assert not any(set(event.targets) == set(span) for span in SPANS), "never talk"
            elif event.fault is Fault.KILL:
                assert event.targets in SPANS or set(event.targets) < SERVERS
            elif event.fault in (Fault.FREEZE, Fault.SLOW_DISK, Fault.LEAVE, Fault.DRAIN):
                assert len(event.targets) == 1
                assert set(event.targets) < SERVERS
            else:
                assert event.targets == (GATEWAY,)


def test_only_chosen_faults_are_scheduled() -> None:
    wanted = frozenset((Fault.FREEZE, Fault.FULL))
    assert {event.fault for event in schedule(1, 120, SPANS, faults=wanted)} == wanted


def test_each_kind_comes_before_any_repeats() -> None:
    wanted = frozenset((Fault.FREEZE, Fault.KILL, Fault.FULL, Fault.DRAIN))
    for seed in range(20):
        events = schedule(seed, 20, SPANS, every=2.0, faults=wanted, each=True)
        assert [event.at for event in events] == [1, 3, 5, 7, 9, 11, 13, 15]
        assert {event.fault for event in events[:4]} == wanted
        assert {event.fault for event in events[4:]} == wanted


@pytest.mark.parametrize("fault", (Fault.GATEWAY_FREEZE, Fault.GATEWAY_CUT_OFF))
def test_lost_gateway_outlasts_its_lease(fault: Fault) -> None:
    wanted = frozenset((fault,))
    events = schedule(1, 300, SPANS, gateways=(GATEWAY, "gateway-2"), faults=wanted)
    longer = [event for event in events if event.seconds > LEASE_SECONDS]
    assert len(longer) > len(events) - 10, "but the last ones, when the run ends before"
    assert {event.targets[0] for event in events} == {GATEWAY, "gateway-2"}


def test_a_single_span_has_links_with_the_gateway_only() -> None:
    events = schedule(3, 300, (("a", "b"),), faults=FRAMES)
    assert events
    assert all(GATEWAY in event.targets for event in events)
