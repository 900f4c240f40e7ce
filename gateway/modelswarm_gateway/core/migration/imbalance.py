"""When a server has had clearly more of this gateway's sessions than its equals for long, and who should have one.

Pure; asked by `balancer.py` about groups of servers that could take each other's place. It says one thing at a time and
rests in between: what is moved shows in nobody's load at once. Knows no sessions and does not move them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

MIN_LEAD = 4  # sessions more than the lightest of its equals has ...
MIN_RATIO = 1.5  # ... and so many times as many: only then it is too many
BALANCED_LEAD = 2  # from there on one more would but turn it round
PAUSE_SECONDS = 5.0  # between two moves, however much there is to do


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that run on a server."""

    peer: PeerId
    own_sessions: int  # of this gateway
    all_sessions: float  # of all gateways, as the server says


@dataclass(frozen=True, slots=True)
class Shift:
    """One session had better go from one server to the other."""

    source: PeerId
    target: PeerId


@dataclass(slots=True)
class _Imbalance:
    """A group whose heaviest server has too much."""

    heaviest: PeerId
    since: float


class ImbalanceDetector:
    def __init__(self, seconds: float) -> None:
        """`seconds`: for how long a server has too much before anything is done; 0: nothing is ever."""
        self._seconds = seconds
        self._imbalances: dict[Hashable, _Imbalance] = {}
        self._paused_until = 0.0

    def find_shift(self, groups: Mapping[Hashable, Sequence[Load]], now: float) -> Shift | None:
        """Groups that are not given any more are forgotten."""
        found: Shift | None = None
        before, self._imbalances = self._imbalances, {}
        for group, loads in groups.items():
            shift = self._check_group(group, loads, before.get(group), now)
            found = found or shift
        return found if now >= self._paused_until else None

    def on_started(self, now: float) -> None:
        """What was asked for is under way."""
        self._paused_until = now + PAUSE_SECONDS

    def _check_group(
        self, group: Hashable, loads: Sequence[Load], before: _Imbalance | None, now: float
    ) -> Shift | None:
        if not self._seconds or len(loads) < 2:
            return None
        heavy = max(loads, key=lambda load: (load.own_sessions, load.all_sessions, load.peer))
        light = min(loads, key=lambda load: (load.all_sessions, load.own_sessions, load.peer))
        tilt = before if before is not None and before.heaviest == heavy.peer else None
        lasted = tilt is not None and now - tilt.since >= self._seconds
        if not (_is_imbalanced(heavy, light) or (lasted and _lead(heavy, light) > BALANCED_LEAD)):
            return None
        self._imbalances[group] = tilt or _Imbalance(heavy.peer, now)
        return Shift(heavy.peer, light.peer) if lasted else None


def _lead(heavy: Load, light: Load) -> float:
    """Both by our own sessions and by everybody's: what others have put there is theirs to move."""
    return min(heavy.own_sessions - light.own_sessions, heavy.all_sessions - light.all_sessions)


def _is_imbalanced(heavy: Load, light: Load) -> bool:
    return _lead(heavy, light) >= MIN_LEAD and heavy.all_sessions >= MIN_RATIO * light.all_sessions
