"""How far failure domains are from each other: a guess from what this gateway measures to each of them.

Used by `pricing.py`. Servers do not tell what lies between them; the difference of two round trips of ours is the least
it can be, and defaults are right about what matters: the same zone is near, another is not.
"""

from __future__ import annotations

SAME_ZONE_MS = 0.5  # between two servers of one zone
UNKNOWN_ZONE_MS = 0.5  # where one does not say its zone
OTHER_ZONE_MS = 2.0  # at least, between two zones
MIN_CHANGE_MS = 0.5  # smaller changes are not worth new costs


class ZoneDelays:
    def __init__(self) -> None:
        self._shortest: dict[str, float] = {}
        self._reported: dict[str, float] = {}
        self.version = 0  # grows whenever a delay is another

    def record_round_trip(self, zone: str, ms: float) -> None:
        """A round trip to a server there; the shortest of late count."""
        known = self._shortest.get(zone)
        near = ms if known is None or ms < known else known + 0.02 * (ms - known)
        self._shortest[zone] = near
        if zone not in self._reported or abs(near - self._reported[zone]) >= MIN_CHANGE_MS:
            self._reported[zone] = near
            self.version += 1

    def nearest_ms(self, zone: str) -> float:
        """Round trip to the nearest server of the zone; 0 as long as nothing was heard."""
        return self._reported.get(zone, 0.0)

    def delay_ms(self, one: str, other: str) -> float:
        """Between a server of one zone and one of the other."""
        if not one or not other:
            return UNKNOWN_ZONE_MS
        if one == other:
            return SAME_ZONE_MS
        return max(OTHER_ZONE_MS, abs(self.nearest_ms(one) - self.nearest_ms(other)))
