"""Session takeover (R20): searches for sessions that are not on this gateway, their owner, and what servers hold.

Used by `gateway.py`. A search asks all servers of a model and emits a SessionLocation; a fetch brings one log copy.
Decides neither whether nor when to take a session over. The recovery loop fences the hops that were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from modelswarm.protocol.identity import NO_EPOCH, Epoch, PeerId
from modelswarm.protocol.messages import (
    FindSession,
    Lane,
    LogChunk,
    LogRequest,
    Send,
    SessionInfo,
    Turn,
    reply_address,
)
from modelswarm.protocol.opaque import split_rows
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import FetchedLog, LogHolder, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings


@dataclass(slots=True)
class _Search:
    until: float
    unanswered: set[PeerId]  # asked, no answer yet
    disconnected: set[PeerId]  # known, but without a link: not waited for
    search_id: int  # answers to an earlier search are outdated
    answers: dict[PeerId, SessionInfo] = field(default_factory=dict)


@dataclass(slots=True)
class _Fetch:
    holder: LogHolder
    until: float
    total: int = 0
    turn: Turn | None = None
    tokens: list[int] = field(default_factory=list)
    opaque: dict[int, bytes] = field(default_factory=dict)


class SessionSearch:
    """Searches and log fetches in progress, by session."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, emit: Callable[[Effect], None]
    ) -> None:
        self._settings = settings
        self._peer = peer
        self._emit = emit
        self._searches: dict[str, _Search] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._last_search_id = 0

    def start_search(
        self,
        session: str,
        servers: Iterable[PeerId],
        disconnected: Iterable[PeerId],
        claims: bool,
        now: float,
    ) -> None:
        """Ask `servers`. A SessionLocation follows even without answers. `disconnected` servers cannot be asked."""
        self._last_search_id += 1
        until = now + self._settings.search_seconds
        search = _Search(until, set(servers), set(disconnected), self._last_search_id)
        self._searches[session] = search
        find = FindSession(session, claims, search.search_id)
        for peer in sorted(search.unanswered):
            self._emit(Send(reply_address(peer), Lane.LIVE, find))
        self._finish_if_complete(session, now)

    def fetch_log(self, session: str, holder: LogHolder, now: float) -> None:
        """Request the log copy of `holder`. A FetchedLog follows in any case."""
        self._fetches[session] = _Fetch(holder, now + self._settings.log_fetch_seconds)
        request = LogRequest(session, holder.epoch)
        self._emit(Send(reply_address(holder.peer), Lane.LIVE, request))

    def on_session_info(self, peer: PeerId, found: SessionInfo, now: float) -> None:
        search = self._searches.get(found.session)
        if search is not None and peer in search.unanswered and found.search_id == search.search_id:
            search.unanswered.discard(peer)
            search.answers[peer] = found
            self._finish_if_complete(found.session, now)

    def on_log_chunk(self, peer: PeerId, chunk: LogChunk, now: float) -> None:
        """Take the next part of a log. `log_fetch_seconds` limit the time from part to part."""
        fetch = self._fetches.get(chunk.session)
        if fetch is None or fetch.holder.peer != peer or (fetch.turn is None and chunk.start):
            return  # of a fetch that was given up
        fetch.until = now + self._settings.log_fetch_seconds
        if fetch.turn is None:
            fetch.total, fetch.turn = chunk.total, chunk.turn
        other = chunk.epoch != fetch.holder.epoch  # a third gateway has fenced it since
        opaque = split_rows(chunk.start, chunk.tokens, chunk.rows)
        wrong = opaque is None or chunk.start != len(fetch.tokens)
        if other or wrong or fetch.turn is None:
            self._fail_fetch(chunk.session)
            return
        fetch.tokens += chunk.tokens
        fetch.opaque |= opaque or {}
        if len(fetch.tokens) >= fetch.total:
            del self._fetches[chunk.session]
            tokens = tuple(fetch.tokens[: fetch.total])
            self._emit(FetchedLog(chunk.session, chunk.epoch, tokens, fetch.turn, fetch.opaque))

    def forget_peer(self, peer: PeerId, now: float) -> None:
        for session, search in list(self._searches.items()):
            if peer in search.unanswered or search.answers.pop(peer, None) is not None:
                search.unanswered.discard(peer)
                search.disconnected.add(peer)
            self._finish_if_complete(session, now)
        for session in [name for name, fetch in self._fetches.items() if fetch.holder.peer == peer]:
            self._fail_fetch(session)

    def expire(self, now: float) -> None:
        for session in list(self._searches):
            self._finish_if_complete(session, now)
        for session in [name for name, fetch in self._fetches.items() if now >= fetch.until]:
            self._fail_fetch(session)

    def _finish_if_complete(self, session: str, now: float) -> None:
        search = self._searches[session]
        if search.unanswered and now < search.until:
            return
        del self._searches[session]
        unanswered = tuple(sorted(search.unanswered | search.disconnected))
        claimants = [found.claimant for found in search.answers.values()]
        where = locate_session(session, self._peer, search.answers)
        self._emit(replace(where, unanswered=unanswered, claimant=max(claimants, default="")))

    def _fail_fetch(self, session: str) -> None:
        del self._fetches[session]
        self._emit(FetchedLog(session, NO_EPOCH, (), None))


def locate_session(session: str, me: PeerId, answers: dict[PeerId, SessionInfo]) -> SessionLocation:
    """Combine the servers' answers into one location.

    If an owner is alive, it keeps the session. Otherwise the result has the hops that have followed the epoch that ran
    last. Later epochs may have truncated the log, and generated nothing that a client could have read. Of older routes
    only the epochs and leases count, because their hops may have been rewound since.
    """
    held = {peer: found for peer, found in answers.items() if found.hops and found.owner != me}
    highest = max((found.epoch for found in answers.values()), default=NO_EPOCH)
    if not held:
        return SessionLocation(session, highest)
    alive = [found for found in held.values() if found.owner_linked]
    if alive:
        owner = max(alive, key=_rank)
        return SessionLocation(session, highest, owner.owner, owner.target, is_owner_alive=True)
    newest = max(answers.values(), key=_rank)
    if newest.owner == me:  # it ended here
        return SessionLocation(session, highest)
    wait = max(found.lease_ms - found.owner_silent_ms for found in held.values()) / 1000
    logs: list[tuple[int, Epoch, PeerId]] = []
    for ran in sorted({found.last_started or NO_EPOCH for found in held.values()}, reverse=True):
        parts = [
            (peer, hop)
            for peer, found in held.items()
            for hop in found.hops
            if ran in (found.last_started, hop.epoch)
        ]
        logs = [(hop.log, hop.epoch, peer) for peer, hop in parts if hop.log]
        if logs:  # an epoch whose log has not arrived anywhere has generated nothing
            break
    if ran == NO_EPOCH:  # it never ran; its owner may still start it
        return SessionLocation(session, highest, takeover_wait=max(0.0, wait))
    logs.sort(key=lambda log: log[:2], reverse=True)
    return SessionLocation(
        session,
        highest,
        owner=newest.owner,
        takeover_wait=max(0.0, wait),
        last_started=ran,
        hops=tuple(parts),
        log_holders=tuple(dict.fromkeys(LogHolder(peer, epoch) for _, epoch, peer in logs)),
    )


def _rank(found: SessionInfo) -> tuple[Epoch, Epoch]:
    return found.last_started or NO_EPOCH, found.epoch
