"""When the sessions of a server go over to their copies (R13): together, each at rest and with all its positions.

One by one, they would long be divided among two servers, in steps that are half empty. Used by `moves.py`; decides, and
orders nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from modelswarm_gateway.core.migration.migration import Migration, lag

CAUGHT_UP_LAG = 2  # positions that a copy may lack when its session is told to come to rest
BATCH_WAIT = 10.0  # a copy that is near waits no longer for the others of its wave
QUIESCE_WAIT = 3.0  # ... and then no longer for its session to come to rest
LAST_POSITIONS_WAIT = 0.1  # ... and then for its last positions, which may wait for a step of the copy
MAX_QUIESCENT = 0.3  # a session rests no longer for a copy that has fallen behind again


def is_caught_up(migration: Migration) -> bool:
    return lag(migration) <= CAUGHT_UP_LAG


def ready_batches(migrations: Collection[Migration], now: float) -> Iterator[list[Migration]]:
    """Sessions that are to come to rest: all copies of their server are near, or one has waited long for the others."""
    near = [move for move in migrations if move.caught_up_at is not None and move.quiescing_since is None]
    for peer in dict.fromkeys(move.old_hop.peer for move in near):
        times = [move.caught_up_at for move in migrations if move.old_hop.peer == peer]
        since = [at for at in times if at is not None]
        if len(since) == len(times) or now - min(since) >= BATCH_WAIT:
            yield [move for move in near if move.old_hop.peer == peer and is_caught_up(move)]


def should_cut_over(migration: Migration, now: float) -> bool:
    """Whether one that is near goes over now."""
    if migration.quiescing_since is None:
        return False
    rested = _quiescent_seconds(migration, now)
    if rested is None:
        return now - migration.quiescing_since >= QUIESCE_WAIT
    return lag(migration) <= 0 or rested >= LAST_POSITIONS_WAIT


def quiesce_expired(migration: Migration, now: float) -> bool:
    """Whether its session stands still for one that is not near any more: it had better go on, and rest later."""
    if migration.quiescing_since is None:
        return False
    rested = _quiescent_seconds(migration, now)
    return rested is not None and rested >= MAX_QUIESCENT


def _quiescent_seconds(migration: Migration, now: float) -> float | None:
    """Seconds for which its session, which is told to, has stood still; None: it does not yet."""
    if migration.quiescent_since is None and migration.session.is_quiescent:
        migration.quiescent_since = now
    return None if migration.quiescent_since is None else now - migration.quiescent_since
