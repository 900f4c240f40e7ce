"""Bounds of a schedule: the longest wait for a token, and whether a session may be begun twice.

The bound is far lower if a ring of running servers always remains. Pure; used by `run.py`. Knows which processes and
links each fault takes away, but not how a swarm reacts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chaos.schedule import Event, Fault
from support.simulator.ring_coverage import Coverage

from modelswarm_gateway.generation.session_locator import UNREACHED_SECONDS

SOON = 20.0
"""Seconds for detection, several re-routes and replays on a busy machine. Where sessions may be held, they are added to
the hold limit."""
BACK = 10.0  # seconds until a replacement of a killed process serves
_AWAY = (Fault.KILL, Fault.LEAVE, Fault.FREEZE, Fault.SLOW_DISK)
_SILENT = (Fault.ONE_WAY, Fault.CUT_OFF, Fault.GATEWAY_CUT_OFF)
_PARTED = (*_SILENT, Fault.SLOW_LINK)  # over a slow link one prompt may take the whole time


def longest_wait(
    events: Sequence[Event],
    spans: Sequence[Sequence[str]],
    gateways: Iterable[str],
    hold_seconds: float,
) -> float:
    """Return seconds. `spans`: servers of each span, head first."""
    return SOON if always_a_way(events, spans, gateways) else hold_seconds + SOON


def always_a_way(
    events: Sequence[Event], spans: Sequence[Sequence[str]], gateways: Iterable[str]
) -> bool:
    """Return True if every gateway always has a ring of servers that are all linked."""
    names = tuple(gateways)
    return all(_a_way(_during(events, event.at), spans, names) for event in events)


def forks(events: Sequence[Event], spans: Sequence[Sequence[str]], gateways: Iterable[str]) -> bool:
    """Return True if a gateway may begin another session of a name (R20, takeover).

    It does so when it received nothing from any server of a route for long enough. A killed server has no session.
    """
    parting = [event for event in events if event.fault in (*_SILENT, Fault.FREEZE)]
    names = tuple(gateways)
    return any(_forks(_through(parting, event.at), spans, names) for event in parting)


def _through(events: Iterable[Event], moment: float) -> list[Event]:
    """Return the events that last from that moment until a search gives up."""
    until = moment + UNREACHED_SECONDS
    return [each for each in events if each.at <= moment and until <= each.at + each.seconds]


def _forks(now: Sequence[Event], spans: Sequence[Sequence[str]], gateways: Sequence[str]) -> bool:
    for gateway in gateways:
        unheard = {
            name
            for event in now
            if event.fault is Fault.FREEZE or gateway in event.targets
            for name in event.targets
        }
        if all(not unheard.isdisjoint(span) for span in spans):
            return True
    return False


def _during(events: Sequence[Event], moment: float) -> list[Event]:
    return [event for event in events if event.at <= moment < event.at + _lasts(event)]


def _lasts(event: Event) -> float:
    return BACK if event.fault in (Fault.KILL, Fault.LEAVE) else event.seconds


def _a_way(now: Iterable[Event], spans: Sequence[Sequence[str]], gateways: Sequence[str]) -> bool:
    away = {name for event in now if event.fault in _AWAY for name in event.targets}
    left = {
        name: (index, index + 1)
        for index, names in enumerate(spans)
        for name in names
        if name not in away
    }
    cover = Coverage(left, len(spans), lambda: gateways)
    pairs = [
        frozenset((event.targets[0], other))
        for event in now
        if event.fault in _PARTED
        for other in event.targets[1:]
    ]
    return cover.suffices_without(()) and all(cover.part(pair) for pair in pairs)
