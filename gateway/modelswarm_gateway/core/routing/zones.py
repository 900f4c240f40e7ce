"""Delays between failure domains (zones), estimated from this gateway's round trips to the servers of each.

Used by `cost_model.py`. Servers do not measure the delays between themselves. The difference of two of our round trips
is a lower bound. The defaults rank zones correctly: the same zone is near, another one is not. Knows no servers.
"""

from __future__ import annotations

# Delay in ms between two servers of one zone.
SAME_ZONE_MS = 0.5
# Delay in ms if one of the two servers declares no zone.
UNKNOWN_ZONE_MS = 0.5
# Least delay in ms between servers of two zones.
OTHER_ZONE_MS = 2.0
# Smallest change of a zone's round trip, in ms, that is reported: costs need not follow smaller ones.
MIN_CHANGE_MS = 0.5
# Share of the difference by which a longer round trip raises the estimate.
RISE = 0.02


class ZoneDelays:
    def __init__(self) -> None:
        self._shortest: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self.version = 0  # grows whenever a delay changes

    def record_round_trip(self, zone: str, ms: float) -> None:
        """Take a round trip to a server of `zone`; the shortest of the recent ones count."""
        known = self._shortest.get(zone)
        shortest = ms if known is None or ms < known else known + RISE * (ms - known)
        self._shortest[zone] = shortest
        if zone not in self._reported or abs(shortest - self._reported[zone]) >= MIN_CHANGE_MS:
            self._reported[zone] = shortest
            self.version += 1

    def nearest_ms(self, zone: str) -> float:
        """Return the round trip to the nearest server of the zone; 0 before the first measurement."""
        return self._reported.get(zone, 0.0)

    def delay_ms(self, one: str, other: str) -> float:
        """Return the delay between a server of one zone and a server of the other."""
        if not one or not other:
            return UNKNOWN_ZONE_MS
        if one == other:
            return SAME_ZONE_MS
        return max(OTHER_ZONE_MS, abs(self.nearest_ms(one) - self.nearest_ms(other)))
