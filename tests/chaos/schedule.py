"""The faults of a run and their times: a pure function of the seed, the length of the run and the server names.

Made by `__main__.py`, carried out by `faults.py`. Knows no processes and no clock: a failing seed gives the same
schedule again.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from typing_extensions import override

GATEWAY = "gateway"
LEASE_SECONDS = 4.0  # a lost gateway's sessions are freed after two of them at most
FIRST_AT = 1.0  # seconds; the streams have begun by then
QUIET = 0.15  # share of the run, at its end: all faults end while the streams still run
LONGEST_QUIET = 5.0
BOTH_LOST = 0.12  # share of kills: all servers of the span at once, so that its sessions are held


class Fault(enum.StrEnum):
    KILL = "kill"  # SIGKILL; another one is started in its place
    LEAVE = "leave"  # SIGTERM: graceful stop; another one is started in its place
    DRAIN = "drain"  # its sessions migrate; later the drain is undone
    FREEZE = "freeze"  # SIGSTOP, later SIGCONT
    SLOW_DISK = "slow-disk"  # short stops, again and again, like a process that waits for a disk
    ONE_WAY = "one-way"  # no frame arrives in one direction
    CUT_OFF = "cut-off"  # no frame arrives in either direction
    DELAY = "delay"  # every byte arrives later
    SLOW_LINK = "slow-link"  # few bytes per second
    TRUNCATE = "truncate"  # half a frame, then a reset of the connection
    DOUBLE = "double"  # frames arrive twice
    FULL = "full"  # other requests take the free pages
    GATEWAY_KILL = "gateway-kill"
    GATEWAY_FREEZE = "gateway-freeze"  # SIGSTOP for longer than its lease, so that others may take over; then SIGCONT
    GATEWAY_CUT_OFF = "gateway-cut-off"  # no frame to or from any server for longer than its lease


FRAMES = frozenset(
    (
        *(Fault.ONE_WAY, Fault.CUT_OFF, Fault.DELAY, Fault.SLOW_LINK, Fault.TRUNCATE, Fault.DOUBLE),
        Fault.GATEWAY_CUT_OFF,
    )
)
"""Faults of links. They have an effect on the frames that pass meanwhile."""


@dataclass(frozen=True, slots=True)
class Event:
    at: float  # seconds since the start
    fault: Fault
    targets: tuple[str, ...]  # servers; of links: the sender and its receivers
    seconds: float = 0.0  # until the fault ends
    amount: float = 0.0  # seconds of delay, bytes per second, share of frames, requests

    @override
    def __str__(self) -> str:
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        amount = f" ({self.amount:g})" if self.amount else ""
        return f"@{self.at:6.2f} {self.fault} {' > '.join(self.targets)}{lasts}{amount}"


_WEIGHTS = {
    Fault.KILL: 5,
    Fault.LEAVE: 2,
    Fault.DRAIN: 2,
    Fault.FREEZE: 3,
    Fault.SLOW_DISK: 2,
    Fault.ONE_WAY: 3,
    Fault.CUT_OFF: 3,
    Fault.DELAY: 2,
    Fault.SLOW_LINK: 2,
    Fault.TRUNCATE: 3,
    Fault.DOUBLE: 3,
    Fault.FULL: 1,
    Fault.GATEWAY_KILL: 1,
    Fault.GATEWAY_FREEZE: 1,
    Fault.GATEWAY_CUT_OFF: 1,
}
_SECONDS = {  # shortest and longest duration
    Fault.DRAIN: (2.0, 5.0),
    Fault.FREEZE: (0.5, 4.0),
    Fault.SLOW_DISK: (1.0, 3.0),
    Fault.ONE_WAY: (0.5, 6.0),
    Fault.CUT_OFF: (0.5, 6.0),
    Fault.DELAY: (1.0, 4.0),
    Fault.SLOW_LINK: (1.0, 4.0),
    Fault.DOUBLE: (2.0, 5.0),
    Fault.FULL: (1.0, 3.0),
    **dict.fromkeys(
        (Fault.GATEWAY_FREEZE, Fault.GATEWAY_CUT_OFF), (LEASE_SECONDS + 1.0, 2.5 * LEASE_SECONDS)
    ),
}
_AMOUNTS: dict[Fault, tuple[float, ...]] = {
    Fault.DELAY: (0.02, 0.1, 0.3),
    Fault.SLOW_LINK: (20_000, 100_000),
    Fault.DOUBLE: (0.5, 1.0),
    Fault.FULL: (4, 8),
}


def schedule(
    seed: int,
    seconds: float,
    spans: tuple[tuple[str, ...], ...],
    *,
    gateways: tuple[str, ...] = (GATEWAY,),
    every: float = 1.5,
    faults: frozenset[Fault] = frozenset(Fault),
    each: bool = False,
) -> tuple[Event, ...]:
    """Return the events in order. `spans`: servers of each span, head first; `every`: mean seconds between two.

    `each`: exactly `every` seconds, and every kind comes before any repeats, so that a short run has them all.
    """
    rng = random.Random(f"{seed}/{seconds:g}/{spans}")
    last = seconds - min(LONGEST_QUIET, QUIET * seconds)
    kinds = [fault for fault in Fault if fault in faults]
    made: list[Event] = []
    dealt = _deal(rng, kinds) if each else _draw(rng, kinds)
    at = FIRST_AT
    while at < last:
        made.append(_event(rng, at, next(dealt), _Names(spans, gateways), last - at))
        at += every if each else rng.expovariate(1 / every)
    return tuple(made)


def _draw(rng: random.Random, kinds: Sequence[Fault]) -> Iterator[Fault]:
    """Draw kinds by weight."""
    weights = [_WEIGHTS[fault] for fault in kinds]
    while True:
        yield rng.choices(kinds, weights)[0]


def _deal(rng: random.Random, kinds: Sequence[Fault]) -> Iterator[Fault]:
    """Draw all kinds in a random order, then all of them again."""
    while True:
        yield from rng.sample(kinds, len(kinds))


@dataclass(frozen=True, slots=True)
class _Names:
    spans: tuple[tuple[str, ...], ...]
    gateways: tuple[str, ...]


def _event(rng: random.Random, at: float, fault: Fault, names: _Names, left: float) -> Event:
    shortest, longest = _SECONDS.get(fault, (0.0, 0.0))
    lasts = min(rng.uniform(shortest, longest), left)
    amount = rng.choice(_AMOUNTS.get(fault, (0.0,)))
    return Event(round(at, 3), fault, _targets(rng, fault, names), round(lasts, 3), amount)


def _targets(rng: random.Random, fault: Fault, names: _Names) -> tuple[str, ...]:
    match fault:
        case Fault.GATEWAY_KILL | Fault.GATEWAY_FREEZE | Fault.FULL:
            return (rng.choice(names.gateways),)
        case Fault.GATEWAY_CUT_OFF:
            return (rng.choice(names.gateways), *chain.from_iterable(names.spans))
        case Fault.KILL:
            span = rng.choice(names.spans)
            return span if rng.random() < BOTH_LOST else (rng.choice(span),)
        case Fault.FREEZE | Fault.SLOW_DISK | Fault.LEAVE | Fault.DRAIN:
            return (rng.choice(rng.choice(names.spans)),)
        case _:
            return _link(rng, names)


def _link(rng: random.Random, names: _Names) -> tuple[str, str]:
    """Return two linked processes in either order: a gateway and a server, or servers of adjacent spans."""
    spans = names.spans
    place = rng.randrange(len(spans))
    here, other = rng.choice(spans[place]), rng.choice(names.gateways)
    if len(spans) > 1 and rng.random() < 0.5:
        other = rng.choice(spans[(place + 1) % len(spans)])  # a ring: the head follows the tail
    return (here, other) if rng.random() < 0.5 else (other, here)
