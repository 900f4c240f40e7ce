"""Delays between zones, from the round trips of one gateway."""

from __future__ import annotations

from modelswarm_gateway.core.routing.zones import (
    MIN_CHANGE_MS,
    OTHER_ZONE_MS,
    RISE,
    SAME_ZONE_MS,
    UNKNOWN_ZONE_MS,
    ZoneDelays,
)


def test_delay_is_the_difference_of_two_round_trips() -> None:
    delays = ZoneDelays()
    delays.record_round_trip("near", 3.0)
    delays.record_round_trip("far", 40.0)
    assert delays.delay_ms("near", "far") == delays.delay_ms("far", "near") == 37.0


def test_delay_without_a_clear_difference_has_its_default() -> None:
    delays = ZoneDelays()
    delays.record_round_trip("a", 3.0)
    delays.record_round_trip("b", 3.5)
    assert delays.delay_ms("a", "b") == delays.delay_ms("new", "other") == OTHER_ZONE_MS
    assert delays.delay_ms("a", "a") == SAME_ZONE_MS
    assert delays.delay_ms("", "a") == delays.delay_ms("a", "") == UNKNOWN_ZONE_MS


def test_longer_round_trip_raises_the_estimate_slowly() -> None:
    delays = ZoneDelays()
    delays.record_round_trip("a", 10.0)
    delays.record_round_trip("a", 20.0)
    assert delays.nearest_ms("a") == 10.0, f"{RISE * 10:g} ms are less than {MIN_CHANGE_MS:g}"
    assert delays.version == 1
    delays.record_round_trip("a", 60.0)
    assert 11.0 < delays.nearest_ms("a") < 12.0
    delays.record_round_trip("a", 4.0)
    assert (delays.nearest_ms("a"), delays.version) == (4.0, 3)
