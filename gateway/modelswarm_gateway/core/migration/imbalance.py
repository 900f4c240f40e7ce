"""When a server has had clearly more of this gateway's sessions than its equals for long, and who should have one.

Pure; asked by `balancer.py` about groups of servers that could take each other's place. It says one thing at a time and
rests in between: what is moved shows in nobody's load at once. Knows no sessions and does not move them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

LEAD = 4  # sessions more than the lightest of its equals has ...
TIMES = 1.5  # ... and so many times as many: only then it is too many
EVEN = 2  # from there on one more would but turn it round
PAUSE_SECONDS = 5.0  # between two moves, however much there is to do


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that run on a server."""

    peer: PeerId
    own: int  # of this gateway
    all: float  # of all gateways, as the server says


@dataclass(frozen=True, slots=True)
class Shift:
    """One session had better go from one server to the other."""

    old: PeerId
    new: PeerId


@dataclass(slots=True)
class _Tilt:
    """A group whose heaviest server has too much."""

    heavy: PeerId
    since: float


class Rebalance:
    def __init__(self, seconds: float) -> None:
        """`seconds`: for how long a server has too much before anything is done; 0: nothing is ever."""
        self._seconds = seconds
        self._tilts: dict[Hashable, _Tilt] = {}
        self._rests_until = 0.0

    def look(self, groups: Mapping[Hashable, Sequence[Load]], now: float) -> Shift | None:
        """Groups that are not given any more are forgotten."""
        found: Shift | None = None
        before, self._tilts = self._tilts, {}
        for group, loads in groups.items():
            shift = self._judge(group, loads, before.get(group), now)
            found = found or shift
        return found if now >= self._rests_until else None

    def began(self, now: float) -> None:
        """What was asked for is under way."""
        self._rests_until = now + PAUSE_SECONDS

    def _judge(
        self, group: Hashable, loads: Sequence[Load], before: _Tilt | None, now: float
    ) -> Shift | None:
        if not self._seconds or len(loads) < 2:
            return None
        heavy = max(loads, key=lambda load: (load.own, load.all, load.peer))
        light = min(loads, key=lambda load: (load.all, load.own, load.peer))
        tilt = before if before is not None and before.heavy == heavy.peer else None
        lasted = tilt is not None and now - tilt.since >= self._seconds
        if not (_tilted(heavy, light) or (lasted and _lead(heavy, light) > EVEN)):
            return None
        self._tilts[group] = tilt or _Tilt(heavy.peer, now)
        return Shift(heavy.peer, light.peer) if lasted else None


def _lead(heavy: Load, light: Load) -> float:
    """Both by our own sessions and by everybody's: what others have put there is theirs to move."""
    return min(heavy.own - light.own, heavy.all - light.all)


def _tilted(heavy: Load, light: Load) -> bool:
    return _lead(heavy, light) >= LEAD and heavy.all >= TIMES * light.all
