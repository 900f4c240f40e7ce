"""How far failure domains are from each other: a guess from what this gateway measures to each of them.

Used by `pricing.py`. Servers do not tell what lies between them; the difference of two round trips of ours is the least
it can be, and defaults are right about what matters: the same zone is near, another is not.
"""

from __future__ import annotations

SAME_MS = 0.5  # between two servers of one zone
UNKNOWN_MS = 0.5  # where one does not say its zone
OTHER_MS = 2.0  # at least, between two zones
MOVED_MS = 0.5  # smaller changes are not worth new costs


class Zones:
    def __init__(self) -> None:
        self._near: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self.changes = 0  # grows whenever a delay is another

    def heard(self, zone: str, ms: float) -> None:
        """A round trip to a server there; the shortest of late count."""
        known = self._near.get(zone)
        near = ms if known is None or ms < known else known + 0.02 * (ms - known)
        self._near[zone] = near
        if zone not in self._told or abs(near - self._told[zone]) >= MOVED_MS:
            self._told[zone] = near
            self.changes += 1

    def near_ms(self, zone: str) -> float:
        """Round trip to the nearest server of the zone; 0 as long as nothing was heard."""
        return self._told.get(zone, 0.0)

    def delay(self, one: str, other: str) -> float:
        """Between a server of one zone and one of the other."""
        if not one or not other:
            return UNKNOWN_MS
        if one == other:
            return SAME_MS
        return max(OTHER_MS, abs(self.near_ms(one) - self.near_ms(other)))
