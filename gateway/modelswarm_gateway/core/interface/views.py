"""Read-only views of the core's servers and sessions.

Built by `core/snapshots.py`; shown by the API and by metrics. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import Heartbeat


@dataclass(frozen=True, slots=True)
class ServerView:
    """One connected server and its health."""

    peer: PeerId
    target: str
    model: str
    revision: str
    first: int
    last: int
    n_blocks: int
    own_sessions: int  # hops of this gateway on it
    drain_cause: str  # cause of its drain; empty: it is not drained
    heartbeat: Heartbeat | None
    suspected: bool = False  # silent
    ejected: bool = False  # gets no new sessions for now, except one canary
    score: float = 1.0  # health, in (0, 1]
    numerics: str = ""  # numerics class; empty: unknown
    dtype: str = ""

    @property
    def variant(self) -> tuple[str, int, str]:
        """Return what servers of one route have in common."""
        return self.revision, self.n_blocks, self.dtype


@dataclass(frozen=True, slots=True)
class HopView:
    """Blocks [first, last) on one server."""

    peer: PeerId
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session and its route."""

    session: str
    model: str
    state: str
    epoch: Epoch
    length: int
    route: tuple[HopView, ...]
    reused: int  # entries that this turn found in the head's KV
    replayed: int  # entries run again in this turn after faults
    reroutes: int = 0  # faults in turns at this gateway
    hold_reason: str = ""  # the reason why it is held; empty: it is not held
    is_reachable: bool = True  # a server of it is connected, and one always was since its last run
    newest_run_epoch: Epoch = NO_EPOCH  # the newest one that is known to have run
    waits_for_reader: bool = False  # running, and without credit until its client reads
    wanted_positions: int = 0  # on each server, by its last turn, refused or not
    crowded_servers: frozenset[PeerId] = frozenset()  # refused its turn, as their pages are taken

    @property
    def has_run(self) -> bool:
        """True if some epoch of it has run, here or at another gateway."""
        return self.newest_run_epoch != NO_EPOCH
