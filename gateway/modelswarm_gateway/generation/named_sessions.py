"""Named sessions: kept between requests, because the client named them by `session_id`.

Used by the service. A kept session is parked in the core and holds KV pages. So the number and the idle time of kept
sessions are bounded, and the longest idle one is evicted when room is short. Does not know a session's content.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from modelswarm.protocol.identity import PeerId, session_wire_name
from modelswarm_gateway.backend.protocol import TurnBackend
from modelswarm_gateway.errors import ApiError, Code

SessionKey = tuple[str, str]
"""(model, session_id as the client wrote it)"""


def wire_name(key: SessionKey) -> str:
    """Return the session's name in the protocol. Every gateway derives the same name; any client string is allowed."""
    return session_wire_name(*key)


@dataclass(slots=True)
class _Kept:
    session: str  # the core's name
    busy: bool
    idle_since: float
    ttl: float = (
        0.0  # seconds for which it is kept without a turn, whatever room is short; 0: as all others
    )


class NamedSessions:
    def __init__(
        self,
        open_session: Callable[[SessionKey, int], str],
        close_session: Callable[[str], None],
        clock: Callable[[], float],
        *,
        limit: int,
        idle_seconds: float,
    ) -> None:
        self._open, self._close, self._clock = open_session, close_session, clock
        self._limit, self._idle_seconds = limit, idle_seconds
        self._kept: OrderedDict[SessionKey, _Kept] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def has_session(self, key: SessionKey) -> bool:
        return key in self._kept

    def is_busy(self, key: SessionKey) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.busy

    def session_name(self, key: SessionKey) -> str:
        """Return the core's name of a kept session."""
        return self._kept[key].session

    def add_idle(self, key: SessionKey, session: str, ttl: float = 0.0) -> None:
        """Add a session that is open and idle."""
        if len(self._kept) >= self._limit:
            self.evict_idle()
        self._kept[key] = _Kept(session, False, self._clock(), ttl)

    def set_ttl(self, key: SessionKey, ttl: float) -> None:
        self._kept[key].ttl = ttl

    def seconds_left(self, key: SessionKey) -> float | None:
        """Return the time until the session is dropped; None during a turn."""
        kept = self._kept[key]
        ttl = kept.ttl or self._idle_seconds
        return None if kept.busy else ttl - (self._clock() - kept.idle_since)

    def acquire(
        self, key: SessionKey, epoch_floor: int = 0, spared: SessionKey | None = None
    ) -> str:
        """Return the core's name of the session, opened if needed. It is busy until `release` or `drop_session`.

        `epoch_floor`: highest epoch of that name at other gateways. `spared`: not dropped to make room. Raise ApiError
        if it is busy or there is no room.
        """
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= self._limit and not self.evict_idle(spared=spared):
                raise ApiError(
                    Code.NO_CAPACITY,
                    f"all {self._limit} named sessions are in use; try again later",
                    param="session_id",
                    retry_after=1.0,
                )
            kept = self._kept[key] = _Kept(self._open(key, epoch_floor), True, 0.0)
            return kept.session
        if kept.busy:
            raise self.busy_error(key)
        kept.busy = True
        self._kept.move_to_end(key)
        return kept.session

    @staticmethod
    def busy_error(key: SessionKey) -> ApiError:
        return ApiError(
            Code.SESSION_BUSY,
            f"the session {key[1]!r} is still answering its last request",
            param="session_id",
            retry_after=1.0,
        )

    def release(self, key: SessionKey) -> None:
        """Keep the session, idle, after its turn."""
        kept = self._kept[key]
        kept.busy, kept.idle_since = False, self._clock()
        self._kept.move_to_end(key)

    def drop_session(self, key: SessionKey) -> None:
        """Close the session and forget it."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._close(kept.session)

    def evict_idle(self, spared: SessionKey | None = None) -> bool:
        """Drop the session that has been idle for longest; return False if none is idle.

        Sessions that were opened with a ttl are not dropped: their room is reserved. Nor is `spared`, from which the
        session that needs the room is forked.
        """
        key = next(self.evictable_keys(spared), None)
        if key is not None:
            self.drop_session(key)
        return key is not None

    def evictable_keys(self, spared: SessionKey | None = None) -> Iterator[SessionKey]:
        """Yield the sessions that `evict_idle` may drop, the one that has been idle for longest first."""
        for key, kept in self._kept.items():
            if key != spared and not kept.busy and not kept.ttl:
                yield key

    def evict_expired(self) -> None:
        """Drop the sessions that have been idle for too long. Call it periodically."""
        for key in list(self._kept):
            left = self.seconds_left(key)
            if left is not None and left <= 0:
                self.drop_session(key)


class Evictions:
    """Evicts idle sessions for one turn that servers refused for lack of pages, and no more than can help it.

    A session is only dropped for a server whose pages are taken, as it said. It is the last one there when as many
    positions were freed as the turn reserves: what is missing then belongs to others.
    """

    def __init__(self, backend: TurnBackend, sessions: NamedSessions) -> None:
        self._backend, self._sessions = backend, sessions
        self._freed: Counter[PeerId] = Counter()  # positions

    def evict_for(self, session: str, spared: SessionKey | None) -> bool:
        """Drop one idle session for the turn of `session`; return False if none would help.

        It may be of another model: adapters of one model have the same servers.
        """
        turn = self._backend.session(session)
        if turn is None:
            return False
        freed, needed = self._freed, turn.wanted_positions
        short = {peer for peer in turn.crowded_servers if freed[peer] < needed}
        for key in self._sessions.evictable_keys(spared) if short else ():
            kept = self._backend.session(self._sessions.session_name(key))
            peers = {hop.peer for hop in kept.route} if kept else set()
            if kept and peers & short:
                # A hop has at least one page, and pages for its KV.
                freed.update(dict.fromkeys(peers, max(1, kept.length - 1)))
                self._sessions.drop_session(key)
                return True
        return False
