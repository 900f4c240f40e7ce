"""The imbalance detector: a server has had clearly more of this gateway's sessions than a replica for some time.

Pure; used by `rebalancer.py` with groups of replicas. It proposes one shift at a time and pauses after it, because a
started migration does not show in the load at once. Knows no sessions and migrates none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId

# Number of sessions by which a server must exceed the least loaded replica.
MIN_LEAD = 4
# Ratio of sessions by which it must exceed that replica, too.
MIN_RATIO = 1.5
# Lead in sessions at which a group counts as balanced: one shift more would only reverse the imbalance.
BALANCED_LEAD = 2
# Time in seconds between two shifts.
PAUSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that run on a server."""

    peer: PeerId
    own_sessions: int  # of this gateway
    all_sessions: float  # of all gateways, as the server reports


@dataclass(frozen=True, slots=True)
class Shift:
    """A proposal to migrate one session from one server to another."""

    source: PeerId
    target: PeerId


@dataclass(slots=True)
class _Imbalance:
    """A group whose most loaded server has too many sessions."""

    heaviest: PeerId
    since: float


class ImbalanceDetector:
    def __init__(self, seconds: float) -> None:
        """`seconds`: time for which an imbalance must last before a shift is proposed; 0: never."""
        self._seconds = seconds
        self._imbalances: dict[Hashable, _Imbalance] = {}
        self._paused_until = 0.0

    def find_shift(self, groups: Mapping[Hashable, Sequence[Load]], now: float) -> Shift | None:
        """Return a shift for one of the groups, or None. Groups that are missing here are forgotten."""
        found: Shift | None = None
        before, self._imbalances = self._imbalances, {}
        for group, loads in groups.items():
            shift = self._check_group(group, loads, before.get(group), now)
            found = found or shift
        return found if now >= self._paused_until else None

    def on_started(self, now: float) -> None:
        """The proposed shift has started: pause."""
        self._paused_until = now + PAUSE_SECONDS

    def _check_group(
        self, group: Hashable, loads: Sequence[Load], before: _Imbalance | None, now: float
    ) -> Shift | None:
        if not self._seconds or len(loads) < 2:
            return None
        heavy = max(loads, key=lambda load: (load.own_sessions, load.all_sessions, load.peer))
        light = min(loads, key=lambda load: (load.all_sessions, load.own_sessions, load.peer))
        imbalance = before if before is not None and before.heaviest == heavy.peer else None
        lasted = imbalance is not None and now - imbalance.since >= self._seconds
        if not (_is_imbalanced(heavy, light) or (lasted and _lead(heavy, light) > BALANCED_LEAD)):
            return None
        self._imbalances[group] = imbalance or _Imbalance(heavy.peer, now)
        return Shift(heavy.peer, light.peer) if lasted else None


def _lead(heavy: Load, light: Load) -> float:
    """Return the lead by this gateway's sessions and by all: those of other gateways are theirs to migrate."""
    return min(heavy.own_sessions - light.own_sessions, heavy.all_sessions - light.all_sessions)


def _is_imbalanced(heavy: Load, light: Load) -> bool:
    return _lead(heavy, light) >= MIN_LEAD and heavy.all_sessions >= MIN_RATIO * light.all_sessions
