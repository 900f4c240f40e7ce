"""The cutover (R13, migration): sessions of one server switch to their copies together, quiescent and complete.

One by one, the sessions would be divided among two servers for long, in steps that are half empty. Used by
`migrations.py`. Decides only; sends no message.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from modelswarm_gateway.core.migration.migration import Migration, lag

# Number of positions that a copy may lack when its session is quiesced.
CAUGHT_UP_LAG = 2
# Longest time in seconds that a caught-up copy waits for the other copies of its server.
BATCH_WAIT = 10.0
# Longest time in seconds from the quiesce to a quiescent session; then it cuts over all the same.
QUIESCE_WAIT = 3.0
# Longest time in seconds that a quiescent session waits for the last positions, which may wait for a step of the copy.
LAST_POSITIONS_WAIT = 0.1
# Longest time in seconds that a session stays quiescent for a copy that has fallen behind again.
MAX_QUIESCENT = 0.3


def is_caught_up(migration: Migration) -> bool:
    return lag(migration) <= CAUGHT_UP_LAG


def ready_batches(migrations: Collection[Migration], now: float) -> Iterator[list[Migration]]:
    """Yield, by server, the migrations whose sessions are to be quiesced now.

    A batch is ready when all copies of its server have caught up, or the first has waited BATCH_WAIT for the others.
    """
    caught_up = [
        each
        for each in migrations
        if each.caught_up_at is not None and each.quiescing_since is None
    ]
    for peer in dict.fromkeys(each.old_hop.peer for each in caught_up):
        times = [each.caught_up_at for each in migrations if each.old_hop.peer == peer]
        since = [at for at in times if at is not None]
        if len(since) == len(times) or now - min(since) >= BATCH_WAIT:
            yield [each for each in caught_up if each.old_hop.peer == peer and is_caught_up(each)]


def should_cut_over(migration: Migration, now: float) -> bool:
    """True if a caught-up migration cuts over now."""
    if migration.quiescing_since is None:
        return False
    seconds = _quiescent_seconds(migration, now)
    if seconds is None:
        return now - migration.quiescing_since >= QUIESCE_WAIT
    return lag(migration) <= 0 or seconds >= LAST_POSITIONS_WAIT


def quiesce_expired(migration: Migration, now: float) -> bool:
    """True if a session has been quiescent for too long: it goes on, and is quiesced again later."""
    if migration.quiescing_since is None:
        return False
    seconds = _quiescent_seconds(migration, now)
    return seconds is not None and seconds >= MAX_QUIESCENT


def _quiescent_seconds(migration: Migration, now: float) -> float | None:
    """Return the seconds for which a quiesced session has been quiescent; None if it is not yet."""
    if migration.quiescent_since is None and migration.session.is_quiescent:
        migration.quiescent_since = now
    return None if migration.quiescent_since is None else now - migration.quiescent_since
