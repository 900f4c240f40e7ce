"""When the sessions of a server go over to their copies (R13): together, each at rest and with all its positions.

One by one, they would long be divided among two servers, in steps that are half empty. Used by `moves.py`; decides, and
orders nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from modelswarm_gateway.core.migration.migration import Move, behind

NEAR = 2  # positions that a copy may lack when its session is told to come to rest
WAVE_SECONDS = 10.0  # a copy that is near waits no longer for the others of its wave
REST_SECONDS = 3.0  # ... and then no longer for its session to come to rest
LAST_SECONDS = 0.1  # ... and then for its last positions, which may wait for a step of the copy
VAIN_SECONDS = 0.3  # a session rests no longer for a copy that has fallen behind again


def is_near(move: Move) -> bool:
    return behind(move) <= NEAR


def complete(moves: Collection[Move], now: float) -> Iterator[list[Move]]:
    """Sessions that are to come to rest: all copies of their server are near, or one has waited long for the others."""
    near = [move for move in moves if move.near_at is not None and move.rest_at is None]
    for peer in dict.fromkeys(move.old.peer for move in near):
        times = [move.near_at for move in moves if move.old.peer == peer]
        since = [at for at in times if at is not None]
        if len(since) == len(times) or now - min(since) >= WAVE_SECONDS:
            yield [move for move in near if move.old.peer == peer and is_near(move)]


def goes(move: Move, now: float) -> bool:
    """Whether one that is near goes over now."""
    if move.rest_at is None:
        return False
    rested = _rested(move, now)
    if rested is None:
        return now - move.rest_at >= REST_SECONDS
    return behind(move) <= 0 or rested >= LAST_SECONDS


def in_vain(move: Move, now: float) -> bool:
    """Whether its session stands still for one that is not near any more: it had better go on, and rest later."""
    if move.rest_at is None:
        return False
    rested = _rested(move, now)
    return rested is not None and rested >= VAIN_SECONDS


def _rested(move: Move, now: float) -> float | None:
    """Seconds for which its session, which is told to, has stood still; None: it does not yet."""
    if move.still_at is None and move.session.at_rest:
        move.still_at = now
    return None if move.still_at is None else now - move.still_at
